// evidence and counts: each other's adjoints, the sufficient statistics of the joint link.
#pragma once

#include "cuda/small_outer.cuh"

namespace crowdnal::cuda {

// out[v] = sum over the annotations n of item i of weight_n times row n of `rows` at k + v; nothing for a weight of 0,
// whatever the row.
template <int V, class T, class Rows>
__device__ void sum_evidence(const Rows& rows, const T* weight, const Index& index, int64_t i, int64_t k, T* out) {
  const int64_t last = index.indptr[i + 1];
  CROWDNAL_ASSERT(0 <= index.indptr[i] && index.indptr[i] <= last && last <= index.nnz);
  BlockSum<T> sums[V];
  for (int64_t n = index.indptr[i]; n < last;) {
    const int64_t stop = n + kBlock < last ? n + kBlock : last;
    for (; n < stop; ++n) {
      const T w = weight ? weight[n] : T(1);
      if (w == T(0)) continue;
      T row[V];
      rows.template load<V>(n, k, row);
      for (int v = 0; v < V; ++v) sums[v].add(w * row[v]);
    }
    for (int v = 0; v < V; ++v) sums[v].close();
  }
  for (int v = 0; v < V; ++v) out[v] = sums[v].total;
}

template <class T, class Rows>
__global__ void __launch_bounds__(kThreads, 4)
    evidence_kernel(Rows rows, const T* weight, Index index, int64_t classes, T* out) {
  const int64_t size = index.num_items * classes;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < size; e += int64_t(gridDim.x) * kThreads) {
    T sum;
    sum_evidence<1>(rows, weight, index, e / classes, e % classes, &sum);
    out[e] = sum;
  }
}

// out[i, k] = sum_{n of i} weight_n times row n of `rows`                                            out: [B, classes]
template <class T, class Rows>
void evidence(Context& context, const Rows& rows, const T* weight, const Index& index, int64_t classes, T* out) {
  launch(context, evidence_kernel<T, Rows>, ceil_div(index.num_items * classes, kThreads), kThreads, 0, rows, weight,
         index, classes, out);
}

// A thread owns a column of the matrices and adds to them where they lie.
template <class T>
__global__ void __launch_bounds__(kThreads) add_labelled_kernel(GradRows<T> rows, const int64_t* label, Index index,
                                                                Shape shape, Chunks chunks, T* out, T* slots) {
  const int64_t size = shape.rows * shape.cols, tiles = (shape.cols + kThreads - 1) / kThreads;
  rows.fix_scale();
  for (int64_t unit = blockIdx.x; unit < chunks.count * tiles; unit += gridDim.x) {
    const int64_t chunk = unit / tiles, k = unit % tiles * kThreads + threadIdx.x, first = chunk * chunks.size;
    if (k >= shape.cols) continue;
    const int64_t last = first + chunks.size < index.nnz ? first + chunks.size : index.nnz;
    bool in_slot = continues(index, first);
    for (int64_t y = 0; in_slot && y < shape.rows; ++y) slots[chunk * size + y * shape.cols + k] = T(0);
    for (int64_t p = first; p < last; ++p) {
      const int64_t n = index.order[p], r = index.annotator[n], y = label[n];
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators && 0 <= y && y < shape.rows);
      in_slot = in_slot && (p == first || continues(index, p));
      (in_slot ? slots + chunk * size : out + r * size)[y * shape.cols + k] +=
          rows.value(rows.row_of(n, index.num_items), rows.factor(n), -1, k);
    }
  }
}

// out[r, y, k] = sum_{n of r with label y} row n at k: every element is written, zero without annotations.
template <class T>
void sum_labelled(Context& context, const GradRows<T>& rows, const int64_t* label, const Index& index,
                  const Shape& shape, T* out) {
  const int64_t size = shape.matrix(), tiles = ceil_div(shape.cols, kThreads);
  if (size == 0 || small_outer(context, OneHot<T>{label}, rows, index, shape, out)) return;
  const Chunks chunks = Chunks::of(index.nnz, tiles, size);
  T* slots = context.template scratch<T>(chunks.count * size);
  context.zero(out, shape.num_annotators * size);
  launch(context, add_labelled_kernel<T>, chunks.count * tiles, kThreads, 0, rows, label, index, shape, chunks, out,
         slots);
  add_slots(context, index, size, chunks, slots, out);
}

// Rows weight_n values[item_n]
template <class T>
GradRows<T> item_rows(const T* values, int64_t cols, const int64_t* item, const T* weight) {
  GradRows<T> rows{values, cols, nullptr, weight};
  rows.item = item;
  return rows;
}

}  // namespace crowdnal::cuda
