// The seam between torch tensors and the CUDA kernels: checked pointers and outputs of one call of an op.
// What the index tensors hold is not checked here, which would wait for the device: the kernels assert it.
#pragma once

#include <deque>

#include "cuda/detail/device.h"

namespace crowdnal::cuda {

class Op : public Device {
 public:
  // `like`: one of the inputs; the op runs on its device and on the current stream of that.
  explicit Op(const Tensor& like) : Device(like), like_(like) {}

  template <class T>
  const T* values(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return pointer<T>(keep(check_values(here(tensor, name), name, like_, sizes)));
  }
  template <class T>
  const T* values(const OptionalTensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return tensor ? values<T>(*tensor, name, sizes) : nullptr;
  }
  template <class E>
  const E* matrices(const Tensor& confusion) {
    return pointer<E>(keep(check_confusion(here(confusion, "confusion"))));
  }
  // Of the dtype of `like` itself.
  template <class E>
  const E* stored(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return pointer<E>(keep(check_stored(here(tensor, name), name, like_.scalar_type(), sizes)));
  }
  const int64_t* longs(const Tensor& tensor, const char* name, int64_t size) {
    return pointer<int64_t>(keep(check_long(here(tensor, name), name, size)));
  }
  Index index(const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order) {
    const int64_t nnz = length(annotator, "annotator"), num_items = count_items(indptr);
    return {longs(indptr, "indptr", num_items + 1),
            longs(item, "item", nnz),
            longs(annotator, "annotator", nnz),
            longs(order, "order", nnz),
            num_items,
            nnz};
  }

  // Not initialised, on the device of `like` and of the dtype that it is computed in.
  Tensor empty(std::initializer_list<int64_t> sizes) const {
    return is_half(like_) ? make(sizes, aoti_torch_dtype_float32()) : empty_stored(sizes);
  }
  // Of the dtype of `like` itself.
  Tensor empty_stored(std::initializer_list<int64_t> sizes) const {
    int32_t dtype;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like_.get(), &dtype));
    return make(sizes, dtype);
  }

 private:
  using Device::make;
  Tensor make(std::initializer_list<int64_t> sizes, int32_t dtype) const {
    int64_t strides[4], count = 1, d = static_cast<int64_t>(sizes.size());
    for (auto size = sizes.end(); size != sizes.begin();) {
      strides[--d] = count;
      count *= std::max<int64_t>(1, *--size);
    }
    return make(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype);
  }
  const Tensor& here(const Tensor& tensor, const char* name) const {
    STD_TORCH_CHECK(has(tensor), "crowdnal: ", name, " is not on the device of the other arguments");
    return tensor;
  }
  const Tensor& keep(Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  Tensor like_;
  std::deque<Tensor> kept_;
};

// The upstream of a loss that is made with its gradients.
inline Tensor one_like(const Tensor& loss) {
  Tensor one = torch::stable::empty_like(loss);
  return torch::stable::fill_(one, 1.0);
}

// Null for what is not wanted.
template <class T>
T* output_if(bool wanted, Tensor& tensor) {
  return wanted ? output<T>(tensor) : nullptr;
}

}  // namespace crowdnal::cuda
