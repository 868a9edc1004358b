// Checks of tensor arguments that need only sizes and dtypes, and pointers to what they hold: for every device.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <exception>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "common/half.h"
#include "common/index.h"
#include "common/math.h"

namespace crowdnal {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// What crowdnal/ops/_declare.py makes torch.OutOfMemoryError of, whose type the stable ABI cannot throw.
constexpr const char* kOutOfMemory = "CUDA out of memory. crowdnal: ";

[[noreturn]] inline void refuse_memory(int64_t dims, const int64_t* sizes) {
  std::string shape;
  for (int64_t d = 0; d < dims; ++d) shape += (d == 0 ? "" : ", ") + std::to_string(sizes[d]);
  throw std::runtime_error(kOutOfMemory + ("tried to allocate a tensor of shape [" + shape + "]"));
}

// What `copy` makes of a tensor, or torch's reason against it.
template <class Copy>
Tensor copied(const Tensor& tensor, const char* name, const Copy& copy) {
  try {
    return copy(tensor);
  } catch (const std::exception& error) {  // an expanded tensor of terabytes
    STD_TORCH_CHECK(false, tensor.is_cuda() ? kOutOfMemory : "crowdnal: ", name,
                    " cannot be made contiguous: ", error.what());
  }
}

// Without the dispatcher where there is nothing to do.
inline Tensor packed(const Tensor& tensor, const char* name) {
  if (tensor.is_contiguous()) return tensor;
  return copied(tensor, name, [](const Tensor& t) { return torch::stable::contiguous(t); });
}

// The length of a tensor of one dimension.
inline int64_t length(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.defined(), "crowdnal: ", name, " must be a tensor, got None");
  STD_TORCH_CHECK(tensor.dim() == 1, "crowdnal: ", name, " must have 1 dimension, got ", tensor.dim());
  return tensor.size(0);
}

// B of indptr [B + 1].
inline int64_t count_items(const Tensor& indptr) {
  const int64_t size = length(indptr, "indptr");
  STD_TORCH_CHECK(size > 0, "crowdnal: indptr must have shape [B + 1], so one element without items; got none");
  return size - 1;
}

inline Normalization check_normalization(int64_t value) {
  STD_TORCH_CHECK(0 <= value && value <= static_cast<int64_t>(Normalization::kSoftplus),
                  "crowdnal: normalization must be 0 (none), 1 (softmax) or 2 (softplus), got ", value);
  return static_cast<Normalization>(value);
}

// Whether a tensor of these sizes can be addressed, and its bytes counted.
inline bool fits(std::initializer_list<int64_t> sizes) {
  int64_t count = 1;
  for (int64_t size : sizes) {
    if (size < 0 || count > (int64_t(1) << 56) / std::max<int64_t>(1, size)) return false;
    count *= std::max<int64_t>(1, size);
  }
  return true;
}

// An int64 tensor [size], contiguous.
inline Tensor check_long(const Tensor& tensor, const char* name, int64_t size) {
  STD_TORCH_CHECK(tensor.defined(), "crowdnal: ", name, " must be a tensor, got None");
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, "crowdnal: ", name, " must be int64");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size, "crowdnal: ", name, " must have shape [", size, "]");
  return packed(tensor, name);
}

// What `crowdnal.Annotations.plan` gives, or nothing: int32 [nnz, 4], contiguous.
inline OptionalTensor check_plan(const OptionalTensor& plan, int64_t nnz) {
  if (!plan) return {};
  STD_TORCH_CHECK(plan->scalar_type() == ScalarType::Int, "crowdnal: plan must be int32");
  STD_TORCH_CHECK(plan->dim() == 2 && plan->size(0) == nnz && plan->size(1) == 4, "crowdnal: plan must have shape [",
                  nnz, ", 4]: it is that of other annotations");
  return packed(*plan, "plan");
}

// What is computed with a tensor of this type: single precision at least.
inline ScalarType compute_type(ScalarType type) {
  return type == ScalarType::Half || type == ScalarType::BFloat16 ? ScalarType::Float : type;
}
inline bool is_half(const Tensor& tensor) { return compute_type(tensor.scalar_type()) != tensor.scalar_type(); }

