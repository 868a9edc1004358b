// What the kernels share: the rows that the adjoints of `mix` read, sums over a part of a warp, softmax of a row that
// lies in registers.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/half.h"
#include "common/index.h"
#include "cuda/detail/launch.h"

namespace crowdnal::cuda {

constexpr unsigned kAll = 0xffffffffu;
constexpr int kLanes = 32;

constexpr int kThreads = 128;  // of a block

constexpr int kAhead = 8;  // loads in flight per thread

// Terms are summed in blocks of this many before they join a running total.
constexpr int kTermBlock = 32;

// An annotation in the annotators' order; the label is -1 without a plan.
struct Ordered {
  int64_t n, item, annotator;
  int label;

  __device__ int label_in(const int64_t* labels) const { return label >= 0 ? label : static_cast<int>(labels[n]); }
};
__device__ inline Ordered ordered(const Index& index, int64_t p) {
  if (index.plan) {
    const Planned at = index.plan[p];
    CROWDNAL_ASSERT(0 <= at.annotation && at.annotation < index.nnz && at.label >= 0);
    return {at.annotation, at.item, at.annotator, at.label};
  }
  const int64_t n = index.order[p];
  return {n, index.item[n], index.annotator[n], -1};
}
__device__ inline int64_t owner_at(const Index& index, int64_t p) {
  return index.plan ? index.plan[p].annotator : index.annotator[index.order[p]];
}

// A row of `GradRows`, found: factor (values - onehot(label)).
template <class T>
struct GradRow {
  const T* values;
  T factor;
  int label;  // -1: none

  __device__ T at(T v, int64_t k) const { return factor * (k == label ? v - T(1) : v); }
  __device__ T operator[](int64_t k) const { return at(values[k], k); }
};

// Rows n = u_n values_row(n) or, with labels, u_n (values_row(n) - onehot(label_n)): the gradient of the softmax link,
// made where it is read from the probabilities that the link kept. u_n = sign (scale weight_n + upstream_n), of which
// mixing_n belongs to the shared term (`share`) and the rest to the annotator's.
template <class T>
struct GradRows {
  const T* values;  // [nnz, cols] or [B, cols]
  int64_t cols;
  const int64_t* label = nullptr;  // [nnz] or null
  const T* weight = nullptr;       // [nnz] or null (1)
  const T* upstream = nullptr;     // [nnz] or null (0)
  const T* grad_loss = nullptr;    // [] or null: scale = grad_loss / count, read on the device
  T count = T(1);
  T constant = T(1);  // the scale without grad_loss
  T sign = T(1);
  const T* mixing = nullptr;  // [nnz] or null
  bool share = false;
  const int64_t* item = nullptr;  // [nnz] or null: row(n) = item_n, else n

