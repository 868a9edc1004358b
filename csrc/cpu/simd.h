// What lets the compiler vectorise: clones of a function for newer processors, chosen at load time, and an exponential
// and a logarithm without branches or calls.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

// On a function that holds the loops itself: a lambda in it or a function that is not inlined is not cloned with it.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define CROWDNAL_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CROWDNAL_CLONES
#endif
#define CROWDNAL_INLINE inline __attribute__((always_inline))

namespace crowdnal::cpu {

CROWDNAL_INLINE int32_t float_bits(float x) {
  int32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

CROWDNAL_INLINE float bits_float(int32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// exp(x) = p 2^n with p near 1, for x within the range of exponents.
CROWDNAL_INLINE float exp_mantissa(float x, int32_t& n) {
  const float nearest = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  float r = x - nearest * 0.693359375f;
  r = r + nearest * 2.12194440e-4f;
  float p = 1.9875691500e-4f;  // minimax on |r| <= ln(2) / 2
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  n = static_cast<int32_t>(nearest);
  return p * (r * r) + r + 1.0f;
}

// exp(x), error below 2 units in the last place; 0 below -87.3, infinity above 88.7, NaN stays.
CROWDNAL_INLINE float fast_exp(float x) {
  const float low = -87.33654f, high = 88.72283f;
  float clamped = x < low ? low : x;
  clamped = clamped > high ? high : clamped;
  int32_t n;
  const float p = exp_mantissa(clamped, n);
  const int32_t half = n >> 1;  // two factors: 2^128 is no float
  const float y = p * bits_float((half + 127) << 23) * bits_float((n - half + 127) << 23);
  const float bounded = x > high ? std::numeric_limits<float>::infinity() : (x < low ? 0.0f : y);
  return x != x ? x : bounded;
}
CROWDNAL_INLINE double fast_exp(double x) { return std::exp(x); }

// The same for x <= 0 (or NaN), in half the instructions.
CROWDNAL_INLINE float fast_decay(float x) {
  const float low = -87.33654f;
  int32_t n;
  const float p = exp_mantissa(x < low ? low : x, n);
  return x < low ? 0.0f : p * bits_float((n + 127) << 23);
}
CROWDNAL_INLINE double fast_decay(double x) { return std::exp(x); }

// log(x) for x >= 0, error below 2 units in the last place; -infinity at 0 and below the smallest normal float.
CROWDNAL_INLINE float fast_log(float x) {
  int32_t bits = float_bits(x);
  const int32_t shift = (bits - 0x3f3504f3) >> 23;  // exponent that leaves the mantissa in [sqrt(1/2), sqrt(2))
  const float e = static_cast<float>(shift);
  const float m = bits_float(bits - (shift << 23)) - 1.0f;
  float p = 7.0376836292e-2f;
  p = p * m - 1.1514610310e-1f;
  p = p * m + 1.1676998740e-1f;
  p = p * m - 1.2420140846e-1f;
  p = p * m + 1.4249322787e-1f;
  p = p * m - 1.6668057665e-1f;
  p = p * m + 2.0000714765e-1f;
  p = p * m - 2.4999993993e-1f;
  p = p * m + 3.3333331174e-1f;
  const float m2 = m * m;
  float y = p * m * m2;
  y = y - 2.12194440e-4f * e;
  y = y - 0.5f * m2;
  y = m + y + 0.693359375f * e;
  const float bounded = x < std::numeric_limits<float>::min() ? -std::numeric_limits<float>::infinity() : y;
  return x != x || x == std::numeric_limits<float>::infinity() ? x : bounded;
}
CROWDNAL_INLINE double fast_log(double x) { return std::log(x); }

// log(1 + x) for x in [0, 1].
CROWDNAL_INLINE float fast_log1p(float x) {
  const float u = 1.0f + x;
  return fast_log(u) - ((u - 1.0f) - x) / u;
}
CROWDNAL_INLINE double fast_log1p(double x) { return std::log1p(x); }

}  // namespace crowdnal::cpu
