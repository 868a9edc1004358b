// What the kernels share: the rows that the adjoints of `mix` read, sums over a part of a warp, softmax of a row that
// lies in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/index.h"
#include "cuda/launch.h"

namespace crowdnal::cuda {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kLanes = 32;

// Terms are summed in blocks of this many before they join a running total.
constexpr int kBlock = 32;

// Rows n = u_n values_n or, with labels, u_n (values_n - onehot(label_n)): the gradient of the softmax link, made where
// it is read from the probabilities that the link kept. u_n = sign (scale weight_n + upstream_n), of which mixing_n
// belongs to the shared term (`share`) and the rest to the annotator's.
template <class T>
struct GradRows {
  const T* values;                   // [nnz, cols]
  int64_t cols;
  const int64_t* label = nullptr;    // [nnz] or null
  const T* weight = nullptr;         // [nnz] or null (1)
  const T* upstream = nullptr;       // [nnz] or null (0)
  const T* grad_loss = nullptr;      // [] or null: scale = grad_loss / count, read on the device
  T count = T(1);
  T constant = T(1);                 // the scale without grad_loss
  T sign = T(1);
  const T* mixing = nullptr;         // [nnz] or null
  bool share = false;

  __device__ T factor(int64_t n) const {
    const T scale = grad_loss ? *grad_loss / count : constant;
    const T u = sign * ((weight ? scale * weight[n] : scale) + (upstream ? upstream[n] : T(0)));
    return mixing ? u * (share ? mixing[n] : T(1) - mixing[n]) : u;
  }
  __device__ int64_t label_of(int64_t n) const { return label ? label[n] : -1; }
  __device__ T value(int64_t n, T factor, int64_t label, int64_t k) const {
    const T v = values[n * cols + k];
    return factor * (k == label ? v - T(1) : v);
  }
};

// A sum in blocks.
template <class T>
struct BlockSum {
  T total = T(0), part = T(0);
  __device__ void add(T v) { part += v; }
  __device__ void close() {
    total += part;
    part = T(0);
  }
};

// Over groups of G lanes, which lie together; every lane gets the result. All lanes of the warp take part.
template <int G, class T>
__device__ T group_sum(T v) {
  for (int d = G / 2; d > 0; d /= 2) v += __shfl_xor_sync(kAll, v, d);
  return v;
}
template <int G, class T>
__device__ T group_max(T v) {
  for (int d = G / 2; d > 0; d /= 2) {
    const T other = __shfl_xor_sync(kAll, v, d);
    v = other > v ? other : v;
  }
  return v;
}

// Softmax of a row of `cols` that G lanes hold, lane l the columns l + j G; returns log of what it was divided by.
// All -infinity: 0 and -infinity.
template <int G, int kPer, class T>
__device__ T group_softmax(T (&h)[kPer], int64_t cols) {
  const int lane = threadIdx.x % G;
  T highest = -INFINITY, sum = T(0);
  for (int j = 0; j < kPer; ++j) highest = lane + j * G < cols && h[j] > highest ? h[j] : highest;
  highest = group_max<G>(highest);
  const T shift = highest == T(-INFINITY) ? T(0) : highest;
  for (int j = 0; j < kPer; ++j) {
    h[j] = lane + j * G < cols ? std::exp(h[j] - shift) : T(0);
    sum += h[j];
  }
  sum = group_sum<G>(sum);
  for (int j = 0; j < kPer; ++j) h[j] = sum > T(0) ? h[j] / sum : h[j];
  return shift + std::log(sum);
}

// Threads of a block, and the blocks for `count` groups of G of them.
constexpr int kThreads = 128;
template <int G>
int64_t group_blocks(int64_t count) {
  return ceil_div(count, kThreads / G);
}

}  // namespace crowdnal::cuda
