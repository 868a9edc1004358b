// The seam between torch tensors and the CUDA kernels: checked pointers and outputs of one call of an op.
// What the index tensors hold is not checked here, which would wait for the device: the kernels assert it.
#pragma once

#include <array>
#include <deque>

#include "cuda/detail/device.h"
#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

class Op : public Device {
 public:
  // `like`: one of the inputs; the op runs on its device and on the current stream of that.
  explicit Op(const Tensor& like) : Device(like), like_(like) {}

  template <class T>
  const T* values(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return pointer<T>(keep(aligned(check_values(here(tensor, name), name, like_, sizes), name)));
  }
  template <class T>
  const T* values(const OptionalTensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return tensor ? values<T>(*tensor, name, sizes) : nullptr;
  }
  // wide: whether rows are read several numbers at a time.
  template <class E>
  const E* matrices(const Tensor& confusion, bool wide = true) {
    const Tensor checked = check_confusion(here(confusion, "confusion"));
    return pointer<E>(keep(wide ? aligned(checked, "confusion") : checked));
  }
  // Of the dtype of `like` itself.
  template <class E>
  const E* stored(const Tensor& tensor, const char* name, std::initializer_list<int64_t> sizes) {
    return pointer<E>(keep(aligned(check_stored(here(tensor, name), name, like_.scalar_type(), sizes), name)));
  }
  const int64_t* longs(const Tensor& tensor, const char* name, int64_t size) {
    return pointer<int64_t>(keep(check_long(here(tensor, name), name, size)));
  }
  Index index(const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
              const OptionalTensor& plan) {
    const int64_t nnz = length(annotator, "annotator"), num_items = count_items(indptr);
    return {longs(indptr, "indptr", num_items + 1),
            longs(item, "item", nnz),
            longs(annotator, "annotator", nnz),
            longs(order, "order", nnz),
            num_items,
            nnz,
            planned(plan, nnz)};
  }
  // Null too where it is not aligned as its elements are read.
  const Planned* planned(const OptionalTensor& plan, int64_t nnz) {
    if (!plan) return nullptr;
    here(*plan, "plan");
    const Planned* at = pointer<Planned>(keep(*check_plan(plan, nnz)));
    return reinterpret_cast<uintptr_t>(at) % alignof(Planned) == 0 ? at : nullptr;
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
  // Rows are read 4 numbers at a time where sizes allow it, and the order of sums follows from that: a view that begins
  // elsewhere is copied, as one that is not contiguous is, so that results are the same bits wherever a tensor lies.
  static Tensor aligned(const Tensor& tensor, const char* name) {
    if (reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % alignof(Quad<float>) == 0) return tensor;
    return copied(tensor, name, [](const Tensor& t) { return torch::stable::clone(t); });
  }
  const Tensor& keep(Tensor tensor) { return kept_.emplace_back(std::move(tensor)); }

  Tensor like_;
  std::deque<Tensor> kept_;
};

// The upstream of a loss that is made with its gradients.
inline Tensor one_like(const Tensor& loss) {
  using torch::stable::detail::from;
  std::array<StableIValue, 6> stack{from(loss),         from(std::nullopt), from(std::nullopt),
                                    from(std::nullopt), from(std::nullopt), from(std::nullopt)};
  STD_TORCH_CHECK(!torch_call_dispatcher("aten::ones_like", "", stack.data(), TORCH_ABI_VERSION),
                  "crowdnal: no room for a number");
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// Null for what is not wanted.
template <class T>
T* output_if(bool wanted, Tensor& tensor) {
  return wanted ? output<T>(tensor) : nullptr;
}

}  // namespace crowdnal::cuda