  // Reads the scale: once per thread, not once per row.
  __device__ void fix_scale() {
    if (grad_loss) constant = *grad_loss / count;
    grad_loss = nullptr;
  }
  __device__ T factor(int64_t n) const {
    const T scale = grad_loss ? *grad_loss / count : constant;
    const T u = sign * ((weight ? scale * weight[n] : scale) + (upstream ? upstream[n] : T(0)));
    return mixing ? u * (share ? mixing[n] : T(1) - mixing[n]) : u;
  }
  __device__ int64_t label_of(int64_t n) const { return label ? label[n] : -1; }
  __device__ int64_t row_of(int64_t n, int64_t num_items) const {
    if (!item) return n;
    CROWDNAL_ASSERT(0 <= item[n] && item[n] < num_items);
    return item[n];
  }
  __device__ GradRow<T> find(int64_t n, int64_t num_items) const {
    return {values + row_of(n, num_items) * cols, factor(n), static_cast<int>(label_of(n))};
  }
  __device__ GradRow<T> find(const Ordered& at, int64_t num_items) const {
    CROWDNAL_ASSERT(!item || (0 <= at.item && at.item < num_items));
    const int hot = label ? at.label_in(label) : -1;
    return {values + (item ? at.item : at.n) * cols, factor(at.n), hot};
  }
};

// V elements that lie together, in one access: their address is a multiple of their size.
template <int V, class T>
struct alignas(V * sizeof(T)) Pack {
  T values[V];
};
template <int V, class E, class T>
__device__ void load(const E* from, T* to) {
  const Pack<V, E> pack = *reinterpret_cast<const Pack<V, E>*>(from);
  for (int v = 0; v < V; ++v) to[v] = static_cast<T>(pack.values[v]);
}
template <int V, class T>
__device__ void store(const T* from, T* to) {
  Pack<V, T> pack;
  for (int v = 0; v < V; ++v) pack.values[v] = from[v];
  *reinterpret_cast<Pack<V, T>*>(to) = pack;
}

template <class T>
using Quad = Pack<4, T>;

// How G lanes hold a row: each kPer pieces of V columns, piece j from `column(j)` on.
template <int kLanesOfRow, int kPieces, int kVector>
struct Tier {
  static constexpr int G = kLanesOfRow, kPer = kPieces, V = kVector, kOwn = kPer * V, kWidth = G * kOwn;
  __device__ static int column(int j) { return (static_cast<int>(threadIdx.x) % G + j * G) * V; }
  // Of element t of a lane.
  __device__ static int column_of(int t) { return column(t / V) + t % V; }
};

// A multiple of 2 or 4 if all of the row sizes that `size` has the bits of and the addresses are, in elements: then
// `for_tier` and others read as many at a time.
template <class... E>
int64_t alignment_bits(int64_t size, const E*... at) {
  return size | (0 | ... | static_cast<int64_t>(reinterpret_cast<uintptr_t>(at) / sizeof(E)));
}

// body(tier) for rows of at most 128 columns, with this alignment. Wide accesses are for single precision: fewer
// instructions and requests a row.
template <class T, class Body>
void for_tier(int64_t cols, int64_t alignment, const Body& body) {
  if constexpr (sizeof(T) == sizeof(float)) {
    if (alignment % 4 == 0) {
      if (cols <= 8) return body(Tier<2, 1, 4>{});
      if (cols <= 16) return body(Tier<4, 1, 4>{});
      if (cols <= 32) return body(Tier<8, 1, 4>{});
      return body(Tier<32, 1, 4>{});
    }
    if (alignment % 2 == 0) {
      if (cols <= 16) return body(Tier<4, 2, 2>{});
      if (cols <= 32) return body(Tier<8, 2, 2>{});
      return body(Tier<32, 2, 2>{});
    }
  }
  if (cols <= 8) return body(Tier<8, 1, 1>{});
  if (cols <= 16) return body(Tier<8, 2, 1>{});
  if (cols <= 32) return body(Tier<32, 1, 1>{});
  return body(Tier<32, 4, 1>{});
}

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

// Softmax of a row of `cols` that lanes hold as the tier L says; returns log of what it was divided by. All -infinity:
// 0 and -infinity.
template <class L, class T>
__device__ T group_softmax(T (&h)[L::kOwn], int cols) {
  T highest = -INFINITY, sum = T(0);
  for (int t = 0; t < L::kOwn; ++t) highest = L::column_of(t) < cols && h[t] > highest ? h[t] : highest;
  highest = group_max<L::G>(highest);
  const T shift = highest == T(-INFINITY) ? T(0) : highest;
  for (int t = 0; t < L::kOwn; ++t) {
    h[t] = L::column_of(t) < cols ? std::exp(h[t] - shift) : T(0);
    sum += h[t];
  }
  sum = group_sum<L::G>(sum);
  const T scale = sum > T(0) ? T(1) / sum : T(1);
  for (int t = 0; t < L::kOwn; ++t) h[t] *= scale;
  return shift + std::log(sum);
}

// As `group_softmax`, of a row in memory, by a block of kThreads: each reads only what it wrote there, of which
// `highest` is the largest.
template <class T>
__device__ T block_softmax(T* row, int64_t cols, T highest) {
  constexpr int kWarps = kThreads / kLanes;
  CROWDNAL_SHARED(T, warp_max, kWarps);
  CROWDNAL_SHARED(T, warp_sum, kWarps);
  const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  highest = group_max<kLanes>(highest);
  if (lane == 0) warp_max[warp] = highest;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) highest = warp_max[w] > highest ? T(warp_max[w]) : highest;
  const T shift = highest == T(-INFINITY) ? T(0) : highest;
  T sum = T(0);
  for (int64_t k = threadIdx.x; k < cols; k += kThreads) {
    row[k] = std::exp(row[k] - shift);
    sum += row[k];
  }
  sum = group_sum<kLanes>(sum);
  if (lane == 0) warp_sum[warp] = sum;
  __syncthreads();
  sum = T(0);
  for (int w = 0; w < kWarps; ++w) sum += warp_sum[w];
  const T scale = sum > T(0) ? T(1) / sum : T(1);
  for (int64_t k = threadIdx.x; k < cols; k += kThreads) row[k] *= scale;
  return shift + std::log(sum);
}

// quotient n + rest = e, of what is not negative. In 32 bits where they are enough: in 64 it takes some 70 instructions.
struct Divided {
  int64_t quotient = 0, rest = 0;
  __host__ __device__ constexpr Divided(int64_t e, int64_t n) {
    if ((e | n) >> 32 == 0) {
      quotient = static_cast<uint32_t>(e) / static_cast<uint32_t>(n);
    } else {
      quotient = e / n;
    }
    rest = e - quotient * n;
  }
};
static_assert(Divided(23, 7).quotient == 3 && Divided(23, 7).rest == 2);
static_assert(Divided(0xffffffff, 2).quotient == 0x7fffffff && Divided(0xffffffff, 0xffffffff).quotient == 1);
static_assert(Divided(0x100000007, 8).quotient == 0x20000000 && Divided(0x100000007, 8).rest == 7);

// Blocks for `count` groups of G threads.
template <int G>
int64_t group_blocks(int64_t count) {
  return ceil_div(count, kThreads / G);
}

}  // namespace crowdnal::cuda
