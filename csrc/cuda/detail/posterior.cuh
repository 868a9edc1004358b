// posterior[row] = softmax over k of what term.load(row, k, step, ..) gives, pieces of the row from k on that lie `step`
// apart, and done(row, log of what it was divided by): a part of a warp per row, or a block per long one. All -infinity:
// 0 and -infinity.
#pragma once

#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

template <class T, class L, class Term, class Done>
__global__ void __launch_bounds__(kThreads, L::kPer > 1 ? 5 : 8)
    posterior_kernel(Term term, Done done, int64_t count, int64_t classes, T* posterior) {
  constexpr int kGroups = kThreads / L::G, V = L::V;
  const int cols = static_cast<int>(classes);
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < count; base += int64_t(gridDim.x) * kGroups) {
    const int64_t row = base + threadIdx.x / L::G;
    T t[L::kOwn] = {};
    if (row < count && L::column(0) < cols) term.template load<V, L::kPer>(row, L::column(0), L::G * V, t);
    const T log_sum = group_softmax<L>(t, cols);
    for (int j = 0; j < L::kPer; ++j) {
      if (row < count && L::column(j) < cols) store<V>(t + j * V, posterior + row * cols + L::column(j));
    }
    if (row < count && threadIdx.x % L::G == 0) done(row, log_sum);
  }
}

// The row lies in `posterior` meanwhile; each thread reads only what it wrote.
template <class T, class Term, class Done>
__global__ void __launch_bounds__(kThreads, 8)
    long_posterior_kernel(Term term, Done done, int64_t count, int64_t classes, T* posterior) {
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    T* out = posterior + row * classes;
    T highest = -INFINITY;
    for (int64_t k = threadIdx.x; k < classes; k += kThreads) {
      T t;
      term.template load<1, 1>(row, k, 0, &t);
      out[k] = t;
      highest = t > highest ? t : highest;
    }
    const T log_sum = block_softmax(out, classes, highest);
    if (threadIdx.x == 0) done(row, log_sum);
  }
}

template <class T, class Term, class Done>
void posteriors(Context& context, const Term& term, const Done& done, int64_t count, int64_t classes, T* posterior) {
  if (classes > 128) {
    launch(context, long_posterior_kernel<T, Term, Done>, count, kThreads, 0, term, done, count, classes, posterior);
    return;
  }
  for_tier<T>(classes, term.alignment_bits() | alignment_bits(classes, posterior), [&](auto tier) {
    using L = decltype(tier);
    launch(context, posterior_kernel<T, L, Term, Done>, group_blocks<L::G>(count), kThreads, 0, term, done, count,
           classes, posterior);
  });
}

}  // namespace crowdnal::cuda
