// Sums over the annotations of an item: of rows, and of rows times the transposed matrices of their annotators.
#pragma once

#include "cuda/matrix.cuh"
#include "cuda/rows.cuh"

namespace crowdnal::cuda {

// out[i, d] = sum_{n of i} row n of `grad`, a thread an element                                     out: [B, grad.cols]
template <class T>
__global__ void __launch_bounds__(kThreads) sum_items_kernel(GradRows<T> grad, Index index, T* out) {
  const int64_t size = index.num_items * grad.cols;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < size; e += int64_t(gridDim.x) * kThreads) {
    const int64_t i = e / grad.cols, d = e % grad.cols, last = index.indptr[i + 1];
    CROWDNAL_ASSERT(0 <= index.indptr[i] && index.indptr[i] <= last && last <= index.nnz);
    BlockSum<T> sum;
    for (int64_t n = index.indptr[i]; n < last;) {
      const int64_t stop = n + kBlock < last ? n + kBlock : last;
      for (; n < stop; ++n) sum.add(grad.value(n, grad.factor(n), grad.label_of(n), d));
      sum.close();
    }
    out[e] = sum.total;
  }
}

template <class T>
void sum_items(Context& context, const GradRows<T>& grad, const Index& index, T* out) {
  launch(context, sum_items_kernel<T>, ceil_div(index.num_items * grad.cols, kThreads), kThreads, 0, grad, index, out);
}

// out[i, c] = sum_{n of i} sum_k confusion[annotator_n, c, k] grad[n, k]; G lanes an item, a lane the rows l + j G.
template <class T, int G, int kPer>
__global__ void __launch_bounds__(kThreads)
    mix_items_kernel(GradRows<T> grad, const T* confusion, Index index, Shape shape, T* out) {
  constexpr int kGroups = kThreads / G;
  const int lane = threadIdx.x % G;
  const int64_t rows = shape.rows, cols = shape.cols;
  for (int64_t i = int64_t(blockIdx.x) * kGroups + threadIdx.x / G; i < index.num_items;
       i += int64_t(gridDim.x) * kGroups) {
    const int64_t last = index.indptr[i + 1];
    CROWDNAL_ASSERT(0 <= index.indptr[i] && index.indptr[i] <= last && last <= index.nnz);
    T total[kPer] = {};
    for (int64_t n = index.indptr[i]; n < last;) {
      T sums[kPer] = {};
      const int64_t stop = n + kBlock < last ? n + kBlock : last;
      for (; n < stop; ++n) {
        const int64_t r = index.annotator[n], y = grad.label_of(n);
        CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators);
        const T* matrix = confusion + r * rows * cols;
        const T u = grad.factor(n);
        for (int64_t first = 0; first < cols; first += kBlock) {
          T part[kPer] = {};
          const int64_t end = first + kBlock < cols ? first + kBlock : cols;
          for (int64_t k = first; k < end; ++k) {
            const T g = grad.value(n, u, y, k);
            for (int j = 0; j < kPer; ++j) {
              if (lane + j * G < rows) part[j] += matrix[(lane + j * G) * cols + k] * g;
            }
          }
          for (int j = 0; j < kPer; ++j) sums[j] += part[j];
        }
      }
      for (int j = 0; j < kPer; ++j) total[j] += sums[j];
    }
    for (int j = 0; j < kPer; ++j) {
      if (lane + j * G < rows) out[i * rows + lane + j * G] = total[j];
    }
  }
}

template <class T>
void mix_items(Context& context, const GradRows<T>& grad, const T* confusion, const Index& index, const Shape& shape,
               T* out) {
  const auto small = [&](auto kernel, int64_t blocks) {
    launch(context, kernel, blocks, kThreads, 0, grad, confusion, index, shape, out);
  };
  if (is_large(shape)) {
    T* each = context.template scratch<T>(index.nnz * shape.rows);
    multiply_transposed(context, grad, confusion, index, shape, each);
    sum_items(context, GradRows<T>{each, shape.rows}, index, out);
  } else if (shape.rows <= 8) {
    small(mix_items_kernel<T, 8, 1>, group_blocks<8>(index.num_items));
  } else if (shape.rows <= 16) {
    small(mix_items_kernel<T, 16, 1>, group_blocks<16>(index.num_items));
  } else if (shape.rows <= 32) {
    small(mix_items_kernel<T, 32, 1>, group_blocks<32>(index.num_items));
  } else {
    small(mix_items_kernel<T, 32, 4>, group_blocks<32>(index.num_items));
  }
}

}  // namespace crowdnal::cuda
