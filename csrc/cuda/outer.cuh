// out[r, c, k] = sum_{n of r} scores[item_n, c] grad[n, k]: the adjoint of `mix` for the matrices.
#pragma once

#include "cuda/small_outer.cuh"

namespace crowdnal::cuda {

constexpr int kOuterGroup = 8;  // annotations between barriers

// A block a chunk and a tile of kSide x kSide elements, a thread 4 x 4 of them.
template <class T, int kSide>
__global__ void __launch_bounds__(kSide* kSide / 16, 2)
    outer_tile_kernel(GradRows<T> grad, const T* scores, Index index, Shape shape, Chunks chunks, T* out, T* slots) {
  constexpr int kAcross = kSide / 4, kBlockThreads = kAcross * kAcross;
  CROWDNAL_SHARED(T, z, kOuterGroup * kSide);
  CROWDNAL_SHARED(T, g, kOuterGroup * kSide);
  const int64_t across = (shape.cols + kSide - 1) / kSide, tiles = across * ((shape.rows + kSide - 1) / kSide);
  const int y0 = threadIdx.x / kAcross * 4, x0 = threadIdx.x % kAcross * 4;
  for (int64_t unit = blockIdx.x; unit < chunks.count * tiles; unit += gridDim.x) {
    const int64_t chunk = unit / tiles, c0 = unit % tiles / across * kSide, k0 = unit % tiles % across * kSide;
    const int64_t first = chunk * chunks.size;
    const int64_t last = first + chunks.size < index.nnz ? first + chunks.size : index.nnz;
    for (int64_t p = first; p < last;) {
      const int64_t r = index.annotator[index.order[p]];
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators);
      T* to = p == first && continues(index, first) ? slots + chunk * shape.rows * shape.cols
                                                    : out + r * shape.rows * shape.cols;
      T sums[16] = {};
      for (bool more = true; more;) {
        int count = 1;
        while (count < kOuterGroup && p + count < last && continues(index, p + count)) ++count;
        __syncthreads();  // the rows before are read
        for (int e = threadIdx.x; e < kOuterGroup * kSide; e += kBlockThreads) {
          const int j = e / kSide, d = e % kSide;
          T zd = T(0), gd = T(0);
          if (j < count) {
            const int64_t n = index.order[p + j], i = index.item[n];
            CROWDNAL_ASSERT(0 <= i && i < index.num_items);
            if (c0 + d < shape.rows) zd = scores[i * shape.rows + c0 + d];
            if (k0 + d < shape.cols) gd = grad.value(n, grad.factor(n), grad.label_of(n), k0 + d);
          }
          z[e] = zd;
          g[e] = gd;
        }
        __syncthreads();
        T part[16] = {};
        for (int j = 0; j < count; ++j) {
          T a[4], b[4];
          for (int t = 0; t < 4; ++t) {
            a[t] = z[j * kSide + y0 + t];
            b[t] = g[j * kSide + x0 + t];
          }
          for (int t = 0; t < 16; ++t) part[t] += a[t / 4] * b[t % 4];
        }
        for (int t = 0; t < 16; ++t) sums[t] += part[t];
        p += count;
        more = p < last && continues(index, p);
      }
      for (int t = 0; t < 16; ++t) {
        const int64_t c = c0 + y0 + t / 4, k = k0 + x0 + t % 4;
        if (c < shape.rows && k < shape.cols) to[c * shape.cols + k] = sums[t];
      }
    }
  }
}

// out[r, c, k]: every element is written, zero without annotations.
template <class T>
void mix_annotators(Context& context, const GradRows<T>& grad, const T* scores, const Index& index, const Shape& shape,
                    T* out) {
  const int64_t size = shape.matrix(), side = size <= 2048 ? 32 : 64;
  if (size == 0) return;
  if (small_outer(context, ItemScores<T>{scores, index.item, index.num_items}, grad, index, shape, out)) return;
  const int64_t tiles = ceil_div(shape.rows, side) * ceil_div(shape.cols, side);
  const Chunks chunks = Chunks::of(index.nnz, tiles, size);
  T* slots = context.template scratch<T>(chunks.count * size);
  context.zero(out, shape.num_annotators * size);
  const auto start = [&](auto kernel, int threads) {
    launch(context, kernel, chunks.count * tiles, threads, 0, grad, scores, index, shape, chunks, out, slots);
  };
  if (side == 32) {
    start(outer_tile_kernel<T, 32>, 64);
  } else {
    start(outer_tile_kernel<T, 64>, 256);
  }
  add_slots(context, index, size, chunks, slots, out);
}

}  // namespace crowdnal::cuda
