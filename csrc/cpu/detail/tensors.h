// The seam between torch tensors and the CPU kernels: checks that read what the tensors hold.
#pragma once

#include <vector>

#include "arguments.h"
#include "cpu/detail/small.h"

namespace crowdnal::cpu {

// Positions in `order` where each annotator who is present begins, then nnz.
using Runs = std::vector<int64_t>;

// The four tensors that every op takes, contiguous and checked; owns what the pointers of `view` point to.
struct CheckedIndex {
  Tensor indptr, item, annotator, order;
  OptionalTensor plan;
  Index view;
  Runs runs;
};

// `runs`: the kernel walks `order`, so it must really sort. A plan must be right, but no kernel here reads it: it saves
// less than it takes to see that.
CheckedIndex check_index(const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
                         OptionalTensor plan, int64_t num_annotators, bool runs);

// `order` [nnz] sorts the annotators stably: where each begins. Both are of nnz numbers, `annotator` in range.
Runs check_order(const int64_t* order, const int64_t* annotator, int64_t nnz, int64_t num_annotators);

// All of them in 0..bound-1.
void check_range(const int64_t* values, int64_t count, const char* name, int64_t bound);

// Labels [nnz] in 0..num_labels-1, contiguous.
Tensor check_labels(const Tensor& label, const CheckedIndex& index, int64_t num_labels);

// `matrices` [R, ...], contiguous, or if they are in half precision, those that `owner` [count] names in single
// precision; the others are not initialised, so that no memory need stand behind them.
Tensor widened(const Tensor& matrices, const int64_t* owner, int64_t count);

// Fresh memory of several megabytes is ruled by page faults: asks for large ones. A refusal changes nothing.
void use_huge_pages(void* memory, int64_t bytes);

// Not initialised, of the dtype of `like`, or int64.
Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes);
Tensor empty_long(std::initializer_list<int64_t> sizes);

// Whether the softmax link reads the matrices of one annotator at a time.
inline bool is_large(const Tensor& tensor, const Shape& shape) {
  return tensor.scalar_type() == ScalarType::Double ? !is_small<double>(shape) : !is_small<float>(shape);
}

}  // namespace crowdnal::cpu
