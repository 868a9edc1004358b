// What lets the compiler vectorise: clones of a function for newer processors, chosen at load time; vectors of 64 bytes,
// which it splits where the processor has narrower ones; an exponential and a logarithm without branches or calls.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

// On a function that holds the loops itself: a lambda in it or a function that is not inlined is not cloned with it.
// ThreadSanitizer cannot run in what chooses a clone, which is before it has begun.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(__SANITIZE_THREAD__)
#define CROWDNAL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CROWDNAL_CLONES
#endif
#define CROWDNAL_INLINE inline __attribute__((always_inline))

namespace crowdnal::cpu {

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  typedef float Vec __attribute__((vector_size(64)));
  typedef int32_t Bits __attribute__((vector_size(64)));
  static constexpr int64_t kCount = 16;
};
template <>
struct Lanes<double> {
  typedef double Vec __attribute__((vector_size(64)));
  typedef int64_t Bits __attribute__((vector_size(64)));
  static constexpr int64_t kCount = 8;
};
template <class T>
using Vec = typename Lanes<T>::Vec;
template <class T>
using Bits = typename Lanes<T>::Bits;
template <class T>
constexpr int64_t kLanes = Lanes<T>::kCount;

template <class To, class From>
CROWDNAL_INLINE To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

template <class T>
CROWDNAL_INLINE Vec<T> load(const T* from) {
  Vec<T> v;
  std::memcpy(&v, from, sizeof(v));
  return v;
}

template <class T>
CROWDNAL_INLINE void store(T* to, const Vec<T>& v) {
  std::memcpy(to, &v, sizeof(v));
}

template <class T>
CROWDNAL_INLINE Vec<T> broadcast(T x) {
  return x - Vec<T>{};
}

// All ones in the first `count` lanes.
template <class T>
CROWDNAL_INLINE Bits<T> first_lanes(int64_t count) {
  Bits<T> mask;
  for (int64_t l = 0; l < kLanes<T>; ++l) mask[l] = l < count ? -1 : 0;
  return mask;
}

// `v` where the mask is set, else 0, whatever `v` is there.
template <class T>
CROWDNAL_INLINE Vec<T> only(const Vec<T>& v, const Bits<T>& mask) {
  return bit_cast<Vec<T>>(bit_cast<Bits<T>>(v) & mask);
}

struct Sum {
  template <class V>
  CROWDNAL_INLINE static V of(const V& a, const V& b) {
    return a + b;
  }
};
struct Max {
  template <class V>
  CROWDNAL_INLINE static V of(const V& a, const V& b) {
    return a > b ? a : b;
  }
};

// Lanes l of a where l & H is 0, of b elsewhere; `flip`: the lanes l ^ H instead.
template <class T, int H, bool flip, int... I>
CROWDNAL_INLINE Vec<T> halves(const Vec<T>& a, const Vec<T>& b, std::integer_sequence<int, I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, (((I & H) ? static_cast<int>(kLanes<T>) : 0) + (flip ? I ^ H : I))...);
#else
  return Vec<T>{((I & H) ? b : a)[flip ? I ^ H : I]...};
#endif
}

// Of all lanes, in their order.
template <class T>
CROWDNAL_INLINE T sum_of(const Vec<T>& v) {
  T parts[kLanes<T>], all = 0;
  store(parts, v);
  for (int64_t l = 0; l < kLanes<T>; ++l) all += parts[l];
  return all;
}

// One step of `reduce`: 2 H vectors become H.
template <class T, class Op, int H>
CROWDNAL_INLINE void fold(Vec<T>* v) {
  using Every = std::make_integer_sequence<int, static_cast<int>(kLanes<T>)>;
  for (int j = 0; j < H; ++j) {
    v[j] = Op::of(halves<T, H, false>(v[j], v[j + H], Every{}), halves<T, H, true>(v[j], v[j + H], Every{}));
  }
  if constexpr (H > 1) fold<T, Op, H / 2>(v);
}

// Lane j of the result: `Op` over all lanes of v[j], for kLanes vectors. Overwrites them.
template <class T, class Op>
CROWDNAL_INLINE Vec<T> reduce(Vec<T>* v) {
  fold<T, Op, kLanes<T> / 2>(v);
  return v[0];
}

