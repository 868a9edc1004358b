#include "cpu/detail/pair_rows.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <type_traits>

#include "cpu/detail/simd.h"

namespace crowdnal::cpu {
namespace {

template <class T>
constexpr T kLowest = -std::numeric_limits<T>::infinity();

// Terms that underflow are lost from a sum: it is right where it is this large, and its inverse is far from overflow.
template <class T>
constexpr T kGap = T(sizeof(T) == 4 ? 46 : 460);
template <class T>
constexpr T kTiny = T(sizeof(T) == 4 ? 1e-20 : 1e-200);

#define CROWDNAL_BY_WIDTH(width, body) \
  switch (width) {                     \
    case 4: return body(4);            \
    case 8: return body(8);            \
    default: return body(16);          \
  }

using FourFloats = float __attribute__((vector_size(16)));
using FourDoubles = double __attribute__((vector_size(32)));

// to[c, r] = from[r, c], in squares of four where the compiler has shuffles: one by one it is most of a tile's time.
template <class T>
CROWDNAL_INLINE void transpose(const T* from, int64_t stride, int64_t rows, int64_t cols, T* __restrict to,
                               int64_t to_stride) {
  int64_t r = 0;
#if __has_builtin(__builtin_shufflevector)
  using Four = std::conditional_t<sizeof(T) == 4, FourFloats, FourDoubles>;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= cols; c += 4) {
      Four v[4], low[2], high[2];
      for (int64_t i = 0; i < 4; ++i) std::memcpy(&v[i], from + (r + i) * stride + c, sizeof(Four));
      for (int64_t i = 0; i < 2; ++i) {
        low[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 0, 4, 1, 5);
        high[i] = __builtin_shufflevector(v[2 * i], v[2 * i + 1], 2, 6, 3, 7);
      }
      v[0] = __builtin_shufflevector(low[0], low[1], 0, 1, 4, 5);
      v[1] = __builtin_shufflevector(low[0], low[1], 2, 3, 6, 7);
      v[2] = __builtin_shufflevector(high[0], high[1], 0, 1, 4, 5);
      v[3] = __builtin_shufflevector(high[0], high[1], 2, 3, 6, 7);
      for (int64_t i = 0; i < 4; ++i) std::memcpy(to + (c + i) * to_stride + r, &v[i], sizeof(Four));
    }
    for (; c < cols; ++c) {
      for (int64_t i = 0; i < 4; ++i) to[c * to_stride + r + i] = from[(r + i) * stride + c];
    }
  }
#endif
  for (; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) to[c * to_stride + r] = from[r * stride + c];
  }
}

template <int64_t W, class T>
CROWDNAL_INLINE void tile_of(const T* values, const Tiles& tiles, T* __restrict highest, T* __restrict tile) {
  const int64_t inner = tiles.inner();
  for (int64_t first = 0; first < tiles.classes; first += W, tile += W * inner) {
    const int64_t count = std::min(W, tiles.classes - first);
    if (count < W) std::fill_n(tile, W * inner, kLowest<T>);
    transpose(values + first * inner, inner, count, inner, tile, W);
    T shift[W];
    for (int64_t k = 0; k < W; ++k) shift[k] = kLowest<T>;
    for (int64_t e = 0; e < inner; ++e) {
#pragma omp simd
      for (int64_t k = 0; k < W; ++k) {
        const T x = tile[e * W + k];
        shift[k] = x > shift[k] ? x : shift[k];
      }
    }
    for (int64_t k = 0; k < W; ++k) shift[k] = highest[first + k] = shift[k] == kLowest<T> ? T(0) : shift[k];
    for (int64_t e = 0; e < inner; ++e) {
      for (int64_t k = 0; k < W; ++k) tile[e * W + k] = fast_decay(tile[e * W + k] - shift[k]);
    }
  }
}

// One class of a pair: logarithms of v, relative to the highest so that they stay accurate where both are large.
template <class T>
struct Row {
  const T *d, *c;
  T d_highest, c_highest;
  CROWDNAL_INLINE T operator[](int64_t e) const { return (d[e] - d_highest) + (c[e] - c_highest); }
  CROWDNAL_INLINE Row from(int64_t begin) const { return {d + begin, c + begin, d_highest, c_highest}; }
};

// sum exp(row - shift) over `count` numbers and its shift: their maximum, 0 where that is -infinity.
template <class T>
CROWDNAL_INLINE T exact_sum(Row<T> row, int64_t count, T& shift) {
  T highest = kLowest<T>, sum = 0;
#pragma omp simd reduction(max : highest)
  for (int64_t e = 0; e < count; ++e) {
    const T x = row[e];
    highest = x > highest ? x : highest;
  }
  const T base = highest == kLowest<T> ? T(0) : highest;
#pragma omp simd reduction(+ : sum)
  for (int64_t e = 0; e < count; ++e) sum += fast_decay(row[e] - base);
  shift = base;
  return sum;
}

