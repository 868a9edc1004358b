// label_log_likelihood: sums over the annotations of an item, the adjoint of cuda/detail/label_counts.cuh.
#pragma once

#include "cuda/detail/chunks.cuh"

namespace crowdnal::cuda {

// out[j V + v] = sum over the annotations n of item i of weight_n times row n of `rows` at k + j step + v, for the pieces
// j that begin before the end of a row; nothing for a weight of 0, whatever the row.
template <int V, int kPieces, class T, class Rows>
__device__ void sum_terms(const Rows& rows, const T* weight, const Index& index, int64_t i, int64_t k, int64_t step,
                          T* out) {
  const int64_t last = index.indptr[i + 1];
  CROWDNAL_ASSERT(0 <= index.indptr[i] && index.indptr[i] <= last && last <= index.nnz);
  BlockSum<T> sums[kPieces * V];
  for (int64_t n = index.indptr[i]; n < last;) {
    const int64_t stop = n + kTermBlock < last ? n + kTermBlock : last;
    for (; n < stop; ++n) {
      const T w = weight ? weight[n] : T(1);
      if (w == T(0)) continue;
      for (int j = 0; j < kPieces; ++j) {
        if (k + j * step >= rows.classes) continue;
        T row[V];
        rows.template load<V>(n, k + j * step, row);
        for (int v = 0; v < V; ++v) sums[j * V + v].add(w * row[v]);
      }
    }
    for (int t = 0; t < kPieces * V; ++t) sums[t].close();
  }
  for (int t = 0; t < kPieces * V; ++t) out[t] = sums[t].total;
}

template <class T, class Rows>
__global__ void __launch_bounds__(kThreads, 4)
    label_log_likelihood_kernel(Rows rows, const T* weight, Index index, int64_t classes, T* out) {
  const int64_t size = index.num_items * classes;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < size; e += int64_t(gridDim.x) * kThreads) {
    const Divided at(e, classes);
    T sum;
    sum_terms<1, 1>(rows, weight, index, at.quotient, at.rest, 0, &sum);
    out[e] = sum;
  }
}

// out[i, k] = sum_{n of i} weight_n times row n of `rows`                                            out: [B, classes]
template <class T, class Rows>
void label_log_likelihood(Context& context, const Rows& rows, const T* weight, const Index& index, int64_t classes,
                          T* out) {
  launch(context, label_log_likelihood_kernel<T, Rows>, ceil_div(index.num_items * classes, kThreads), kThreads, 0,
         rows, weight, index, classes, out);
}

}  // namespace crowdnal::cuda