// Whether it can be computed with. `name`: what to call it.
inline void check_floating(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.defined(), "crowdnal: ", name, " must be a tensor, got None");
  const ScalarType type = compute_type(tensor.scalar_type());
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "crowdnal: ", name,
                  " must be float32 or float64 (matrices also float16 or bfloat16); convert it first");
}

// A tensor of the given dtype and sizes.
inline void check_like(const Tensor& values, const char* name, ScalarType type, std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(values.defined(), "crowdnal: ", name, " must be a tensor, got None");
  STD_TORCH_CHECK(values.scalar_type() == type, "crowdnal: ", name,
                  " must have the dtype of the matrices (float32 beside float16 and bfloat16)");
  bool same = values.dim() == static_cast<int64_t>(sizes.size());
  int64_t d = 0;
  for (int64_t size : sizes) same = same && values.size(d++) == size;
  if (!same) {
    std::string wanted;
    for (int64_t size : sizes) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
    STD_TORCH_CHECK(false, "crowdnal: ", name, " has the wrong shape, expected [", wanted, "]");
  }
}

// The same, contiguous.
inline Tensor check_stored(const Tensor& values, const char* name, ScalarType type,
                           std::initializer_list<int64_t> sizes) {
  check_like(values, name, type, sizes);
  return packed(values, name);
}

// The same, of the dtype that `like` (the matrices) is computed in.
inline Tensor check_values(const Tensor& values, const char* name, const Tensor& like,
                           std::initializer_list<int64_t> sizes) {
  return check_stored(values, name, compute_type(like.scalar_type()), sizes);
}

// Of a confusion [R, rows, cols].
inline Shape shape_of(const Tensor& confusion) {
  check_floating(confusion, "confusion");
  STD_TORCH_CHECK(confusion.dim() == 3 && confusion.size(1) > 0 && confusion.size(2) > 0,
                  "crowdnal: confusion must have 3 dimensions, with at least one class and one label");
  STD_TORCH_CHECK(fits({confusion.size(0), confusion.size(1), confusion.size(2)}), "crowdnal: confusion is too large");
  return {confusion.size(0), confusion.size(1), confusion.size(2)};
}
inline Tensor check_confusion(const Tensor& confusion) {
  shape_of(confusion);
  return packed(confusion, "confusion");
}

// Of a result [R, rows, cols] whose sizes are arguments.
inline Shape check_sizes(int64_t num_annotators, int64_t rows, int64_t cols, const char* name_of_rows) {
  STD_TORCH_CHECK(num_annotators >= 0 && rows >= 0, "crowdnal: num_annotators = ", num_annotators, " and ",
                  name_of_rows, " = ", rows, " must not be negative");
  STD_TORCH_CHECK(fits({num_annotators, rows, cols}), "crowdnal: a result of num_annotators = ", num_annotators, ", ",
                  name_of_rows, " = ", rows, " and ", cols, " columns is too large");
  return {num_annotators, rows, cols};
}

// Of a competence [R, classes, labels, latents].
inline void check_competence(const Tensor& competence) {
  check_floating(competence, "competence");
  STD_TORCH_CHECK(competence.dim() == 4 && competence.size(1) > 0 && competence.size(2) > 0 && competence.size(3) > 0,
                  "crowdnal: competence must have 4 dimensions, with at least one class, one label and one latent");
  STD_TORCH_CHECK(fits({competence.size(0), competence.size(1), competence.size(2), competence.size(3)}),
                  "crowdnal: competence is too large");
}

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
                    "crowdnal: the native kernels take float32 or float64; convert the input first");
    body(float{});
  }
}

// The same for matrices, which may be stored in half precision: `using E = decltype(zero)`.
template <class Body>
void dispatch_stored(const Tensor& matrices, const Body& body) {
  switch (matrices.scalar_type()) {
    case ScalarType::Half: return body(Half{});
    case ScalarType::BFloat16: return body(BFloat16{});
    default: dispatch(matrices, body);
  }
}

}  // namespace crowdnal
