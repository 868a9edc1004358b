// The softmax link and its adjoints where a row of scores fits into one or two vectors: rows stay in registers.
#pragma once

#include "common/index.h"
#include "cpu/detail/rows.h"

namespace crowdnal::cpu {

template <class T>
inline bool is_small(const Shape& shape) {
  return shape.cols <= 2 * kLanes<T>;
}

template <class T>
struct MixInput {
  const T* scores;       // [B, rows]
  const T* confusion;    // [R, rows, cols]
  const T* shared;       // [B, cols] or null
  const T* mixing;       // [nnz] or null: the share of `shared`, 1 - mixing of the rest
  const int64_t* label;  // [nnz]; null: the scores themselves, not their softmax
};

// Annotations begin..end-1: out[n] = scores_i W_r + shared_i [nnz, cols] (or mixed); with labels softmax of that, and
// nll[n] = -log out[n, label_n].
template <class T>
void mix_small(const MixInput<T>& input, const Index& index, const Shape& shape, int64_t begin, int64_t end, T* out,
               T* nll);

// Items begin..end-1: out[i, c] = sum_{n of i} sum_k W_r[c, k] grad[n, k]        out: [B, rows]
template <class T>
void items_small(const GradRows<T>& grad, const T* confusion, const Index& index, const Shape& shape, int64_t begin,
                 int64_t end, T* out);

// Annotations order[first..last-1], of one annotator: out[c, k] = sum_n scores[item_n, c] grad[n, k]
template <class T>
void outer_small(const GradRows<T>& grad, const T* scores, const Index& index, const Shape& shape, int64_t first,
                 int64_t last, T* out);

}  // namespace crowdnal::cpu
