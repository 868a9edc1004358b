// posterior[row] = softmax over k of term(row, k), and done(row, log of what it was divided by): a part of a warp a row,
// or a block a long one. All -infinity: 0 and -infinity.
#pragma once

#include "cuda/rows.cuh"

namespace crowdnal::cuda {

template <class T, int G, int kPer, class Term, class Done>
__global__ void __launch_bounds__(kThreads)
    posterior_kernel(Term term, Done done, int64_t count, int64_t classes, T* posterior) {
  constexpr int kGroups = kThreads / G;
  const int lane = threadIdx.x % G;
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < count; base += int64_t(gridDim.x) * kGroups) {
    const int64_t row = base + threadIdx.x / G;
    T t[kPer] = {};
    for (int j = 0; j < kPer; ++j) {
      if (row < count && lane + j * G < classes) t[j] = term(row, lane + j * G);
    }
    const T log_sum = group_softmax<G>(t, classes);
    for (int j = 0; j < kPer; ++j) {
      if (row < count && lane + j * G < classes) posterior[row * classes + lane + j * G] = t[j];
    }
    if (row < count && lane == 0) done(row, log_sum);
  }
}

// The row lies in `posterior` meanwhile; each thread reads only what it wrote.
template <class T, class Term, class Done>
__global__ void __launch_bounds__(kThreads)
    long_posterior_kernel(Term term, Done done, int64_t count, int64_t classes, T* posterior) {
  constexpr int kWarps = kThreads / kLanes;
  CROWDNAL_SHARED(T, warp_max, kWarps);
  CROWDNAL_SHARED(T, warp_sum, kWarps);
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    T* out = posterior + row * classes;
    T highest = -INFINITY;
    for (int64_t k = threadIdx.x; k < classes; k += kThreads) {
      const T t = term(row, k);
      out[k] = t;
      highest = t > highest ? t : highest;
    }
    highest = group_max<kLanes>(highest);
    if (lane == 0) warp_max[warp] = highest;
    __syncthreads();
    for (int w = 0; w < kWarps; ++w) highest = warp_max[w] > highest ? T(warp_max[w]) : highest;
    const T shift = highest == T(-INFINITY) ? T(0) : highest;
    T sum = T(0);
    for (int64_t k = threadIdx.x; k < classes; k += kThreads) {
      out[k] = std::exp(out[k] - shift);
      sum += out[k];
    }
    sum = group_sum<kLanes>(sum);
    if (lane == 0) warp_sum[warp] = sum;
    __syncthreads();
    sum = T(0);
    for (int w = 0; w < kWarps; ++w) sum += warp_sum[w];
    for (int64_t k = threadIdx.x; sum > T(0) && k < classes; k += kThreads) out[k] /= sum;
    if (threadIdx.x == 0) done(row, shift + std::log(sum));
    __syncthreads();  // the next row uses the same shared memory
  }
}

template <class T, class Term, class Done>
void posteriors(Context& context, const Term& term, const Done& done, int64_t count, int64_t classes, T* posterior) {
  const auto start = [&](auto kernel, int64_t blocks) {
    launch(context, kernel, blocks, kThreads, 0, term, done, count, classes, posterior);
  };
  if (classes <= 8) {
    start(posterior_kernel<T, 8, 1, Term, Done>, group_blocks<8>(count));
  } else if (classes <= 16) {
    start(posterior_kernel<T, 16, 1, Term, Done>, group_blocks<16>(count));
  } else if (classes <= 32) {
    start(posterior_kernel<T, 32, 1, Term, Done>, group_blocks<32>(count));
  } else if (classes <= 128) {
    start(posterior_kernel<T, 32, 4, Term, Done>, group_blocks<32>(count));
  } else {
    start(long_posterior_kernel<T, Term, Done>, count);
  }
}

}  // namespace crowdnal::cuda
