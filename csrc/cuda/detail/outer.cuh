// out[r, c, k] = sum_{n of r} scores[item_n, c] grad[n, k]: the adjoint of `mix` for the matrices.
#pragma once

#include "cuda/detail/small_outer.cuh"

namespace crowdnal::cuda {

constexpr int kOuterGroup = 16;   // annotations between barriers
constexpr int kOuterWindow = 64;  // of which a block knows the rows

// A block a chunk and a tile of kSide x kSide elements, a thread 4 x 4 of them.
template <class T, int kSide>
__global__ void __launch_bounds__(kSide* kSide / 16, (kSide == 64 ? 12 : 48) / sizeof(T))
    outer_tile_kernel(GradRows<T> grad, const T* scores, Index index, Shape shape, Chunks chunks, bool aligned, T* out,
                      T* slots) {
  constexpr int kAcross = kSide / 4, kBlockThreads = kAcross * kAcross;
  CROWDNAL_SHARED(int64_t, who, kOuterWindow);
  CROWDNAL_SHARED(const T*, score_row, kOuterWindow);
  CROWDNAL_SHARED(GradRow<T>, grad_row, kOuterWindow);
  CROWDNAL_SHARED(Quad<T>, z, kOuterGroup * kAcross);
  CROWDNAL_SHARED(Quad<T>, g, kOuterGroup * kAcross);
  const int64_t size = shape.rows * shape.cols, across = (shape.cols + kSide - 1) / kSide;
  const int64_t tiles = across * ((shape.rows + kSide - 1) / kSide);
  const int y = threadIdx.x / kAcross, x = threadIdx.x % kAcross;
  grad.fix_scale();
  for (int64_t unit = blockIdx.x; unit < chunks.count * tiles; unit += gridDim.x) {
    const int64_t chunk = unit / tiles, c0 = unit % tiles / across * kSide, k0 = unit % tiles % across * kSide;
    const int64_t first = chunks.begin(chunk), last = chunks.end(chunk, index.nnz);
    int64_t owner = owner_at(index, first);
    T* to = chunks.in_slot(chunk) ? slots + chunk * size : out + owner * size;
    T sums[16] = {};
    const auto write = [&] {
      for (int a = 0; a < 4; ++a) {
        const int64_t c = c0 + y * 4 + a, k = k0 + x * 4;
        if (c < shape.rows && aligned && k < shape.cols) {
          store<4>(sums + a * 4, to + c * shape.cols + k);
        } else {
          for (int b = 0; b < 4; ++b) {
            if (c < shape.rows && k + b < shape.cols) to[c * shape.cols + k + b] = sums[a * 4 + b];
          }
        }
      }
      for (int t = 0; t < 16; ++t) sums[t] = T(0);
    };
    for (int64_t window = first; window < last; window += kOuterWindow) {
      const int count = last - window < kOuterWindow ? static_cast<int>(last - window) : kOuterWindow;
      __syncthreads();  // the window before is done
      if (static_cast<int>(threadIdx.x) < count) {
        const Ordered at = ordered(index, window + threadIdx.x);
        CROWDNAL_ASSERT(0 <= at.item && at.item < index.num_items);
        CROWDNAL_ASSERT(0 <= at.annotator && at.annotator < shape.num_annotators);
        who[threadIdx.x] = at.annotator;
        score_row[threadIdx.x] = scores + at.item * shape.rows + c0;
        grad_row[threadIdx.x] = grad.find(at, index.num_items);
      }
      __syncthreads();
      for (int j = 0; j < count;) {
        if (who[j] != owner) {
          write();
          owner = who[j];
          to = out + owner * size;
        }
        int stop = j + 1;
        while (stop < count && stop < j + kOuterGroup && who[stop] == owner) ++stop;
        for (int e = threadIdx.x; e < (stop - j) * kAcross; e += kBlockThreads) {
          const int m = j + e / kAcross, d = e % kAcross * 4;
          const T* score = score_row[m];
          const GradRow<T> row = grad_row[m];
          Quad<T> zs{}, gs{};
          for (int v = 0; v < 4; ++v) {
            if (c0 + d + v < shape.rows) zs.values[v] = score[d + v];
            if (k0 + d + v < shape.cols) gs.values[v] = row[k0 + d + v];
          }
          z[e] = zs;
          g[e] = gs;
        }
        __syncthreads();
        T part[16] = {};
        for (int e = 0; e < (stop - j) * kAcross; e += kAcross) {
          const Quad<T> a = z[e + y], b = g[e + x];
          for (int t = 0; t < 16; ++t) part[t] += a.values[t / 4] * b.values[t % 4];
        }
        for (int t = 0; t < 16; ++t) sums[t] += part[t];
        j = stop;
        __syncthreads();  // the rows are read
      }
    }
    write();
  }
}

// out[r, c, k]: every element is written, zero without annotations.
template <class T>
void mix_annotators(Context& context, const GradRows<T>& grad, const T* scores, const Index& index, const Shape& shape,
                    T* out) {
  const int64_t size = shape.matrix(), side = size <= 2048 ? 32 : 64;
  if (size == 0) return;
  if (small_outer(context, ItemScores<T>{scores, index.num_items}, grad, index, shape, out)) return;
  const int64_t tiles = ceil_div(shape.rows, side) * ceil_div(shape.cols, side);
  // Short chunks where they hold many annotators, each of whom is work of its own.
  const int64_t least = index.nnz < kLanes * shape.num_annotators ? kOuterGroup / 2 : kLanes;
  const Chunks chunks = cut(context, index, Chunks::of(index.nnz, tiles, size, least));
  T* slots = context.template scratch<T>(chunks.count * size);
  const bool aligned = alignment_bits(shape.cols, out, slots) % 4 == 0;
  zero_absent(context, index, shape.num_annotators, size, out);
  const auto start = [&](auto kernel, int threads) {
    launch(context, kernel, chunks.count * tiles, threads, 0, grad, scores, index, shape, chunks, aligned, out, slots);
  };
  if (side == 32) {
    start(outer_tile_kernel<T, 32>, 64);
  } else {
    start(outer_tile_kernel<T, 64>, 256);
  }
  add_slots(context, index, size, chunks, slots, out);
}

}  // namespace crowdnal::cuda