// The same for eight vectors; the lanes from 8 on repeat the first.
template <class T, class Op>
CROWDNAL_INLINE Vec<T> reduce_eight(Vec<T>* v) {
  using Every = std::make_integer_sequence<int, static_cast<int>(kLanes<T>)>;
  if constexpr (kLanes<T> == 16) {
    for (int j = 0; j < 8; ++j) v[j] = Op::of(v[j], halves<T, 8, true>(v[j], v[j], Every{}));
  }
  fold<T, Op, 4>(v);
  return v[0];
}

// Lanes l of a where l & H is 0, else l ^ H of b; `high`: l ^ H of a, else l of b.
template <class T, int H, bool high, int... I>
CROWDNAL_INLINE Vec<T> quarters(const Vec<T>& a, const Vec<T>& b, std::integer_sequence<int, I...>) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b,
                                 (((I & H) ? static_cast<int>(kLanes<T>) : 0) +
                                  (high == ((I & H) != 0) ? I : I ^ H))...);
#else
  return Vec<T>{((I & H) ? b : a)[high == ((I & H) != 0) ? I : I ^ H]...};
#endif
}

// kLanes vectors as rows of a matrix, transposed in place.
template <class T, int H = static_cast<int>(kLanes<T>) / 2>
CROWDNAL_INLINE void transpose_tile(Vec<T>* v) {
  using Every = std::make_integer_sequence<int, static_cast<int>(kLanes<T>)>;
  for (int j = 0; j < kLanes<T>; ++j) {
    if (j & H) continue;
    const Vec<T> low = quarters<T, H, false>(v[j], v[j + H], Every{});
    v[j + H] = quarters<T, H, true>(v[j], v[j + H], Every{});
    v[j] = low;
  }
  if constexpr (H > 1) transpose_tile<T, H / 2>(v);
}

CROWDNAL_INLINE int32_t to_int(float x) { return static_cast<int32_t>(x); }
CROWDNAL_INLINE Bits<float> to_int(const Vec<float>& x) { return __builtin_convertvector(x, Bits<float>); }
CROWDNAL_INLINE float to_float(int32_t x) { return static_cast<float>(x); }
CROWDNAL_INLINE Vec<float> to_float(const Bits<float>& x) { return __builtin_convertvector(x, Vec<float>); }

// exp(x) = p 2^n with p near 1, for x within the range of exponents.
template <class V, class I>
CROWDNAL_INLINE V exp_mantissa(const V& x, I& n) {
  const V nearest = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  V r = x - nearest * 0.693359375f;
  r = r + nearest * 2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;  // minimax on |r| <= ln(2) / 2
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  n = to_int(nearest);
  return p * (r * r) + r + 1.0f;
}

// exp(x), error below 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays. V: float, or a vector.
template <class V, class I>
CROWDNAL_INLINE V exp_of(const V& x) {
  const V low = V{} - 87.33654f, high = V{} + 88.72283f, none = V{};
  const V clamped = x < low ? low : (x > high ? high : x);
  I n;
  const V p = exp_mantissa<V, I>(clamped, n);
  const I half = n >> 1;  // two factors: 2^128 is no float
  const V y = p * bit_cast<V>((half + 127) << 23) * bit_cast<V>((n - half + 127) << 23);
  return x > high ? none + std::numeric_limits<float>::infinity() : (x < low ? none : y);
}

// The same for x <= 0 (or NaN), in half the instructions.
template <class V, class I>
CROWDNAL_INLINE V decay_of(const V& x) {
  const V low = V{} - 87.33654f;
  I n;
  const V p = exp_mantissa<V, I>(x < low ? low : x, n);
  return x < low ? V{} : p * bit_cast<V>((n + 127) << 23);
}

// log(x) for x >= 0, error below 2 units in the last place; -infinity at 0 and below the smallest normal float.
template <class V, class I>
CROWDNAL_INLINE V log_of(const V& x) {
  const I bits = bit_cast<I>(x);
  const I shift = (bits - 0x3f3504f3) >> 23;  // exponent that leaves the mantissa in [sqrt(1/2), sqrt(2))
  const V e = to_float(shift);
  const V m = bit_cast<V>(bits - (shift << 23)) - 1.0f;
  V p = V{} + 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const V m2 = m * m;
  V y = p * m * m2;
  y = y - 2.12194440e-4f * e;
  y = y - 0.5f * m2;
  y = m + y + 0.693359375f * e + 0.0f * x;  // NaN stays: `x != x` would be taken lane by lane
  const V infinite = V{} + std::numeric_limits<float>::infinity();
  return x == infinite ? x : (x < V{} + std::numeric_limits<float>::min() ? -infinite : y);
}

