// Sums over the annotations of an item: of rows, and of rows times the transposed matrices of their annotators.
#pragma once

#include "cuda/detail/matrix.cuh"
#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

// out[i, d] = sum_{n of i} row n of `grad`, a thread per element                                   out: [B, grad.cols]
template <class T>
__global__ void __launch_bounds__(kThreads) sum_items_kernel(GradRows<T> grad, Index index, T* out) {
  const int64_t size = index.num_items * grad.cols;
  grad.fix_scale();
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < size; e += int64_t(gridDim.x) * kThreads) {
    const Divided at(e, grad.cols);
    const int64_t i = at.quotient, d = at.rest, last = index.indptr[i + 1];
    CROWDNAL_ASSERT(0 <= index.indptr[i] && index.indptr[i] <= last && last <= index.nnz);
    BlockSum<T> sum;
    for (int64_t n = index.indptr[i]; n < last;) {
      const int64_t stop = n + kTermBlock < last ? n + kTermBlock : last;
      for (; n < stop; ++n) sum.add(grad.find(n, index.num_items)[d]);
      sum.close();
    }
    out[e] = sum.total;
  }
}

template <class T>
void sum_items(Context& context, const GradRows<T>& grad, const Index& index, T* out) {
  launch(context, sum_items_kernel<T>, ceil_div(index.num_items * grad.cols, kThreads), kThreads, 0, grad, index, out);
}

// out[i, c] = sum_{n of i} sum_k confusion[annotator_n, c, k] grad[n, k]; a part of a warp per item, its lanes over the
// columns: they read the rows of a matrix as these lie, and add up what they have once per item. What an annotation is
// asked for but its row, its warp fetches for kAcross annotations per lane.
template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads, L::kPer == 2 ? 4 : 5)
    mix_items_kernel(GradRows<T> grad, const E* confusion, Index index, Shape shape, T* out) {
  constexpr int kWarps = kThreads / kLanes, kGroups = kLanes / L::G, V = L::V;
  constexpr int kAcross = 4, kWindow = kAcross * kLanes;  // so that all items of a warp find theirs in one window
  constexpr int kRows = L::kWidth <= 8 || L::kPer > 2 || sizeof(T) > 4 ? 8 : 16;  // sums of a lane
  constexpr int kPiece = V == 4 ? 2 : 4;                                          // rows whose loads are in flight
  constexpr int kClose = L::kOwn < kTermBlock ? kTermBlock / L::kOwn : 1;         // annotations a block of terms
  CROWDNAL_SHARED(int64_t, who, kWarps* kWindow);
  CROWDNAL_SHARED(int, label, kWarps* kWindow);
  CROWDNAL_SHARED(T, factor, kWarps * kWindow);
  const int warp = threadIdx.x / kLanes, own = warp * kWindow, in_warp = threadIdx.x % kLanes;
  const int lane = threadIdx.x % L::G, rows = static_cast<int>(shape.rows), cols = static_cast<int>(shape.cols);
  grad.fix_scale();
  for (int64_t base = (int64_t(blockIdx.x) * kWarps + warp) * kGroups; base < index.num_items;
       base += int64_t(gridDim.x) * kWarps * kGroups) {
    const int64_t i = base + in_warp / L::G;
    const bool active = i < index.num_items;
    const int64_t begin = active ? index.indptr[i] : 0, end = active ? index.indptr[i + 1] : 0;
    CROWDNAL_ASSERT(0 <= begin && begin <= end && end <= index.nnz);
    const int64_t last = index.indptr[base + kGroups < index.num_items ? base + kGroups : index.num_items];
    for (int first = 0; first < rows; first += kRows) {
      const int most = rows - first;
      T total[kRows] = {};
      for (int64_t b = index.indptr[base]; b < last; b += kWindow) {
        int64_t r[kAcross] = {};
        int y[kAcross] = {};
        T u[kAcross] = {};
        CROWDNAL_UNROLL
        for (int t = 0; t < kAcross; ++t) {
          const int64_t n = b + t * kLanes + in_warp;
          if (n >= last) continue;
          r[t] = index.annotator[n];
          y[t] = static_cast<int>(grad.label_of(n));
          u[t] = grad.factor(n);
        }
        __syncwarp();  // those before are read
        CROWDNAL_UNROLL
        for (int t = 0; t < kAcross; ++t) {
          CROWDNAL_ASSERT(0 <= r[t] && r[t] < shape.num_annotators);
          who[own + t * kLanes + in_warp] = r[t];
          label[own + t * kLanes + in_warp] = y[t];
          factor[own + t * kLanes + in_warp] = u[t];
        }
        __syncwarp();
        int m = begin > b ? static_cast<int>(begin - b < kWindow ? begin - b : kWindow) : 0;
        const int stop = end < b + kWindow ? static_cast<int>(end > b ? end - b : 0) : kWindow;
        while (m < stop) {
          T part[kRows] = {};
          for (const int close = m + kClose < stop ? m + kClose : stop; m < close; ++m) {
            const T u = factor[own + m];
            const int y = label[own + m];
            const E* matrix = confusion + (who[own + m] * rows + first) * cols;
            for (int j = 0; j < L::kPer; ++j) {
              const int k = L::column(j);
              if (k >= cols) continue;
              T g[V];
              load<V>(grad.values + (b + m) * cols + k, g);
              for (int v = 0; v < V; ++v) g[v] = u * (k + v == y ? g[v] - T(1) : g[v]);
              const E* row = matrix + k;
              CROWDNAL_UNROLL
              for (int t = 0; t < kRows; t += kPiece) {
                if (t >= most) continue;
                T w[kPiece][V];
                for (int p = 0; p < kPiece; ++p) {
                  load<V>(row, w[p]);
                  if (t + p + 1 < most) row += cols;  // else the last row again, for a sum that nobody asks for
                }
                for (int p = 0; p < kPiece; ++p) {
                  for (int v = 0; v < V; ++v) part[t + p] += w[p][v] * g[v];
                }
              }
            }
          }
          for (int t = 0; t < kRows; ++t) total[t] += part[t];
        }
      }
      CROWDNAL_UNROLL
      for (int t = 0; t < kRows; ++t) total[t] = group_sum<L::G>(total[t]);
      CROWDNAL_UNROLL
      for (int q = 0; q < kRows; q += L::G) {  // lane l has row q + l to write
        T own = total[q];
        CROWDNAL_UNROLL
        for (int t = 1; t < (L::G < kRows ? L::G : kRows); ++t) own = lane == t ? total[q + t] : own;
        if (active && q + lane < kRows && q + lane < most) out[i * rows + first + q + lane] = own;
      }
    }
  }
}

template <class T, class E>
void mix_items(Context& context, const GradRows<T>& grad, const E* confusion, const Index& index, const Shape& shape,
               T* out) {
  if (is_large(shape)) {
    T* each = context.template scratch<T>(index.nnz * shape.rows);
    multiply_transposed(context, grad, confusion, index, shape, each);
    sum_items(context, GradRows<T>{each, shape.rows}, index, out);
    return;
  }
  for_tier<T>(shape.cols, alignment_bits(shape.cols, grad.values, confusion), [&](auto tier) {
    using L = decltype(tier);
    launch(context, mix_items_kernel<T, E, L>, group_blocks<L::G>(index.num_items), kThreads, 0, grad, confusion, index,
           shape, out);
  });
}

}  // namespace crowdnal::cuda
