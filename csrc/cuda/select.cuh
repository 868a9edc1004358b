// Matrices of some annotators, copied: what a loss with sparse gradients works on.
#pragma once

#include "cuda/rows.cuh"

namespace crowdnal::cuda {

// out[t] = confusion[annotators[t]], `size` elements each
template <class E>
__global__ void __launch_bounds__(kThreads)
    select_kernel(const E* confusion, const int64_t* annotators, int64_t count, int64_t size, int64_t num_annotators,
                  E* out) {
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < count * size; e += int64_t(gridDim.x) * kThreads) {
    const int64_t r = annotators[e / size];
    CROWDNAL_ASSERT(0 <= r && r < num_annotators);
    out[e] = confusion[r * size + e % size];
  }
}

template <class E>
void select(Context& context, const E* confusion, const int64_t* annotators, int64_t count, const Shape& shape, E* out) {
  const int64_t size = shape.rows * shape.cols;
  launch(context, select_kernel<E>, ceil_div(count * size, kThreads), kThreads, 0, confusion, annotators, count, size,
         shape.num_annotators, out);
}

}  // namespace crowdnal::cuda