CROWDNAL_INLINE float fast_exp(float x) { return exp_of<float, int32_t>(x); }
CROWDNAL_INLINE Vec<float> fast_exp(const Vec<float>& x) { return exp_of<Vec<float>, Bits<float>>(x); }
CROWDNAL_INLINE float fast_log(float x) { return log_of<float, int32_t>(x); }
CROWDNAL_INLINE Vec<float> fast_log(const Vec<float>& x) { return log_of<Vec<float>, Bits<float>>(x); }
CROWDNAL_INLINE float fast_decay(float x) { return decay_of<float, int32_t>(x); }
CROWDNAL_INLINE Vec<float> fast_decay(const Vec<float>& x) { return decay_of<Vec<float>, Bits<float>>(x); }
CROWDNAL_INLINE double fast_exp(double x) { return std::exp(x); }
CROWDNAL_INLINE double fast_decay(double x) { return std::exp(x); }
CROWDNAL_INLINE double fast_log(double x) { return std::log(x); }
// Error below 2 units in the last place; 0 below -707.7, infinity above 709.78, NaN stays.
CROWDNAL_INLINE Vec<double> fast_exp(const Vec<double>& x) {
  using V = Vec<double>;
  const V none = V{}, low = none - 707.7, high = none + 709.78, magic = none + 6755399441055744.0;
  V clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
  const V shifted = clamped * 1.4426950408889634 + magic;  // holds the nearest integer in its low bits
  const V n = shifted - magic;
  V r = clamped - n * 6.93147180369123816490e-01;
  r = r - n * 1.90821492927058770002e-10;
  V p = none + 1.0 / 6227020800;  // Taylor on |r| <= ln(2) / 2
  p = p * r + 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * (r * r) + r + 1.0;
  const V half = bit_cast<V>((bit_cast<Bits<double>>(shifted) + 1022) << 52);  // 2^(n - 1): 2^1024 is no double
  const V y = p * half * 2.0, infinite = none + std::numeric_limits<double>::infinity();
  const V bounded = x > high ? infinite : (x < low ? none : y);
  return x != x ? x : bounded;
}
CROWDNAL_INLINE Vec<double> fast_decay(const Vec<double>& x) { return fast_exp(x); }
CROWDNAL_INLINE Vec<double> fast_log(const Vec<double>& x) {
  Vec<double> y;
  for (int64_t l = 0; l < kLanes<double>; ++l) y[l] = std::log(x[l]);
  return y;
}

// log(1 + x) for x in [0, 1].
template <class V>
CROWDNAL_INLINE V fast_log1p(const V& x) {
  const V u = x + 1.0f;
  return fast_log(u) + (x - (u - 1.0f));  // what rounding took from u
}
CROWDNAL_INLINE double fast_log1p(double x) { return std::log1p(x); }
CROWDNAL_INLINE Vec<double> fast_log1p(const Vec<double>& x) {
  Vec<double> y;
  for (int64_t l = 0; l < kLanes<double>; ++l) y[l] = std::log1p(x[l]);
  return y;
}

// A vector of which only `available` numbers, if less than a whole one, may be read (0 for the others) or written.
template <class T>
CROWDNAL_INLINE Vec<T> load_some(const T* from, int64_t available) {
  if (available >= kLanes<T>) return load(from);
  T copy[kLanes<T>] = {};
  for (int64_t l = 0; l < available; ++l) copy[l] = from[l];
  return load(copy);
}
template <class T>
CROWDNAL_INLINE void store_some(T* to, const Vec<T>& v, int64_t available) {
  if (available >= kLanes<T>) return store(to, v);
  T copy[kLanes<T>];
  store(copy, v);
  for (int64_t l = 0; l < available; ++l) to[l] = copy[l];
}

}  // namespace crowdnal::cpu
