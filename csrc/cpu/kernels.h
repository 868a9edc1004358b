// The CPU kernels (raw pointers, no torch tensors) that more than one op uses.
// One owner per output element and a fixed order of every sum: results do not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include <torch/csrc/stable/ops.h>

#include "common/index.h"
#include "cpu/rows.h"

namespace crowdnal::cpu {

// Annotations are summed in blocks of this many before they join a running total.
constexpr int64_t kBlock = 512;

// Tasks of `cost` multiply-adds each are worth another thread from this many on.
inline int64_t grain(int64_t cost) { return std::max<int64_t>(1, 65536 / std::max<int64_t>(1, cost)); }

// Large matrices are read once for all annotations of their annotator, in the order of `index.order`; with small ones
// it pays more to go through items in their own order.
inline bool by_annotator(const Shape& shape) { return shape.cols > kSmall; }

// out[n, k] = (shared[item_n, k] or 0) + sum_c scores[item_n, c] confusion[annotator_n, c, k]; then
// finish(n[], rows[], count) for at most kLanes annotations at a time.
template <class T, class Finish>
void mix(const T* scores, const T* confusion, const T* shared, T* out, const Index& index, const Shape& shape,
         const Finish& finish);

// out[i, c] = sum_{n of item i} sum_k grad[n, k] confusion[annotator_n, c, k]        out: [B, rows]
template <class T>
void mix_items(const T* grad, const T* confusion, T* out, const Index& index, const Shape& shape);

// out[r, c, k] = sum_{n of annotator r} scores[item_n, c] grad[n, k]                 out: [R, rows, cols], zeroed
template <class T>
void mix_annotators(const T* scores, const T* grad, T* out, const Index& index, const Shape& shape);

// out[i, d] = sum_{n of item i} values[n, d]                                         out: [B, width]
template <class T>
void sum_items(const T* values, T* out, const Index& index, int64_t width);

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

// Calls body(n[], count) for groups of at most kGroup annotations of one annotator, positions begin..end-1 of `order`.
template <class Body>
void for_each_group(const Index& index, int64_t begin, int64_t end, const Body& body) {
  int64_t n[kGroup], count = 0;
  for (int64_t p = begin; p < end; ++p) {
    n[count++] = index.order[p];
    const bool last = p + 1 == end || index.annotator[index.order[p + 1]] != index.annotator[n[0]];
    if (last || count == kGroup) {
      body(n, count);
      count = 0;
    }
  }
}

template <class T, class Finish>
void mix(const T* scores, const T* confusion, const T* shared, T* out, const Index& index, const Shape& shape,
         const Finish& finish) {
  const int64_t rows = shape.rows, cols = shape.cols;
  torch::stable::parallel_for(0, index.nnz, grain(shape.matrix() + 8 * cols), [&](int64_t begin, int64_t end) {
    if (!by_annotator(shape)) {
      int64_t each[kLanes];
      T* h[kLanes];
      for (int64_t block = begin; block < end; block += kLanes) {
        const int64_t count = std::min(kLanes, end - block);
        for (int64_t j = 0; j < count; ++j) {
          const int64_t n = each[j] = block + j;
          h[j] = out + n * cols;
          mix_row(scores + index.item[n] * rows, confusion + index.annotator[n] * shape.matrix(),
                  shared ? shared + index.item[n] * cols : nullptr, h[j], rows, cols);
        }
        finish(each, h, count);
      }
      return;
    }
    for_each_group(index, begin, end, [&](const int64_t* n, int64_t count) {
      const T* z[kGroup];
      T* h[kGroup];
      for (int64_t j = 0; j < count; ++j) {
        z[j] = scores + index.item[n[j]] * rows;
        h[j] = out + n[j] * cols;
        if (shared) {
          std::copy_n(shared + index.item[n[j]] * cols, cols, h[j]);
        } else {
          std::fill_n(h[j], cols, T(0));
        }
      }
      mix_group(z, confusion + index.annotator[n[0]] * shape.matrix(), h, count, rows, cols);
      finish(n, h, count);
    });
  });
}

}  // namespace crowdnal::cpu
