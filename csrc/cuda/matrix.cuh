// Products with large matrices: a tile of a matrix is read once for up to eight annotations of its annotator.
#pragma once

#include "cuda/rows.cuh"

namespace crowdnal::cuda {

// Whether the matrices are worth sharing between annotations. Small ones have at most 128 rows and columns.
inline bool is_large(const Shape& shape) {
  return shape.rows > 128 || shape.cols > 128 || shape.matrix() > 2048;
}

constexpr int kGroup = 8;    // annotations that share a pass
constexpr int kTile = 128;   // outputs of a block, one a thread
constexpr int kDepth = 32;   // terms of the sums between barriers

// The scores of an annotation's item, as rows like those of `GradRows`.
template <class T>
struct ScoreRows {
  const T* values;      // [B, cols]
  int64_t cols;
  const int64_t* item;  // [nnz]
  __device__ T factor(int64_t) const { return T(1); }
  __device__ int64_t label_of(int64_t) const { return -1; }
  __device__ T value(int64_t n, T, int64_t, int64_t c) const { return values[item[n] * cols + c]; }
};

// A block owns out[n, tile] of up to kGroup annotations n of one annotator, which lie together in `order`:
// out[n, o] = sum_i in[n, i] M[i, o], M = the annotator's matrix [rows, cols], or its transpose.
template <class T, class E, bool kTransposed, class Rows>
__global__ void __launch_bounds__(kTile, kTransposed || sizeof(T) > 4 ? 4 : 5)
    multiply_kernel(Rows in, const E* confusion, Index index, Shape shape, T* out) {
  constexpr int kStride = kDepth + 1;  // so that the columns of a tile lie in different banks
  CROWDNAL_SHARED(T, x, kGroup * kDepth);
  CROWDNAL_SHARED(T, w, kTransposed ? kTile * kStride : 1);
  const int64_t depth = kTransposed ? shape.cols : shape.rows, width = kTransposed ? shape.rows : shape.cols;
  const int64_t tiles = (width + kTile - 1) / kTile;
  for (int64_t unit = blockIdx.x; unit < index.nnz * tiles; unit += gridDim.x) {
    const int64_t p = unit / tiles, o = unit % tiles * kTile + threadIdx.x;
    const int64_t r = index.annotator[index.order[p]];
    CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators);
    if (p % kGroup != 0 && index.annotator[index.order[p - 1]] == r) continue;  // another block's
    int count = 1;
    while ((p + count) % kGroup != 0 && p + count < index.nnz && index.annotator[index.order[p + count]] == r) ++count;
    const E* matrix = confusion + r * shape.rows * shape.cols;
    T sums[kGroup] = {};
    for (int64_t first = 0; first < depth; first += kDepth) {
      __syncthreads();  // the tiles before are read
      for (int e = threadIdx.x; e < kGroup * kDepth; e += kTile) {
        const int j = e / kDepth;
        const int64_t i = first + e % kDepth;
        T value = T(0);
        if (j < count && i < depth) {
          const int64_t n = index.order[p + j];
          value = in.value(n, in.factor(n), in.label_of(n), i);
        }
        x[e] = value;
      }
      for (int e = threadIdx.x; kTransposed && e < kTile * kDepth; e += kTile) {
        const int64_t row = unit % tiles * kTile + e / kDepth, i = first + e % kDepth;
        w[e / kDepth * kStride + e % kDepth] = row < width && i < depth ? T(matrix[row * shape.cols + i]) : T(0);
      }
      __syncthreads();
      if (o >= width) continue;
      const int most = depth - first < kDepth ? static_cast<int>(depth - first) : kDepth;
      T part[kGroup] = {};
      for (int i = 0; i < most; ++i) {
        const T m = kTransposed ? T(w[threadIdx.x * kStride + i]) : T(matrix[(first + i) * shape.cols + o]);
        for (int j = 0; j < kGroup; ++j) part[j] += x[j * kDepth + i] * m;
      }
      for (int j = 0; j < kGroup; ++j) sums[j] += part[j];
    }
    for (int j = 0; j < kGroup; ++j) {
      if (j < count && o < width) out[index.order[p + j] * width + o] = sums[j];
    }
  }
}

// out[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k]                                    out: [nnz, cols]
template <class T, class E>
void multiply(Context& context, const T* scores, const E* confusion, const Index& index, const Shape& shape, T* out) {
  const ScoreRows<T> in{scores, shape.rows, index.item};
  launch(context, multiply_kernel<T, E, false, ScoreRows<T>>, index.nnz * ceil_div(shape.cols, kTile), kTile, 0, in,
         confusion, index, shape, out);
}

// out[n, c] = sum_k confusion[annotator_n, c, k] grad[n, k]                                           out: [nnz, rows]
template <class T, class E>
void multiply_transposed(Context& context, const GradRows<T>& grad, const E* confusion, const Index& index,
                         const Shape& shape, T* out) {
  launch(context, multiply_kernel<T, E, true, GradRows<T>>, index.nnz * ceil_div(shape.rows, kTile), kTile, 0, grad,
         confusion, index, shape, out);
}

}  // namespace crowdnal::cuda
