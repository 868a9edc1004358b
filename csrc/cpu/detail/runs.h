// Loops over the annotations of one annotator after the other, in threads, and where their matrices go.
// One owner per output element and a fixed order of every sum: results do not depend on the threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/index.h"
#include "cpu/detail/tensors.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

// Tasks of `cost` multiply-adds each are worth another thread from this many on.
inline int64_t tasks_per_thread(int64_t cost) { return std::max<int64_t>(1, 131072 / std::max<int64_t>(1, cost)); }

// Calls body(run, end) for a share of the runs of one annotator in `order`: run r is at positions runs[r]..runs[r + 1]-1,
// and never split.
template <class Body>
void for_each_share(const Index& index, const Runs& runs, int64_t tasks, const Body& body) {
  parallel_for(0, index.nnz, tasks, [&](int64_t begin, int64_t end) {
    const auto first = std::lower_bound(runs.begin(), runs.end() - 1, begin);
    const auto last = std::lower_bound(first, runs.end() - 1, end);
    body(first - runs.begin(), last - runs.begin());
  });
}

// Calls body(run, first, last) for every run: positions first..last-1.
template <class Body>
void for_each_run(const Index& index, const Runs& runs, int64_t tasks, const Body& body) {
  for_each_share(index, runs, tasks, [&](int64_t run, int64_t end) {
    for (; run < end; ++run) body(run, runs[run], runs[run + 1]);
  });
}

// Where the matrices of the runs go: one per annotator, zero for those without annotations.
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
