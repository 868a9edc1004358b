// out[r, a, b] = sum_{n of r} left_n[a] right_n[b], for matrices that a warp holds in its registers.
#pragma once

#include <type_traits>

#include "cuda/detail/chunks.cuh"

namespace crowdnal::cuda {

// left_n = the scores of the annotation's item.
template <class T>
struct ItemScores {
  const T* scores;  // [B, rows]
  int64_t num_items;
  using Row = const T*;
  int64_t alignment_bits() const { return cuda::alignment_bits(0, scores); }
  __device__ Row row(const Ordered& at, int rows) const {
    CROWDNAL_ASSERT(0 <= at.item && at.item < num_items);
    return scores + at.item * rows;
  }
  template <int V>
  __device__ static void load(Row row, int a, T* to) {
    cuda::load<V>(row + a, to);
  }
  __device__ static T product(T a, T b) { return a * b; }
};

// What a warp has fetched of an annotation.
template <class T, class Row>
struct Fetched {
  GradRow<T> right;
  Row left;
};

// to[at + j width + d] = what `row(j, d, ..)` loads, for V numbers at a time of `count` rows, by a warp: several loads
// in flight at a time.
template <class T, int V, class Array, class Row>
__device__ void stage(Array& to, int at, int count, int width, const Row& row) {
  constexpr int kAtOnce = 5;
  const int lane = threadIdx.x % kLanes, units = width / V, step = kLanes / units, rest = kLanes % units;
  for (int e = lane, j = lane / units, d = lane % units; e < count * units; e += kAtOnce * kLanes) {
    T got[kAtOnce][V];
    CROWDNAL_UNROLL
    for (int t = 0; t < kAtOnce; ++t) {
      row(j < count ? j : count - 1, d * V, got[t]);
      const bool wraps = d + rest >= units;
      j += wraps ? step + 1 : step;
      d += wraps ? rest - units : rest;
    }
    CROWDNAL_UNROLL
    for (int t = 0; t < kAtOnce; ++t) {
      for (int v = 0; v < V; ++v) {
        if (e + t * kLanes < count * units) to[at + (e + t * kLanes) * V + v] = got[t][v];
      }
    }
  }
}

constexpr int kStaged = 1024;  // numbers of rows that a warp has at hand

// A warp a chunk, a lane kDown x kAcross elements of the matrix. The warp fetches the rows of a batch of annotations
// side by side, so that their ways from memory overlap, and then multiplies what it has. Rows are padded to whole
// elements of lanes, with numbers that no element asked for depends on.
template <class T, int kDown, int kAcross, int V, class Left>
__global__ void __launch_bounds__(kThreads, (kDown * kAcross > 4 ? 16 : 32) / sizeof(T))
    small_outer_kernel(Left left, GradRows<T> right, Index index, Shape shape, Chunks chunks, T* out, T* slots) {
  constexpr int kWarps = kThreads / kLanes, kOwn = kDown * kAcross;
  using Of = Fetched<T, typename Left::Row>;
  CROWDNAL_SHARED(T, staged, kWarps * kStaged);
  CROWDNAL_SHARED(Of, fetched, kThreads);
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, own = warp * kLanes;
  const int rows = static_cast<int>(shape.rows), cols = static_cast<int>(shape.cols), size = rows * cols;
  const int down = (rows + kDown - 1) / kDown * kDown, across = (cols + kAcross - 1) / kAcross * kAcross;
  const int batch = kStaged / (down + across) < kLanes ? kStaged / (down + across) : kLanes;
  const int a0 = lane / (across / kAcross) * kDown, b0 = lane % (across / kAcross) * kAcross;
  const int z0 = warp * kStaged, g0 = z0 + batch * down;
  const int z_lane = z0 + (a0 < down ? a0 : 0), g_lane = g0 + b0;
  right.fix_scale();
  for (int64_t chunk = int64_t(blockIdx.x) * kWarps + warp; chunk < chunks.count;
       chunk += int64_t(gridDim.x) * kWarps) {
    const int64_t first = chunks.begin(chunk), last = chunks.end(chunk, index.nnz);
    int64_t owner = owner_at(index, first);
    T* to = chunks.in_slot(chunk) ? slots + chunk * size : out + owner * size;
    BlockSum<T> sums[kOwn];
    const auto write = [&] {
      for (int t = 0; t < kOwn; ++t) {
        const int a = a0 + t / kAcross, b = b0 + t % kAcross;
        sums[t].close();
        if (a < rows && b < cols) to[a * cols + b] = sums[t].total;
        sums[t] = {};
      }
    };
    for (int64_t p = first; p < last; p += batch) {
      const int count = last - p < batch ? static_cast<int>(last - p) : batch;
      const bool mine = lane < count;
      const int64_t q = mine ? p + lane : p + count - 1;
      const Ordered at = ordered(index, q);
      int64_t r = owner;
      unsigned starts = 0;  // of other annotators in the batch; they are sorted: the last tells whether there are any
      if (__ballot_sync(kAll, lane == count - 1 && owner_at(index, q) != owner)) {
        r = owner_at(index, q);
        const int64_t before = __shfl_up_sync(kAll, r, 1);
        starts = __ballot_sync(kAll, mine && r != (lane == 0 ? owner : before));
      }
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators);
      __syncwarp();  // the batch before is read
      if (mine) {
        fetched[threadIdx.x] = Of{right.find(at, index.num_items), left.row(at, rows)};
      }
      __syncwarp();
      stage<T, V>(staged, z0, count, down, [&](int j, int a, T* got) {
        const Of of = fetched[own + j];
        Left::template load<V>(of.left, a < rows ? a : rows - V, got);
      });
      stage<T, V>(staged, g0, count, across, [&](int j, int b, T* got) {
        const Of of = fetched[own + j];
        const int k = b < cols ? b : cols - V;
        load<V>(of.right.values + k, got);
        for (int v = 0; v < V; ++v) got[v] = of.right.at(got[v], k + v);
      });
      __syncwarp();
      for (int j = 0; j < count;) {
        if (starts >> j & 1) {
          write();
          owner = __shfl_sync(kAll, r, j);
          to = out + owner * size;
        }
        const unsigned later = starts & ~((2u << j) - 1);
        for (const int stop = later ? __ffs(later) - 1 : count; j < stop; ++j) {
          T z[kDown], g[kAcross];
          for (int t = 0; t < kDown; ++t) z[t] = staged[z_lane + j * down + t];
          for (int t = 0; t < kAcross; ++t) g[t] = staged[g_lane + j * across + t];
          for (int t = 0; t < kOwn; ++t) sums[t].add(Left::product(z[t / kAcross], g[t % kAcross]));
        }
      }
      for (int t = 0; t < kOwn; ++t) sums[t].close();
    }
    write();
  }
}