template <class T>
CROWDNAL_INLINE Row<T> row_of(const Side<T>& item, const Side<T>& annotator, const Tiles& tiles, int64_t k) {
  return {item.values + k * tiles.inner(), annotator.values + k * tiles.inner(), item.highest[k], annotator.highest[k]};
}

template <class T>
CROWDNAL_CLONES void exact_row(const Row<T>& row, const Tiles& tiles, int64_t label, T& log_q, T& log_norm) {
  T shift, observed_shift;
  const T sum = exact_sum(row, tiles.inner(), shift);
  const T observed = exact_sum(row.from(label * tiles.latents), tiles.latents, observed_shift);
  log_norm = fast_log(sum) + shift;
  log_q = sum == 0 ? kLowest<T> : (observed_shift - shift) + (fast_log(observed) - fast_log(sum));
}

// to += scale x softmax of `count` numbers of a row; nothing where they are all -infinity.
template <class T>
CROWDNAL_INLINE void add_share(Row<T> row, int64_t count, T scale, T* __restrict to) {
  T shift;
  const T sum = exact_sum(row, count, shift);
  if (sum == 0) return;
  scale /= sum;
  for (int64_t e = 0; e < count; ++e) to[e] += scale * fast_decay(row[e] - shift);
}

template <int64_t W, class T>
CROWDNAL_INLINE void sums_of(const T* d, const T* c, int64_t latents, T* __restrict sum) {
  T part[W] = {};
  for (int64_t l = 0; l < latents; ++l) {
    for (int64_t k = 0; k < W; ++k) part[k] += d[l * W + k] * c[l * W + k];
  }
  for (int64_t k = 0; k < W; ++k) sum[k] += part[k];
}

template <int64_t W, class T>
CROWDNAL_INLINE void pair_row_of(const Side<T>& item, const Side<T>& annotator, const Tiles& tiles, int64_t label,
                                 T* log_q, T* log_norm) {
  for (int64_t first = 0; first < tiles.classes; first += W) {
    const T *d = item.tile + first * tiles.inner(), *c = annotator.tile + first * tiles.inner();
    const int64_t step = tiles.latents * W, count = std::min(W, tiles.classes - first);
    T sum[W] = {}, observed[W] = {}, log_norms[W], log_qs[W];
    for (int64_t j = 0; j < tiles.labels; ++j) sums_of<W>(d + j * step, c + j * step, tiles.latents, sum);
    sums_of<W>(d + label * step, c + label * step, tiles.latents, observed);  // the very bits that went into `sum`
    for (int64_t k = 0; k < W; ++k) {
      log_norms[k] = fast_log(sum[k]);
      log_qs[k] = fast_log(observed[k] / sum[k]);
    }
    for (int64_t k = 0; k < count; ++k) {
      log_norm[first + k] = log_norms[k];
      log_q[first + k] = log_qs[k];
    }
    for (int64_t k = 0; k < count; ++k) {
      if (observed[k] > kTiny<T>) continue;
      exact_row(row_of(item, annotator, tiles, first + k), tiles, label, log_q[first + k], log_norm[first + k]);
    }
  }
}

template <int64_t W, class T>
CROWDNAL_INLINE int64_t coefficients_of(const T* grad, const T* log_q, const T* log_norm, const Tiles& tiles,
                                        T* __restrict coefficients) {
  int64_t exact = 0;
  for (int64_t first = 0; first < tiles.classes; first += W) {
    const int64_t count = std::min(W, tiles.classes - first);
    T g[W] = {}, norm[W] = {}, q[W] = {};
    for (int64_t k = 0; k < count; ++k) {
      g[k] = grad[first + k];
      norm[k] = log_norm[first + k];
      q[k] = log_q[first + k];
    }
    T *other = coefficients + first, *observed = other + tiles.padded();
    int bad = 0;
#pragma omp simd reduction(+ : bad)
    for (int64_t k = 0; k < W; ++k) {
      const T gap = -norm[k] - q[k], all = fast_exp(-norm[k]), own = fast_exp(gap);
      const bool good = gap <= kGap<T>;
      other[k] = good ? -g[k] * all : T(0);
      observed[k] = good ? g[k] * (own - all) : T(0);  // exactly 0 where the label is certain
      bad += !good;
    }
    exact += bad;
  }
  return exact;
}

