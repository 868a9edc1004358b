// Products with large matrices: a tile of a matrix is read once for up to sixteen annotations of its annotator.
#pragma once

#include "cuda/detail/chunks.cuh"

namespace crowdnal::cuda {

// Whether the matrices are worth sharing between annotations. Small ones have at most 128 rows and columns.
inline bool is_large(const Shape& shape) { return shape.rows > 128 || shape.cols > 128 || shape.matrix() > 2048; }

constexpr int kGroup = 16;  // annotations that share a pass
constexpr int kTile = 128;  // outputs of a block, one per thread
constexpr int kDepth = 32;  // terms of the sums between barriers

// Which positions first + lane of a window begin a group: the first of an annotator, and every kGroup-th from there on.
// All lanes of the warp take part.
__device__ inline unsigned group_starts(const Index& index, int64_t first, int window) {
  const int lane = threadIdx.x % kLanes;
  const int64_t p = first + lane;
  const bool inside = lane < window && p < index.nnz;
  const unsigned begins = __ballot_sync(kAll, inside && !continues(index, p));
  int64_t start = first;  // of the annotator at `first`
  if (!(begins & 1)) {
    const int64_t r = owner_at(index, first), q = first - 1 - lane;
    const unsigned same = __ballot_sync(kAll, q >= 0 && owner_at(index, q >= 0 ? q : 0) == r);
    start = same == kAll ? first_position(index, r) : first + 1 - __ffs(~same);
  }
  const unsigned before = begins & ((2u << lane) - 1);
  if (before) start = first + kLanes - 1 - __clz(before);
  return __ballot_sync(kAll, inside && (p - start) % kGroup == 0);
}

// A block owns out[n, tile] of the groups that begin in a window of positions; a group is up to kGroup annotations n of
// one annotator, which lie together in `order`:
// out[n, o] = sum_i row n of `in` at i times M[i, o], M = the annotator's matrix [rows, cols], or its transpose.
template <class T, class E, bool kTransposed>
__global__ void __launch_bounds__(kTile, sizeof(T) > 4 ? 3 : 5)
    multiply_kernel(GradRows<T> in, const E* confusion, Index index, Shape shape, int window, T* out) {
  constexpr int kQuads = kGroup / 4, kRow = kQuads + 1;  // one more, so that what is stored lies in different banks
  constexpr int kStride = kDepth + 1;                    // as here, for columns
  CROWDNAL_SHARED(GradRow<T>, found, kGroup);
  CROWDNAL_SHARED(Quad<T>, x, kDepth * kRow);
  CROWDNAL_SHARED(T, w, kTransposed ? kTile * kStride : 1);
  const int64_t depth = kTransposed ? shape.cols : shape.rows, width = kTransposed ? shape.rows : shape.cols;
  const int64_t tiles = (width + kTile - 1) / kTile, windows = (index.nnz + window - 1) / window;
  in.fix_scale();
  for (int64_t unit = blockIdx.x; unit < windows * tiles; unit += gridDim.x) {
    const int64_t begin = unit / tiles * window, o = unit % tiles * kTile + threadIdx.x;
    for (unsigned groups = group_starts(index, begin, window); groups; groups &= groups - 1) {
      const int64_t p = begin + __ffs(groups) - 1, r = owner_at(index, p);
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators);
      const int lane = threadIdx.x % kLanes;
      const bool shares = lane < kGroup && p + lane < index.nnz && owner_at(index, p + lane) == r;
      const int count = __ffs(~__ballot_sync(kAll, shares)) - 1;
      const E* matrix = confusion + r * shape.rows * shape.cols;
      __syncthreads();  // the annotations before are done
      if (static_cast<int>(threadIdx.x) < count)
        found[threadIdx.x] = in.find(ordered(index, p + threadIdx.x), index.num_items);
      T sums[kGroup] = {};
      for (int64_t first = 0; first < depth; first += kDepth) {
        const int most = depth - first < kDepth ? static_cast<int>(depth - first) : kDepth;
        __syncthreads();  // the tiles before are read
        for (int e = threadIdx.x; e < kQuads * kDepth; e += kTile) {
          const int i = e % kDepth, q = e / kDepth;
          Quad<T> quad{};
          for (int v = 0; v < 4; ++v) {
            if (q * 4 + v < count && i < most) quad.values[v] = GradRow<T>(found[q * 4 + v])[first + i];
          }
          x[i * kRow + q] = quad;
        }
        for (int e = threadIdx.x; kTransposed && e < kTile * kDepth; e += kAhead * kTile) {
          T got[kAhead];
          CROWDNAL_UNROLL
          for (int t = 0; t < kAhead; ++t) {
            const int64_t row = unit % tiles * kTile + (e + t * kTile) / kDepth;
            got[t] = row < width && e % kDepth < most ? T(matrix[row * shape.cols + first + e % kDepth]) : T(0);
          }
          for (int t = 0; t < kAhead; ++t) w[(e + t * kTile) / kDepth * kStride + e % kDepth] = got[t];
        }
        __syncthreads();
        if (o >= width) continue;
        T part[kGroup] = {};
        for (int i = 0; i < most; i += kAhead) {
          T m[kAhead];
          CROWDNAL_UNROLL
          for (int t = 0; t < kAhead; ++t) {
            if constexpr (kTransposed) {
              m[t] = w[threadIdx.x * kStride + i + t];
            } else {
              m[t] = i + t < most ? T(matrix[(first + i + t) * shape.cols + o]) : T(0);
            }
          }
          CROWDNAL_UNROLL
          for (int t = 0; t < kAhead; ++t) {
            for (int q = 0; q < kQuads; ++q) {
              const Quad<T> quad = x[(i + t) * kRow + q];
              for (int v = 0; v < 4; ++v) part[q * 4 + v] += quad.values[v] * m[t];
            }
          }
        }
        for (int j = 0; j < kGroup; ++j) sums[j] += part[j];
      }
      for (int j = 0; j < kGroup; ++j) {
        if (j < count && o < width) out[index.order[p + j] * width + o] = sums[j];
      }
    }
  }
}

// `in`: rows of the matrices' rows, or if transposed of their columns.
template <bool kTransposed, class T, class E>
void multiply_rows(Context& context, const GradRows<T>& in, const E* confusion, const Index& index, const Shape& shape,
                   T* out) {
  // So long that about one group begins in a window.
  const int64_t window = std::max<int64_t>(1, kGroup * index.nnz / (index.nnz + kGroup * shape.num_annotators));
  const int64_t tiles = ceil_div(kTransposed ? shape.rows : shape.cols, kTile);
  launch(context, multiply_kernel<T, E, kTransposed>, ceil_div(index.nnz, window) * tiles, kTile, 0, in, confusion,
         index, shape, window, out);
}

// out[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k]                                    out: [nnz, cols]
template <class T, class E>
void multiply(Context& context, const T* scores, const E* confusion, const Index& index, const Shape& shape, T* out) {
  GradRows<T> in{scores, shape.rows};
  in.item = index.item;
  multiply_rows<false>(context, in, confusion, index, shape, out);
}

// out[n, c] = sum_k confusion[annotator_n, c, k] grad[n, k]                                           out: [nnz, rows]
template <class T, class E>
void multiply_transposed(Context& context, const GradRows<T>& grad, const E* confusion, const Index& index,
                         const Shape& shape, T* out) {
  multiply_rows<true>(context, grad, confusion, index, shape, out);
}

}  // namespace crowdnal::cuda
