// Rows of the pair confusion: a class of an item's difficulty or of an annotator's competence, held by a part of a
// warp, a group. Exponentials of a sum factorise: exp(D + C) = exp(D) exp(C), so they are taken once per annotator and
// once per item where a kernel stays with it, and an annotation costs multiply-adds. Where such a sum gets too small to
// be accurate, its class goes through logarithms instead (the exact rows).
#pragma once

#include "cuda/detail/chunks.cuh"

namespace crowdnal::cuda {

// Terms that underflow are lost from a sum: it is right where it is this large, and its inverse is far from overflow.
template <class T>
constexpr T kTiny = T(sizeof(T) == 4 ? 1e-20 : 1e-200);
template <class T>
constexpr T kGap = T(sizeof(T) == 4 ? 46 : 460);

struct Annotation {
  int64_t n, item, annotator, label;
};

template <class T, class E>
struct Pairs {
  const E* difficulty;  // [B, classes, labels, latents]
  const E* competence;  // [R, classes, labels, latents]
  int64_t num_annotators, classes, labels, latents;
  Index index;
  const int64_t* label;             // [nnz]
  const T* tiles = nullptr;         // [places, classes, labels, latents] exp(competence - maximum of the class)
  const int64_t* places = nullptr;  // [R] of the annotators who are present; null: an annotator's place is its number
  const T* highest = nullptr;       // [B, classes] maxima of the rows of items with annotations, where rows are wide

