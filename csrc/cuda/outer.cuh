// out[r, c, k] = sum_{n of r} scores[item_n, c] grad[n, k]: the adjoint of `mix` for the matrices.
#pragma once

#include "cuda/chunks.cuh"

namespace crowdnal::cuda {

// A warp a chunk: a lane owns kPer elements of the matrix.
template <class T, int kPer>
__global__ void __launch_bounds__(kThreads)
    outer_kernel(GradRows<T> grad, const T* scores, Index index, Shape shape, Chunks chunks, T* out, T* slots) {
  constexpr int kWarps = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes, size = static_cast<int>(shape.rows * shape.cols);
  int row[kPer], col[kPer];
  for (int t = 0; t < kPer; ++t) {
    row[t] = (lane + t * kLanes) / static_cast<int>(shape.cols);
    col[t] = (lane + t * kLanes) % static_cast<int>(shape.cols);
  }
  for (int64_t chunk = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes; chunk < chunks.count;
       chunk += int64_t(gridDim.x) * kWarps) {
    const int64_t first = chunk * chunks.size;
    const int64_t last = first + chunks.size < index.nnz ? first + chunks.size : index.nnz;
    int64_t owner = index.annotator[index.order[first]];
    T* to = continues(index, first) ? slots + chunk * size : out + owner * size;
    BlockSum<T> sums[kPer];
    for (int64_t p = first; p < last; p += kLanes) {
      const int64_t n = index.order[p + lane < last ? p + lane : last - 1], i = index.item[n], r = index.annotator[n];
      CROWDNAL_ASSERT(0 <= i && i < index.num_items && 0 <= r && r < shape.num_annotators);
      const T u = grad.factor(n);
      const int64_t y = grad.label_of(n);
      const int count = last - p < kLanes ? static_cast<int>(last - p) : kLanes;
      for (int j = 0; j < count; ++j) {
        const int64_t here = __shfl_sync(kAll, r, j), nj = __shfl_sync(kAll, n, j), ij = __shfl_sync(kAll, i, j);
        const int64_t yj = __shfl_sync(kAll, y, j);
        const T uj = __shfl_sync(kAll, u, j);
        if (here != owner) {
          for (int t = 0; t < kPer; ++t) {
            sums[t].close();
            if (lane + t * kLanes < size) to[lane + t * kLanes] = sums[t].total;
            sums[t] = {};
          }
          owner = here;
          to = out + owner * size;
        }
        for (int t = 0; t < kPer; ++t) {
          if (lane + t * kLanes < size) {
            sums[t].add(scores[ij * shape.rows + row[t]] * grad.value(nj, uj, yj, col[t]));
          }
        }
      }
      for (int t = 0; t < kPer; ++t) sums[t].close();
    }
    for (int t = 0; t < kPer; ++t) {
      if (lane + t * kLanes < size) to[lane + t * kLanes] = sums[t].total;
    }
  }
}

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
  const int64_t size = shape.rows * shape.cols, side = size <= 2048 ? 32 : 64;
  if (size == 0) return;
  const int64_t tiles = size <= 256 ? 1 : ceil_div(shape.rows, side) * ceil_div(shape.cols, side);
  const Chunks chunks = Chunks::of(index.nnz, tiles, size);
  T* slots = context.template scratch<T>(chunks.count * size);
  context.zero(out, shape.num_annotators * size);
  const auto start = [&](auto kernel, int64_t blocks, int threads) {
    launch(context, kernel, blocks, threads, 0, grad, scores, index, shape, chunks, out, slots);
  };
  if (size <= 64) {
    start(outer_kernel<T, 2>, group_blocks<kLanes>(chunks.count), kThreads);
  } else if (size <= 256) {
    start(outer_kernel<T, 8>, group_blocks<kLanes>(chunks.count), kThreads);
  } else if (side == 32) {
    start(outer_tile_kernel<T, 32>, chunks.count * tiles, 64);
  } else {
    start(outer_tile_kernel<T, 64>, chunks.count * tiles, 256);
  }
  add_slots(context, index, size, chunks, slots, out);
}

}  // namespace crowdnal::cuda
