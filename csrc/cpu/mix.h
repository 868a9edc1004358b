// What the softmax link shares with the primitives: raw pointers, no torch tensors.
#pragma once

#include "cpu/detail/tensors.h"

namespace crowdnal::cpu {

// out[n, k] = (shared[item_n, k] or 0, or mixed) + sum_c scores[item_n, c] confusion[annotator_n, c, k]  out: [nnz, cols]
// With labels: softmax of that, and nll[n] = -log out[n, label_n]. `runs` is read for large matrices only.
template <class T>
void mix(const MixInput<T>& input, const Index& index, const Runs& runs, const Shape& shape, T* out, T* nll);

// The adjoints; null where not wanted:
// items[i, c] = sum_{n of i} sum_k grad[n, k] confusion[annotator_n, c, k]                           items: [B, rows]
// matrices[r, c, k] = sum_{n of r} scores[item_n, c] grad[n, k]                           matrices: see `MatricesOut`
// each: [nnz, rows] to work in, for items and large matrices.
template <class T>
void unmix(const GradRows<T>& grad, const T* scores, const T* confusion, const Index& index, const Runs& runs,
           const Shape& shape, T* items, T* matrices, T* each);

// out[i, d] = sum_{n of item i} values[n, d]                                                         out: [B, width]
template <class T>
void sum_items(const GradRows<T>& values, const Index& index, int64_t width, T* out);

// The same of rows [nnz, padded(width)] (see small_step.h) if they are `compact`, else [nnz, width].
template <class T>
void sum_each(const T* rows, bool compact, const Index& index, int64_t width, T* out);

}  // namespace crowdnal::cpu
