// Sums over the annotations of an annotator, who may have most of the work.
//
// `order` is cut into chunks of a size that depends on nothing but sizes. Who ends inside a chunk but began before it
// belongs to the chunk before, whole: the cuts move there. In its chunk a piece of annotations of one annotator has one
// owner: it writes to `out`, or, if the chunk is in the middle of an annotator's, to the chunk's slot. The slots are
// added in their order.
#pragma once

#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

struct Chunks {
  int64_t size;  // positions between cuts, before they move
  int64_t count;
  const int64_t* cuts = nullptr;  // [count + 1]; null: one chunk
  // [count]: 0 where a chunk has no slot, at an annotator's first slot how many there are, -1 at the others
  const int* slots_from = nullptr;

  // Enough of them, times the tiles of a matrix, for every processor; few enough for their slots. `least`: positions.
  static Chunks of(int64_t nnz, int64_t tiles, int64_t matrix, int64_t least = kLanes) {
    constexpr int64_t kUnits = 4096, kSlotElements = 1 << 24;
    const int64_t most = std::max<int64_t>(1, std::min(ceil_div(kUnits, tiles), kSlotElements / matrix));
    const int64_t size = least * std::max<int64_t>(1, ceil_div(nnz, most * least));
    return {size, ceil_div(nnz, size)};
  }
  __device__ int64_t begin(int64_t chunk) const { return cuts ? cuts[chunk] : 0; }
  __device__ int64_t end(int64_t chunk, int64_t nnz) const { return cuts ? cuts[chunk + 1] : nnz; }
  __device__ bool in_slot(int64_t chunk) const { return slots_from && slots_from[chunk] != 0; }
};

// Whether the annotations at positions p - 1 and p have the same annotator.
__device__ inline bool continues(const Index& index, int64_t p) {
  return p > 0 && p < index.nnz && owner_at(index, p - 1) == owner_at(index, p);
}

// The first position from `low` on whose annotator is r or a later one.
__device__ inline int64_t first_position(const Index& index, int64_t r, int64_t low = 0) {
  int64_t high = index.nnz;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (owner_at(index, middle) < r) {
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

// Moves the cuts of `chunks` and finds the slots, a thread per chunk.
static __global__ void __launch_bounds__(kThreads)
    cut_kernel(Index index, Chunks chunks, int64_t* cuts, int* slots_from) {
  const auto annotator = [&](int64_t p) { return owner_at(index, p); };
  // Whether r, who began before this chunk, reaches its end.
  const auto covers = [&](int64_t r, int64_t chunk) {
    const int64_t end = (chunk + 1) * chunks.size;
    return annotator((end < index.nnz ? end : index.nnz) - 1) == r;
  };
  for (int64_t chunk = int64_t(blockIdx.x) * kThreads + threadIdx.x; chunk < chunks.count;
       chunk += int64_t(gridDim.x) * kThreads) {
    const int64_t p = chunk * chunks.size;
    if (chunk == 0) cuts[chunks.count] = index.nnz;
    cuts[chunk] = p;
    slots_from[chunk] = 0;
    if (!continues(index, p)) continue;
    const int64_t r = annotator(p);
    if (!covers(r, chunk)) {
      cuts[chunk] = first_position(index, r + 1, p);
      continue;
    }
    slots_from[chunk] = -1;
    if (continues(index, p - chunks.size) && annotator(p - chunks.size) == r) continue;
    int64_t low = chunk, high = chunks.count;  // r covers `low`, and not `high`
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (covers(r, middle) ? low : high) = middle;
    }
    slots_from[chunk] = static_cast<int>(low - chunk + 1);
  }
}

inline Chunks cut(Context& context, const Index& index, Chunks chunks) {
  if (chunks.count <= 1) return chunks;
  int64_t* cuts = context.scratch<int64_t>(chunks.count + 1);
  int* slots_from = context.scratch<int>(chunks.count);
  launch(context, cut_kernel, ceil_div(chunks.count, kThreads), kThreads, 0, index, chunks, cuts, slots_from);
  chunks.cuts = cuts;
  chunks.slots_from = slots_from;
  return chunks;
}

constexpr int kSlotThreads = 256, kSlotPasses = 8;

// Adds the slots of an annotator, kWays of them side by side: a block per first slot and tile of the matrix, a thread per
// element.
template <class T, int kWays>
__global__ void __launch_bounds__(kSlotThreads)
    add_slots_kernel(Index index, int64_t size, Chunks chunks, const T* slots, T* out) {
  constexpr int kAcross = kSlotThreads / kWays, kTileElements = kAcross * kSlotPasses;
  CROWDNAL_SHARED(double, sums, kSlotThreads);
  const int own = threadIdx.x % kAcross, way = threadIdx.x / kAcross;
  const int64_t tiles = (size + kTileElements - 1) / kTileElements;
  for (int64_t unit = blockIdx.x; unit < (chunks.count - 1) * tiles; unit += gridDim.x) {
    const int64_t chunk = unit / tiles + 1, first = unit % tiles * kTileElements;
    const int count = chunks.slots_from[chunk];
    if (count <= 0) continue;
    const int64_t r = owner_at(index, chunk * chunks.size);
    const T* from = slots + chunk * size;
    for (int64_t begin = first; begin < size && begin < first + kTileElements; begin += kAcross) {
      const int64_t e = begin + own;
      double sum = 0;
      for (int q = way; e < size && q < count; q += kWays * kAhead) {
        T got[kAhead];
        CROWDNAL_UNROLL
        for (int t = 0; t < kAhead; ++t) got[t] = q + t * kWays < count ? from[(q + t * kWays) * size + e] : T(0);
        for (int t = 0; t < kAhead; ++t) sum += static_cast<double>(got[t]);
      }
      if constexpr (kWays > 1) {
        __syncthreads();  // those before are read
        sums[threadIdx.x] = sum;
        __syncthreads();
        for (int w = 1; way == 0 && w < kWays; ++w) sum += sums[w * kAcross + own];
      }
      if (way == 0 && e < size) out[r * size + e] = static_cast<T>(static_cast<double>(out[r * size + e]) + sum);
    }
  }
}

template <class T>
void add_slots(Context& context, const Index& index, int64_t size, const Chunks& chunks, const T* slots, T* out) {
  constexpr int kMany = 64, kWays = 8;  // slots of one annotator, if there is but one
  const auto start = [&](auto kernel, int64_t across) {
    launch(context, kernel, (chunks.count - 1) * ceil_div(size, across * kSlotPasses), kSlotThreads, 0, index, size,
           chunks, slots, out);
  };
  if (chunks.count > kMany) {
    start(add_slots_kernel<T, kWays>, kSlotThreads / kWays);
  } else {
    start(add_slots_kernel<T, 1>, kSlotThreads);
  }
}

}  // namespace crowdnal::cuda