// Whether a warp holds such a matrix; if so, and it has elements, every one is written, zero without annotations.
template <class T, class Left>
bool small_outer(Context& context, const Left& left, const GradRows<T>& right, const Index& index, const Shape& shape,
                 T* out) {
  const auto fits = [&](int64_t down, int64_t across) {
    return ceil_div(shape.rows, down) * ceil_div(shape.cols, across) <= kLanes;
  };
  const int64_t size = shape.matrix();
  if (!fits(4, 2)) return false;
  const Chunks chunks = cut(context, index, Chunks::of(index.nnz, 1, size));
  T* slots = context.template scratch<T>(chunks.count * size);
  context.zero(out, shape.num_annotators * size);
  const auto start = [&](auto kernel) {
    launch(context, kernel, group_blocks<kLanes>(chunks.count), kThreads, 0, left, right, index, shape, chunks, out,
           slots);
  };
  const auto start_with = [&](auto vector) {
    constexpr int V = decltype(vector)::value;
    if (fits(2, 2)) {
      start(small_outer_kernel<T, 2, 2, V, Left>);
    } else {
      start(small_outer_kernel<T, 4, 2, V, Left>);
    }
  };
  const int64_t alignment = left.alignment_bits() | alignment_bits(shape.rows | shape.cols, right.values);
  if (sizeof(T) == sizeof(float) && alignment % 2 == 0) {
    start_with(std::integral_constant<int, sizeof(T) == sizeof(float) ? 2 : 1>{});
  } else {
    start_with(std::integral_constant<int, 1>{});
  }
  add_slots(context, index, size, chunks, slots, out);
  return true;
}

}  // namespace crowdnal::cuda
