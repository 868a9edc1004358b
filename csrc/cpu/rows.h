// Loops over one annotation or a few of one annotator: the inner kernels of every op, cloned for newer processors.
// Up to 16 columns they are compiled for each number of columns, with a row in registers.
#pragma once

#include <cstdint>

namespace crowdnal::cpu {

// Annotations of one annotator that share a pass over its matrix, where a matrix is large.
constexpr int64_t kGroup = 8;
constexpr int64_t kSmall = 16;

// out[k] = (shared[k] or 0) + sum_c scores[c] matrix[c, k]
template <class T>
void mix_row(const T* scores, const T* matrix, const T* shared, T* out, int64_t rows, int64_t cols);

// out[c] += sum_k matrix[c, k] grad[k]
template <class T>
void add_matrix_row(const T* matrix, const T* grad, T* out, int64_t rows, int64_t cols);

// out[c, k] += scores[c] grad[k]
template <class T>
void add_outer(const T* scores, const T* grad, T* out, int64_t rows, int64_t cols);

// Rows of different annotations that share the lanes of a vector where rows are short.
constexpr int64_t kLanes = 16;
static_assert(kGroup <= kLanes, "a group is finished at once");

// h = softmax(h) in place for `count` <= kLanes rows of `cols`, and logsumexp(h). All -infinity: 0 and -infinity.
template <class T>
void softmax_rows(T* const* h, T* log_sums, int64_t count, int64_t cols);

// mix_row, add_matrix_row and add_outer for `count` <= kGroup annotations of one annotator, its matrix read once.
// mix_group adds to `out`.
template <class T>
void mix_group(const T* const* scores, const T* matrix, T* const* out, int64_t count, int64_t rows, int64_t cols);

template <class T>
void add_matrix_group(const T* matrix, const T* const* grad, T* const* out, int64_t count, int64_t rows, int64_t cols);

template <class T>
void add_outer_group(const T* const* scores, const T* const* grad, T* out, int64_t count, int64_t rows, int64_t cols);

}  // namespace crowdnal::cpu