  __host__ __device__ int tile() const { return static_cast<int>(labels * latents); }
  __host__ __device__ int size() const { return static_cast<int>(classes) * tile(); }
  __device__ Annotation fetch(int64_t n) const { return {n, index.item[n], index.annotator[n], label[n]}; }
  // Apart, so that the loads of one can be in flight while another is worked on.
  __device__ void check(const Annotation& a) const {
    const auto below = [](int64_t x, int64_t size) { return static_cast<uint64_t>(x) < static_cast<uint64_t>(size); };
    CROWDNAL_ASSERT(below(a.item, index.num_items) & below(a.annotator, num_annotators) & below(a.label, labels));
  }
  // Where the latents of the observed label begin in a row.
  __device__ int observed(const Annotation& a) const { return static_cast<int>(a.label) * static_cast<int>(latents); }
  // Of class k of an item, where rows are wide.
  template <class L>
  __device__ T highest_of(int64_t i, int k) const {
    return L::kWide ? highest[i * classes + k] : T(0);
  }
  __device__ const T* tile_of(int64_t r) const { return tiles + (places ? places[r] : r) * size(); }
};

// How a group holds a row. kWide: it walks along rows of more than kWidth elements.
template <int kLanesOfRow, int kPieces, int kVector, bool kWalks>
struct PairTier : Tier<kLanesOfRow, kPieces, kVector> {
  static constexpr bool kWide = kWalks;
};

// body(tier) for rows of these pairs. The elements of a vector have one label.
template <class T, class E, class Body>
void for_pair_tier(const Pairs<T, E>& pairs, const Body& body) {
  const int tile = pairs.tile();
  if constexpr (sizeof(T) == sizeof(float)) {
    if (alignment_bits(pairs.latents, pairs.difficulty, pairs.competence) % 4 == 0) {
      if (tile <= 32) return body(PairTier<4, 2, 4, false>{});
      if (tile <= 48) return body(PairTier<4, 3, 4, false>{});
      if (tile <= 96) return body(PairTier<8, 3, 4, false>{});
      return body(PairTier<32, 2, 4, true>{});
    }
  }
  if (tile <= 32) return body(PairTier<8, 4, 1, false>{});
  return body(PairTier<32, 4, 1, true>{});
}

// Where a lane is in a matrix of rows: at class k, in the pass that begins at `first` of a row.
template <class L>
struct Place {
  int begin;  // of the lane's elements in the row
  int tile;
  int at;  // of those in the matrix
  __device__ Place(int k, int first, int tile) : begin(first + L::column(0)), tile(tile), at(k * tile + begin) {}
  static constexpr int step(int j) { return j * L::G * L::V; }  // from the lane's first piece to piece j
  __device__ bool has(int j) const { return begin + step(j) < tile; }
  // Whether piece j is of the label whose latents begin at `own`.
  __device__ bool observed(int j, int own, int latents) const {
    return static_cast<unsigned>(begin - own + step(j)) < static_cast<unsigned>(latents);
  }
};

// What the lane holds of the matrix; pieces behind the end of the row stay as they are.
template <class L, class T, class E>
__device__ void load_row(const E* matrix, const Place<L>& place, T (&to)[L::kOwn]) {
  const E* from = matrix + place.at;
  for (int j = 0; j < L::kPer; ++j) {
    if (place.has(j)) load<L::V>(from + place.step(j), to + j * L::V);
  }
}

// Maximum over what a group holds, 0 where it is -infinity. All lanes of the warp take part.
template <class L, class T>
__device__ T highest(const T (&values)[L::kOwn]) {
  T most = values[0];
  for (int t = 1; t < L::kOwn; ++t) most = std::fmax(most, values[t]);
  most = group_max<L::G>(most);
  return most == T(-INFINITY) ? T(0) : most;
}

// As `highest`, of class k of a matrix, along which the group walks once.
template <class L, class T, class E>
__device__ T highest_along(const E* matrix, int k, int tile) {
  T most[L::kOwn];
  for (int t = 0; t < L::kOwn; ++t) most[t] = T(-INFINITY);
  for (int first = 0; first < tile; first += L::kWidth) {
    T values[L::kOwn];
    for (int t = 0; t < L::kOwn; ++t) values[t] = T(-INFINITY);
    load_row(matrix, Place<L>(k, first, tile), values);
    for (int t = 0; t < L::kOwn; ++t) most[t] = std::fmax(most[t], values[t]);
  }
  return highest<L>(most);
}

// exp(row - its maximum), 0 behind the end of the row; `along`: the maximum, where the row is wide. All lanes of the
// warp take part.
template <class L, class T, class E>
__device__ void exp_row(const E* matrix, const Place<L>& place, T along, T (&to)[L::kOwn]) {
  for (int t = 0; t < L::kOwn; ++t) to[t] = T(-INFINITY);
  load_row(matrix, place, to);
  const T shift = L::kWide ? along : highest<L>(to);
  for (int t = 0; t < L::kOwn; ++t) to[t] = std::exp(to[t] - shift);
}

// The lanes of the group of this one.
template <int G>
__device__ unsigned group_mask() {
  return (kAll >> (kLanes - G)) << threadIdx.x % kLanes / G * G;
}

// sum = sum of exp(.. - shift); shift: the maximum, 0 where that is -infinity.
template <class T>
struct ShiftedSum {
  T shift, sum;
};

// Logarithms of one class of a pair, relative to the maxima so that they stay accurate where both are large. The lanes
// of a group take part, and no others need to.
template <class T, class E, int G>
struct ExactRow {
  const E *item, *annotator;
  T item_highest, annotator_highest;

  __device__ ExactRow(const Pairs<T, E>& pairs, const Annotation& a, int k)
      : item(pairs.difficulty + a.item * pairs.size() + k * pairs.tile()),
        annotator(pairs.competence + a.annotator * pairs.size() + k * pairs.tile()),
        item_highest(highest(0, pairs.tile(), [this](int m) { return T(item[m]); })),
        annotator_highest(highest(0, pairs.tile(), [this](int m) { return T(annotator[m]); })) {}

  __device__ T operator()(int m) const { return (T(item[m]) - item_highest) + (T(annotator[m]) - annotator_highest); }
  __device__ ShiftedSum<T> sum(int begin, int end) const {
    const T shift = highest(begin, end, *this);
    T sum = T(0);
    CROWDNAL_ROLLED
    for (int m = begin + threadIdx.x % G; m < end; m += G) sum += std::exp((*this)(m)-shift);
    for (int d = G / 2; d > 0; d /= 2) sum += __shfl_xor_sync(group_mask<G>(), sum, d);
    return {shift, sum};
  }

