// Sums over the annotations of an annotator, who may have most of the work.
//
// `order` is cut into chunks of a size that depends on nothing but sizes. In its chunk a piece of annotations of one
// annotator has one owner: it writes to `out`, or, if the annotator began in an earlier chunk, to the chunk's slot. The
// slots are added in their order.
#pragma once

#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

struct Chunks {
  int64_t size;  // positions
  int64_t count;

  // Enough of them, times the tiles of a matrix, for every processor; few enough for their slots. `least`: positions.
  static Chunks of(int64_t nnz, int64_t tiles, int64_t matrix, int64_t least = kLanes) {
    constexpr int64_t kUnits = 4096, kSlotElements = 1 << 24;
    const int64_t most = std::max<int64_t>(1, std::min(ceil_div(kUnits, tiles), kSlotElements / matrix));
    const int64_t size = least * std::max<int64_t>(1, ceil_div(nnz, most * least));
    return {size, ceil_div(nnz, size)};
  }
};

// Whether the annotations at positions p - 1 and p have the same annotator.
__device__ inline bool continues(const Index& index, int64_t p) {
  return p > 0 && p < index.nnz && index.annotator[index.order[p - 1]] == index.annotator[index.order[p]];
}

// The first position whose annotator is r or a later one.
__device__ inline int64_t first_position(const Index& index, int64_t r) {
  int64_t low = 0, high = index.nnz;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (index.annotator[index.order[middle]] < r) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// starts[r] = how many annotations have an annotator below r: theirs are at positions starts[r] .. starts[r + 1] - 1.
static __global__ void __launch_bounds__(kThreads) starts_kernel(Index index, int64_t num_annotators, int64_t* starts) {
  for (int64_t r = int64_t(blockIdx.x) * kThreads + threadIdx.x; r <= num_annotators;
       r += int64_t(gridDim.x) * kThreads) {
    starts[r] = first_position(index, r);
    CROWDNAL_ASSERT((r > 0 || starts[r] == 0) && (r < num_annotators || starts[r] == index.nnz));  // all are in range
  }
}

// [R + 1]
inline const int64_t* find_starts(Context& context, const Index& index, int64_t num_annotators) {
  int64_t* starts = context.scratch<int64_t>(num_annotators + 1);
  launch(context, starts_kernel, ceil_div(num_annotators + 1, kThreads), kThreads, 0, index, num_annotators, starts);
  return starts;
}

constexpr int kZeroTile = 2048;  // elements

// out[r] = 0, `size` elements, for annotators without annotations.
template <class T>
__global__ void __launch_bounds__(256)
    zero_absent_kernel(const int64_t* starts, int64_t num_annotators, int64_t size, T* out) {
  const int64_t tiles = (size + kZeroTile - 1) / kZeroTile;
  for (int64_t unit = blockIdx.x; unit < num_annotators * tiles; unit += gridDim.x) {
    const int64_t r = unit / tiles, first = unit % tiles * kZeroTile;
    if (starts[r] < starts[r + 1]) continue;
    const int64_t last = first + kZeroTile < size ? first + kZeroTile : size;
    for (int64_t e = first + threadIdx.x; e < last; e += 256) out[r * size + e] = T(0);
  }
}

// For matrices [R, size] that are written whole where there are annotations.
template <class T>
void zero_absent(Context& context, const Index& index, int64_t num_annotators, int64_t size, T* out) {
  if (index.nnz < num_annotators) return context.zero(out, num_annotators * size);
  launch(context, zero_absent_kernel<T>, num_annotators * ceil_div(size, kZeroTile), 256, 0,
         find_starts(context, index, num_annotators), num_annotators, size, out);
}

constexpr int kSlotTile = 512;  // elements

// Adds the slots of the chunks into which an annotator reaches: a block per first of them and tile of the matrix.
template <class T>
__global__ void __launch_bounds__(256)
    add_slots_kernel(Index index, int64_t size, Chunks chunks, const T* slots, T* out) {
  constexpr int kWays = 8;
  CROWDNAL_SHARED(double, sums, kWays* kLanes);
  const int lane = threadIdx.x % kLanes, way = threadIdx.x / kLanes;
  const int64_t tiles = (size + kSlotTile - 1) / kSlotTile;
  for (int64_t unit = blockIdx.x; unit < (chunks.count - 1) * tiles; unit += gridDim.x) {
    const int64_t chunk = unit / tiles + 1, first = unit % tiles * kSlotTile;
    const int64_t r = index.annotator[index.order[chunk * chunks.size]];
    const auto reaches = [&](int64_t q) {
      return q < chunks.count && index.annotator[index.order[q * chunks.size]] == r;
    };
    if (!continues(index, chunk * chunks.size)) continue;
    if (reaches(chunk - 1) && continues(index, (chunk - 1) * chunks.size)) continue;  // another block's
    for (int64_t e = first + lane; e - lane < size && e - lane < first + kSlotTile; e += kLanes) {
      double sum = 0;
      for (int64_t q = chunk + way; reaches(q); q += kWays) {
        if (e < size) sum += static_cast<double>(slots[q * size + e]);
      }
      sums[threadIdx.x] = sum;
      __syncthreads();
      if (way == 0 && e < size) {
        for (int w = 1; w < kWays; ++w) sum += sums[w * kLanes + lane];
        out[r * size + e] = static_cast<T>(static_cast<double>(out[r * size + e]) + sum);
      }
      __syncthreads();
    }
  }
}

template <class T>
void add_slots(Context& context, const Index& index, int64_t size, const Chunks& chunks, const T* slots, T* out) {
  launch(context, add_slots_kernel<T>, (chunks.count - 1) * ceil_div(size, kSlotTile), 256, 0, index, size, chunks,
         slots, out);
}

// out[r, a, b] = sum_{n of r} term(n, a, b), a thread per element: for matrices too small to be worth more.
template <class T, class Term>
__global__ void __launch_bounds__(kThreads)
    sum_annotators_kernel(Term term, Index index, Shape shape, Chunks chunks, T* out, T* slots) {
  const int64_t size = shape.rows * shape.cols, tiles = (size + kThreads - 1) / kThreads;
  for (int64_t unit = blockIdx.x; unit < chunks.count * tiles; unit += gridDim.x) {
    const int64_t chunk = unit / tiles, e = unit % tiles * kThreads + threadIdx.x;
    if (e >= size) continue;
    const int64_t a = e / shape.cols, b = e % shape.cols, first = chunk * chunks.size;
    const int64_t last = first + chunks.size < index.nnz ? first + chunks.size : index.nnz;
    for (int64_t p = first; p < last;) {
      const int64_t r = index.annotator[index.order[p]];
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators);
      T* to = p == first && continues(index, first) ? slots + chunk * size : out + r * size;
      BlockSum<T> sum;
      do {
        int in_block = 0;
        do {
          sum.add(term(index.order[p], a, b));
          ++p;
        } while (++in_block < kTermBlock && p < last && continues(index, p));
        sum.close();
      } while (p < last && continues(index, p));
      to[e] = sum.total;
    }
  }
}

template <class T, class Term>
void sum_annotators(Context& context, const Term& term, const Index& index, const Shape& shape, T* out) {
  const int64_t size = shape.rows * shape.cols, tiles = ceil_div(size, kThreads);
  const Chunks chunks = Chunks::of(index.nnz, tiles, size);
  T* slots = context.template scratch<T>(chunks.count * size);
  context.zero(out, shape.num_annotators * size);
  launch(context, sum_annotators_kernel<T, Term>, chunks.count * tiles, kThreads, 0, term, index, shape, chunks, out,
         slots);
  add_slots(context, index, size, chunks, slots, out);
}

}  // namespace crowdnal::cuda
