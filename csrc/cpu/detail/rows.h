// The rows that the adjoints of `mix` read, and loops over a few annotations of one annotator with a large matrix.
#pragma once

#include <cstdint>

#include "cpu/detail/simd.h"

namespace crowdnal::cpu {

// Rows n = u_n values_n or, with labels, u_n (values_n - onehot(label_n)): the gradient of the softmax link, made where
// it is read from the probabilities that the link kept. u_n = sign (scale weight_n + upstream_n), of which mixing_n belongs
// to the shared term (`share`) and the rest to the annotator's.
template <class T>
struct GradRows {
  const T* values;                 // [nnz, cols]
  const int64_t* label = nullptr;  // [nnz] or null
  const T* weight = nullptr;       // [nnz] or null (1)
  const T* upstream = nullptr;     // [nnz] or null (0)
  T scale = T(1);
  T sign = T(1);
  const T* mixing = nullptr;  // [nnz] or null
  bool share = false;

  CROWDNAL_INLINE T factor(int64_t n) const {
    const T u = sign * ((weight ? scale * weight[n] : scale) + (upstream ? upstream[n] : T(0)));
    return mixing ? u * (share ? mixing[n] : T(1) - mixing[n]) : u;
  }
};

// Annotations are summed in blocks of this many before they join a running total, or in double precision if there are
// more: the error does not grow with their number.
constexpr int64_t kSegmentBlock = 512;

// Annotations of one annotator that share a pass over its matrix.
constexpr int64_t kGroup = 8;

// out += row n of `grad`
template <class T>
void add_row(const GradRows<T>& grad, int64_t n, T* out, int64_t cols);

// out[i] = sum of the rows indptr[i]..indptr[i + 1]-1 of `grad`, which has nnz, for i = begin..end-1
template <class T>
void sum_segments(const GradRows<T>& grad, int64_t nnz, const int64_t* indptr, int64_t begin, int64_t end, int64_t cols,
                  T* out);

// out[n] = row n of `grad` . (shared[item_n] - own[n]), for n = begin..end-1
template <class T>
void mixing_gradient(const GradRows<T>& grad, const T* shared, const T* own, const int64_t* item, int64_t begin,
                     int64_t end, int64_t cols, T* out);

// sum_n weight[n] values[n] (weight may be null), in a fixed order.
template <class T>
T weighted_sum(const T* values, const T* weight, int64_t count);

// h = softmax(h) in place; returns logsumexp(h). All -infinity: 0 and -infinity.
template <class T>
T softmax_row(T* h, int64_t cols);

// For `count` <= kGroup annotations, the matrix [rows, cols] read once:
// out[n][k] += sum_c scores[n][c] matrix[c, k]
template <class T>
void mix_group(const T* const* scores, const T* matrix, T* const* out, int64_t count, int64_t rows, int64_t cols);

// out[n][c] = sum_k matrix[c, k] grad[n][k]
template <class T>
void matrix_group(const T* matrix, const T* const* grad, T* const* out, int64_t count, int64_t rows, int64_t cols);

// out[c, k] (+)= sum_n scores[n][c] grad[n][k]; `first`: without what was there
template <class T>
void outer_group(const T* const* scores, const T* const* grad, T* out, int64_t count, int64_t rows, int64_t cols,
                 bool first);

}  // namespace crowdnal::cpu