 private:
  template <class Values>
  __device__ static T highest(int begin, int end, const Values& values) {
    T most = -INFINITY;
    CROWDNAL_ROLLED
    for (int m = begin + threadIdx.x % G; m < end; m += G) most = std::fmax(most, values(m));
    for (int d = G / 2; d > 0; d /= 2) most = std::fmax(most, __shfl_xor_sync(group_mask<G>(), most, d));
    return most == T(-INFINITY) ? T(0) : most;
  }
};

// A group a class of a place: an annotator, or, if there are fewer annotations than annotators, the position where the
// annotator's begin.
template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads, 32 / sizeof(T))
    tile_kernel(Pairs<T, E> pairs, int64_t count, T* tiles, int64_t* places) {
  constexpr int kGroups = kThreads / L::G;
  const int tile = pairs.tile(), classes = static_cast<int>(pairs.classes);
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < count * classes; base += int64_t(gridDim.x) * kGroups) {
    const int64_t row = base + threadIdx.x / L::G, place = row / classes;
    const int k = static_cast<int>(row - place * classes);
    bool active = place < count;
    int64_t r = active ? place : 0;
    if (places) {
      active = active && !continues(pairs.index, r);
      r = pairs.index.annotator[pairs.index.order[r]];
      CROWDNAL_ASSERT(0 <= r && r < pairs.num_annotators);
      if (active && k == 0 && threadIdx.x % L::G == 0) places[r] = place;
    }
    const E* matrix = pairs.competence + r * pairs.size();
    T shift = T(0);
    if constexpr (L::kWide) shift = highest_along<L, T>(matrix, k, tile);
    for (int first = 0; first < (L::kWide ? tile : 1); first += L::kWidth) {
      const Place<L> own(k, first, tile);
      T e[L::kOwn];
      exp_row(matrix, own, shift, e);
      for (int j = 0; j < L::kPer; ++j) {
        if (active && own.has(j)) store<L::V>(e + j * L::V, tiles + place * pairs.size() + own.at + own.step(j));
      }
    }
  }
}

// highest[i, k] = the maximum of class k of item i, a warp per row.
template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads, 32 / sizeof(T)) highest_kernel(Pairs<T, E> pairs, T* highest) {
  static_assert(L::G == kLanes);
  constexpr int kWarps = kThreads / kLanes;
  const int64_t classes = pairs.classes, rows = pairs.index.num_items * classes;
  for (int64_t row = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes; row < rows;
       row += int64_t(gridDim.x) * kWarps) {
    const int64_t i = row / classes;
    if (pairs.index.indptr[i] == pairs.index.indptr[i + 1]) continue;
    const T most = highest_along<L, T>(pairs.difficulty + i * pairs.size(), static_cast<int>(row % classes),
                                       pairs.tile());
    if (threadIdx.x % kLanes == 0) highest[row] = most;
  }
}

// Fills in what the kernels read of the annotators, and of items with wide rows.
template <class T, class E>
Pairs<T, E> with_tiles(Context& context, Pairs<T, E> pairs) {
  const int64_t count = std::min(pairs.index.nnz, pairs.num_annotators);
  T* tiles = context.template scratch<T>(count * pairs.size());
  int64_t* places = count < pairs.num_annotators ? context.template scratch<int64_t>(pairs.num_annotators) : nullptr;
  for_pair_tier(pairs, [&](auto tier) {
    using L = decltype(tier);
    launch(context, tile_kernel<T, E, L>, group_blocks<L::G>(count * pairs.classes), kThreads, 0, pairs, count, tiles,
           places);
    if constexpr (L::kWide) {
      const int64_t rows = pairs.index.num_items * pairs.classes;
      T* highest = context.template scratch<T>(rows);
      launch(context, highest_kernel<T, E, L>, group_blocks<kLanes>(rows), kThreads, 0, pairs, highest);
      pairs.highest = highest;
    }
  });
  pairs.tiles = tiles;
  pairs.places = places;
  return pairs;
}

}  // namespace crowdnal::cuda
