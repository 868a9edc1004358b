// Matrices of some annotators, copied: what a loss with sparse gradients works on.
#pragma once

#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

constexpr int kSelectTile = kThreads * kAhead;  // elements

// out[t] = confusion[annotators[t]], `size` elements each; a block per tile of one
template <class E>
__global__ void __launch_bounds__(kThreads) select_kernel(const E* confusion, const int64_t* annotators, int64_t count,
                                                          int64_t size, int64_t num_annotators, E* out) {
  const int64_t tiles = (size + kSelectTile - 1) / kSelectTile;
  for (int64_t unit = blockIdx.x; unit < count * tiles; unit += gridDim.x) {
    const int64_t t = unit / tiles, first = unit % tiles * kSelectTile + threadIdx.x, r = annotators[t];
    CROWDNAL_ASSERT(0 <= r && r < num_annotators);
    E got[kAhead];
    CROWDNAL_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      if (first + a * kThreads < size) got[a] = confusion[r * size + first + a * kThreads];
    }
    CROWDNAL_UNROLL
    for (int a = 0; a < kAhead; ++a) {
      if (first + a * kThreads < size) out[t * size + first + a * kThreads] = got[a];
    }
  }
}

template <class E>
void select(Context& context, const E* confusion, const int64_t* annotators, int64_t count, const Shape& shape,
            E* out) {
  const int64_t size = shape.rows * shape.cols;
  launch(context, select_kernel<E>, count * ceil_div(size, kSelectTile), kThreads, 0, confusion, annotators, count,
         size, shape.num_annotators, out);
}

}  // namespace crowdnal::cuda
