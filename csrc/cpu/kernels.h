// Declarations of the CPU kernels (raw pointers, no torch tensors) that more than one op uses.
// One owner per output element and a fixed order of every sum: results do not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/index.h"

namespace crowdnal::cpu {

// Annotations are summed in blocks of this many before they join a running total.
constexpr int64_t kBlock = 512;

// Tasks of `cost` multiply-adds each are worth another thread from this many on.
inline int64_t grain(int64_t cost) { return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, cost)); }

// out[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k] (+ shared[item_n, k])
template <class T>
void mix_row(const T* scores, const T* confusion, const T* shared, T* out, int64_t rows, int64_t cols) {
  if (shared) {
    std::copy_n(shared, cols, out);
  } else {
    std::fill_n(out, cols, T(0));
  }
  for (int64_t c = 0; c < rows; ++c) {
    const T z = scores[c];
    const T* w = confusion + c * cols;
    for (int64_t k = 0; k < cols; ++k) out[k] += z * w[k];
  }
}

// out[i, c] = sum_{n of item i} sum_k grad[n, k] confusion[annotator_n, c, k]        out: [B, rows]
template <class T>
void mix_items(const T* grad, const T* confusion, T* out, const Index& index, const Shape& shape);

// out[r, c, k] = sum_{n of annotator r} scores[item_n, c] grad[n, k]                 out: [R, rows, cols], zeroed
template <class T>
void mix_annotators(const T* scores, const T* grad, T* out, const Index& index, const Shape& shape);

// out[i, d] = scale * sum_{n of item i} values[n, d]                                 out: [B, width]
template <class T>
void sum_items(const T* values, T* out, T scale, const Index& index, int64_t width);

// sum_n weight[n] values[n] (weight may be null), in blocks of fixed size.
template <class T>
T weighted_sum(const T* values, const T* weight, int64_t count);

// Calls body(first, last) for every run of one annotator in `order`: positions first..last-1.
// A thread owns the runs that start in its share, so a run is never split.
template <class Body>
void for_each_annotator(const Index& index, int64_t begin, int64_t end, const Body& body) {
  const auto owner = [&](int64_t position) { return index.annotator[index.order[position]]; };
  while (begin > 0 && begin < end && owner(begin) == owner(begin - 1)) ++begin;
  while (begin < end) {
    int64_t last = begin + 1;
    while (last < index.nnz && owner(last) == owner(begin)) ++last;
    body(begin, last);
    begin = last;
  }
}

}  // namespace crowdnal::cpu
