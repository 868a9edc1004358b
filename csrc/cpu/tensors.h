// The seam between torch tensors and kernels: argument checks, pointers, dispatch over float and double.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <vector>

#include "common/index.h"
#include "cpu/small.h"

namespace crowdnal::cpu {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Positions in `order` where each annotator who is present begins, then nnz.
using Runs = std::vector<int64_t>;

// The four tensors that every op takes, contiguous and checked; owns what the pointers of `view` point to.
struct CheckedIndex {
  Tensor indptr, item, annotator, order;
  Index view;
  Runs runs;
};

// `runs`: the kernel walks `order`, so it must really sort.
CheckedIndex check_index(const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
                         int64_t num_annotators, int64_t num_items, bool runs);

// An int64 tensor [size], contiguous.
Tensor check_long(const Tensor& tensor, const char* name, int64_t size);

// All of them in 0..bound-1.
void check_range(const int64_t* values, int64_t count, const char* name, int64_t bound);

// Labels [nnz] in 0..num_labels-1, contiguous.
Tensor check_labels(const Tensor& label, int64_t nnz, int64_t num_labels);

// A floating tensor of the given sizes, of the dtype of `like`, contiguous.
Tensor check_values(const Tensor& values, const char* name, const Tensor& like, std::initializer_list<int64_t> sizes);

// A confusion [R, rows, cols], contiguous.
Tensor check_confusion(const Tensor& confusion);
inline Shape shape_of(const Tensor& confusion) { return {confusion.size(0), confusion.size(1), confusion.size(2)}; }

// Not initialised, of the dtype of `like`.
Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes);

template <class T>
const T* pointer(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}
template <class T>
const T* pointer(const OptionalTensor& tensor) {
  return tensor.has_value() ? pointer<T>(*tensor) : nullptr;
}
template <class T>
T* output(Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// Calls body with a value of the element type: dispatch(t, [&](auto zero) { using T = decltype(zero); ... }).
template <class Body>
void dispatch(const Tensor& tensor, const Body& body) {
  if (tensor.scalar_type() == ScalarType::Double) {
    body(double{});
  } else {
    STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Float,
                    "crowdnal: the CPU kernels take float32 or float64; convert the input first");
    body(float{});
  }
}

// Whether the softmax link reads the matrices an annotator at a time.
inline bool is_large(const Tensor& tensor, const Shape& shape) {
  return tensor.scalar_type() == ScalarType::Double ? !is_small<double>(shape) : !is_small<float>(shape);
}

}  // namespace crowdnal::cpu
