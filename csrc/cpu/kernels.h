// The CPU kernels (raw pointers, no torch tensors) that more than one op uses.
// One owner per output element and a fixed order of every sum: results do not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/index.h"
#include "cpu/tensors.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

// Tasks of `cost` multiply-adds each are worth another thread from this many on.
inline int64_t grain(int64_t cost) { return std::max<int64_t>(1, 131072 / std::max<int64_t>(1, cost)); }

// out[n, k] = (shared[item_n, k] or 0, or mixed) + sum_c scores[item_n, c] confusion[annotator_n, c, k]        out: [nnz, cols]
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

// Calls body(run, end) for a share of the runs of one annotator in `order`: run r is at positions runs[r]..runs[r + 1]-1,
// and never split.
template <class Body>
void for_each_share(const Index& index, const Runs& runs, int64_t grain_size, const Body& body) {
  parallel_for(0, index.nnz, grain_size, [&](int64_t begin, int64_t end) {
    const auto first = std::lower_bound(runs.begin(), runs.end() - 1, begin);
    const auto last = std::lower_bound(first, runs.end() - 1, end);
    body(first - runs.begin(), last - runs.begin());
  });
}

// Calls body(run, first, last) for every run: positions first..last-1.
template <class Body>
void for_each_run(const Index& index, const Runs& runs, int64_t grain_size, const Body& body) {
  for_each_share(index, runs, grain_size, [&](int64_t run, int64_t end) {
    for (; run < end; ++run) body(run, runs[run], runs[run + 1]);
  });
}

// Where the matrices of the runs go: one an annotator, zero for those without annotations.
// Every element is written once; `out` need not be zeroed.
template <class T>
struct MatricesOut {
  T* out;
  const Index& index;
  const Runs& runs;
  const Shape& shape;

  int64_t annotator(int64_t run) const { return index.annotator[index.order[runs[run]]]; }
  void zero(int64_t from, int64_t to) const { std::fill(out + from * shape.matrix(), out + to * shape.matrix(), T(0)); }

  // The run's matrix, after zeros for the annotators between the run before and this one (and behind the last).
  T* operator()(int64_t run) const {
    const int64_t here = annotator(run);
    zero(run == 0 ? 0 : annotator(run - 1) + 1, here);
    if (run + 2 == static_cast<int64_t>(runs.size())) zero(here + 1, shape.num_annotators);
    return out + here * shape.matrix();
  }
  // What there is to do without annotations.
  void finish() const {
    if (runs.size() == 1) zero(0, shape.num_annotators);
  }
};

}  // namespace crowdnal::cpu
