// out[n, k] = sum_c scores[item_n, c] confusion[annotator_n, c, k], a part of a warp per annotation: nothing is read
// twice but matrices, which caches keep. Matrices that are too large for that: cuda/detail/matrix.cuh.
#pragma once

#include "cuda/detail/matrix.cuh"
#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

// What becomes of a row h.
template <class T>
struct Epilogue {
  const T* shared = nullptr;       // [B, cols] or null: added, or mixed in by `mixing`
  const T* mixing = nullptr;       // [nnz] or null
  const int64_t* label = nullptr;  // [nnz] or null

  __device__ T blend(T h, int64_t n, int64_t i, int64_t k, int64_t cols) const {
    if (!shared) return h;
    const T s = shared[i * cols + k];
    return mixing ? h + mixing[n] * (s - h) : h + s;
  }
};

template <class T, class E>
struct MixInput {
  const T* scores;     // [B, rows]
  const E* confusion;  // [R, rows, cols]
  Epilogue<T> then = {};
};

// nll[n] and softmax of row n, from a row h that lanes hold.
template <class L, class T>
__device__ void finish_row(T (&h)[L::kOwn], int64_t n, bool active, const int64_t* label, int cols, T* nll) {
  const int64_t y = active ? label[n] : 0;
  CROWDNAL_ASSERT(0 <= y && y < cols);
  T target = T(0);
  bool owns = false;
  for (int t = 0; t < L::kOwn; ++t) {
    owns = owns || L::column_of(t) == static_cast<int>(y);
    target = L::column_of(t) == static_cast<int>(y) ? h[t] : target;
  }
  const T log_sum = group_softmax<L>(h, cols);
  if (active && owns) nll[n] = log_sum - target;
}

template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads) mix_kernel(MixInput<T, E> input, Index index, Shape shape, T* out, T* nll) {
  constexpr int kGroups = kThreads / L::G, V = L::V;
  const int rows = static_cast<int>(shape.rows), cols = static_cast<int>(shape.cols);
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < index.nnz; base += int64_t(gridDim.x) * kGroups) {
    const int64_t n = base + threadIdx.x / L::G;
    const bool active = n < index.nnz;
    T h[L::kOwn] = {};
    if (active) {
      const int64_t i = index.item[n], r = index.annotator[n];
      CROWDNAL_ASSERT(0 <= i && i < index.num_items && 0 <= r && r < shape.num_annotators);
      const T* z = input.scores + i * rows;
      const E* row = input.confusion + r * (rows * cols) + L::column(0);
      T m[V][L::kOwn] = {};
      for (int first = 0; first < rows; first += kTermBlock) {
        T part[L::kOwn] = {};
        const int last = first + kTermBlock < rows ? first + kTermBlock : rows;
        for (int c = first; c < last; c += V) {
          T zs[V];
          load<V>(z + c, zs);
          CROWDNAL_UNROLL
          for (int v = 0; v < V; ++v, row += cols) {
            CROWDNAL_UNROLL
            for (int j = 0; j < L::kPer; ++j) {
              if (L::column(j) < cols) load<V>(row + j * L::G * V, m[v] + j * V);
            }
          }
          for (int v = 0; v < V; ++v) {
            for (int t = 0; t < L::kOwn; ++t) part[t] += zs[v] * m[v][t];
          }
        }
        for (int t = 0; t < L::kOwn; ++t) h[t] += part[t];
      }
      for (int t = 0; t < L::kOwn; ++t) {
        if (L::column(t / V) < cols) h[t] = input.then.blend(h[t], n, i, L::column_of(t), cols);
      }
    }
    if (input.then.label) finish_row<L>(h, n, active, input.then.label, cols, nll);
    for (int j = 0; active && j < L::kPer; ++j) {
      if (L::column(j) < cols) store<V>(h + j * V, out + n * cols + L::column(j));
    }
  }
}

// Rows h [nnz, cols] that `multiply` left in `out`: the shared term, softmax and nll; a block per row.
template <class T>
__global__ void __launch_bounds__(kThreads)
    finish_rows_kernel(Epilogue<T> then, Index index, int64_t cols, T* out, T* nll) {
  CROWDNAL_SHARED(T, target, 1);
  for (int64_t n = blockIdx.x; n < index.nnz; n += gridDim.x) {
    T* row = out + n * cols;
    const int64_t i = index.item[n], y = then.label ? then.label[n] : 0;
    CROWDNAL_ASSERT(0 <= y && y < cols);
    T highest = -INFINITY;
    for (int64_t k = threadIdx.x; k < cols; k += kThreads) {
      const T h = then.blend(row[k], n, i, k, cols);
      row[k] = h;
      if (k == y) target[0] = h;
      highest = h > highest ? h : highest;
    }
    if (!then.label) continue;
    const T log_sum = block_softmax(row, cols, highest);
    if (threadIdx.x == 0) nll[n] = log_sum - target[0];
    __syncthreads();  // the next row has another target
  }
}

// As `mix` of the CPU: out [nnz, cols]; with labels its softmax, and nll [nnz].
template <class T, class E>
void mix(Context& context, const MixInput<T, E>& input, const Index& index, const Shape& shape, T* out, T* nll) {
  if (is_large(shape)) {
    multiply(context, input.scores, input.confusion, index, shape, out);
    if (input.then.shared || input.then.label) {
      launch(context, finish_rows_kernel<T>, index.nnz, kThreads, 0, input.then, index, shape.cols, out, nll);
    }
    return;
  }
  for_tier<T>(shape.cols, alignment_bits(shape.rows | shape.cols, input.scores, input.confusion, out), [&](auto tier) {
    using L = decltype(tier);
    launch(context, mix_kernel<T, E, L>, group_blocks<L::G>(index.nnz), kThreads, 0, input, index, shape, out, nll);
  });
}

}  // namespace crowdnal::cuda