template <int64_t W, class T>
CROWDNAL_INLINE void scale_add(const T* coefficient, const T* tile, int64_t begin, int64_t end, T* __restrict total) {
  T scale[W];  // in registers: `total` might be what the pointer shows
  for (int64_t k = 0; k < W; ++k) scale[k] = coefficient[k];
  for (int64_t e = begin; e < end; ++e) {
#pragma omp simd
    for (int64_t k = 0; k < W; ++k) total[e * W + k] += scale[k] * tile[e * W + k];
  }
}

template <int64_t W, class T>
CROWDNAL_INLINE void accumulate_of(const T* const* tile, const T* const* coefficients, const int64_t* label,
                                   int64_t count, const Tiles& tiles, T* __restrict total) {
  const int64_t inner = tiles.inner(), padded = tiles.padded();
  for (int64_t first = 0; first < padded; first += W) {
    for (int64_t n = 0; n < count; ++n) {
      const T *from = tile[n] + first * inner, *other = coefficients[n] + first, *observed = other + padded;
      const int64_t begin = label[n] * tiles.latents, end = begin + tiles.latents;
      T* to = total + first * inner;
      scale_add<W>(other, from, 0, begin, to);
      scale_add<W>(observed, from, begin, end, to);
      scale_add<W>(other, from, end, inner, to);
    }
  }
}

}  // namespace

template <class T>
CROWDNAL_CLONES void pair_tile(const T* values, const Tiles& tiles, T* highest, T* tile) {
#define BODY(W) tile_of<W>(values, tiles, highest, tile)
  CROWDNAL_BY_WIDTH(tiles.width(), BODY)
#undef BODY
}

template <class T>
CROWDNAL_CLONES void pair_row(const Side<T>& item, const Side<T>& annotator, const Tiles& tiles, int64_t label,
                              T* log_q, T* log_norm) {
#define BODY(W) pair_row_of<W>(item, annotator, tiles, label, log_q, log_norm)
  CROWDNAL_BY_WIDTH(tiles.width(), BODY)
#undef BODY
}

template <class T>
CROWDNAL_CLONES int64_t pair_coefficients(const T* grad, const T* log_q, const T* log_norm, const Tiles& tiles,
                                          T* coefficients) {
#define BODY(W) coefficients_of<W>(grad, log_q, log_norm, tiles, coefficients)
  CROWDNAL_BY_WIDTH(tiles.width(), BODY)
#undef BODY
}

template <class T>
CROWDNAL_CLONES void pair_accumulate(const T* const* tile, const T* const* coefficients, const int64_t* label,
                                     int64_t count, const Tiles& tiles, T* total) {
#define BODY(W) accumulate_of<W>(tile, coefficients, label, count, tiles, total)
  CROWDNAL_BY_WIDTH(tiles.width(), BODY)
#undef BODY
}

template <class T>
CROWDNAL_CLONES void pair_release(const T* tile, const Tiles& tiles, T* __restrict total, T* __restrict out) {
  const int64_t width = tiles.width(), inner = tiles.inner();
  for (int64_t e = 0; e < tiles.size(); ++e) total[e] *= tile[e];
  for (int64_t first = 0; first < tiles.classes; first += width) {
    transpose(total + first * inner, width, inner, std::min(width, tiles.classes - first), out + first * inner, inner);
  }
}

template <class T>
CROWDNAL_CLONES void pair_exact_gradient(const Side<T>& item, const Side<T>& annotator, const Tiles& tiles,
                                         int64_t label, const T* grad, const T* log_q, const T* log_norm, T* out) {
  for (int64_t k = 0; k < tiles.classes; ++k) {
    if (-log_norm[k] - log_q[k] <= kGap<T>) continue;
    // from the sums once more: logarithms as large as these are too coarse to take an exponential of
    const Row<T> row = row_of(item, annotator, tiles, k);
    const int64_t begin = label * tiles.latents;
    T* to = out + k * tiles.inner();
    add_share(row, tiles.inner(), -grad[k], to);
    add_share(row.from(begin), tiles.latents, grad[k], to + begin);
  }
}

#define CROWDNAL_INSTANTIATE(T)                                                                                   \
  template void pair_tile<T>(const T*, const Tiles&, T*, T*);                                                     \
  template void pair_row<T>(const Side<T>&, const Side<T>&, const Tiles&, int64_t, T*, T*);                       \
  template int64_t pair_coefficients<T>(const T*, const T*, const T*, const Tiles&, T*);                          \
  template void pair_accumulate<T>(const T* const*, const T* const*, const int64_t*, int64_t, const Tiles&, T*);  \
  template void pair_release<T>(const T*, const Tiles&, T*, T*);                                                  \
  template void pair_exact_gradient<T>(const Side<T>&, const Side<T>&, const Tiles&, int64_t, const T*, const T*, \
                                       const T*, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
