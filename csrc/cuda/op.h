// The seam between torch tensors and the CUDA kernels: checked pointers, memory, stream and device of one call of an op.
// What the index tensors hold is not checked here, which would wait for the device: the kernels assert it.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <deque>

#include "arguments.h"
#include "cuda/launch.h"

namespace crowdnal::cuda {

class Op : public Context {
 public:
  // `like`: one of the inputs; the op runs on its device and on the current stream of that.
  explicit Op(const Tensor& like)
      : Context(current_stream(like.get_device_index())), like_(like), guard_(like.get_device_index()) {}

  template <class T>
  const T* values(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return pointer<T>(keep(check_values(here(tensor, name), name, like_, sizes)));
  }
  template <class T>
  const T* values(const OptionalTensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return tensor ? values<T>(*tensor, name, sizes) : nullptr;
  }
  template <class T>
  const T* matrices(const Tensor& confusion) {
    return pointer<T>(keep(check_confusion(here(confusion, "confusion"))));
  }
  const int64_t* longs(const Tensor& tensor, const char* name, int64_t size) {
    return pointer<int64_t>(keep(check_long(here(tensor, name), name, size)));
  }
  Index index(const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order) {
    const int64_t nnz = annotator.size(0), num_items = indptr.size(0) - 1;
    return {longs(indptr, "indptr", num_items + 1), longs(item, "item", nnz), longs(annotator, "annotator", nnz),
            longs(order, "order", nnz), num_items, nnz};
  }

  // Not initialised, of the dtype and on the device of `like`.
  Tensor empty(std::initializer_list<int64_t> sizes) {
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like_.get(), &dtype));
    return empty(sizes, dtype);
  }

 private:
  static cudaStream_t current_stream(int32_t device) {
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
  }
  const Tensor& here(const Tensor& tensor, const char* name) const {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == like_.get_device_index(), "crowdnal: ", name,
                    " is not on the device of the other arguments, cuda:", like_.get_device_index());
    return tensor;
  }
  const Tensor& keep(Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  Tensor empty(std::initializer_list<int64_t> sizes, int32_t dtype) {
    int64_t strides[4], count = 1, d = static_cast<int64_t>(sizes.size());
    for (auto size = sizes.end(); size != sizes.begin();) {
      strides[--d] = count;
      count *= std::max<int64_t>(1, *--size);
    }
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype,
                                                    aoti_torch_device_type_cuda(), like_.get_device_index(), &handle));
    return Tensor(handle);
  }

  // Freed with the op, and reused only by what follows it on its stream.
  void* allocate(int64_t bytes) override {
    return kept_.emplace_back(empty({bytes}, aoti_torch_dtype_uint8())).mutable_data_ptr();
  }

  Tensor like_;
  torch::stable::accelerator::DeviceGuard guard_;
  std::deque<Tensor> kept_;
};

// Null for what is not wanted.
template <class T>
T* output_if(bool wanted, Tensor& tensor) {
  return wanted ? output<T>(tensor) : nullptr;
}

}  // namespace crowdnal::cuda
