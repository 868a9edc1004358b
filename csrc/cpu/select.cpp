// Matrices of some annotators, copied: what a loss with sparse gradients works on.
#include <cstring>

#include "cpu/detail/runs.h"

namespace crowdnal::cpu {
namespace {

Tensor select_op(const Tensor& confusion, const Tensor& annotators) {
  const Tensor w = check_confusion(confusion);
  const Shape shape = shape_of(w);
  const int64_t count = length(annotators, "annotators");
  const Tensor chosen = check_long(annotators, "annotators", count);
  check_range(pointer<int64_t>(chosen), count, "annotators", shape.num_annotators);
  Tensor out = empty(w, {count, shape.rows, shape.cols});
  dispatch_stored(w, [&](auto zero) {
    using E = decltype(zero);
    const int64_t bytes = shape.matrix() * static_cast<int64_t>(sizeof(E)), *which = pointer<int64_t>(chosen);
    const char* from = reinterpret_cast<const char*>(pointer<E>(w));
    char* to = reinterpret_cast<char*>(output<E>(out));
    parallel_for(0, count, tasks_per_thread(shape.matrix()), [&](int64_t begin, int64_t end) {
      // Each one is a page that no cache knows: fetch early, so that several loads are in flight.
      constexpr int64_t kAhead = 12, kLine = 64, kMost = 1024;
      for (int64_t t = begin; t < end; ++t) {
        const char* next = from + which[std::min(t + kAhead, end - 1)] * bytes;
        for (int64_t b = 0; b < std::min(bytes, kMost); b += kLine) __builtin_prefetch(next + b);
        std::memcpy(to + t * bytes, from + which[t] * bytes, bytes);
      }
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) { m.impl("select", TORCH_BOX(&select_op)); }

}  // namespace crowdnal::cpu
