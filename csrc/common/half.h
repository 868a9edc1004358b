// Numbers of 16 bits, as they are stored: what is computed with them is float. No torch, and no header of CUDA, so that
// the emulator of the tests reads it too.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/math.h"

namespace crowdnal {

CROWDNAL_HD inline float float_of_bits(uint32_t bits) {
  float out;
  std::memcpy(&out, &bits, sizeof(out));
  return out;
}

CROWDNAL_HD inline uint32_t bits_of_float(float value) {
  uint32_t out;
  std::memcpy(&out, &value, sizeof(out));
  return out;
}

// IEEE binary16.
struct Half {
  uint16_t bits;
  CROWDNAL_HD operator float() const {
#if defined(__CUDA_ARCH__)
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
#else
    constexpr uint32_t kBias = (127 - 15) << 23;
    const uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    const uint32_t normal = (rest << 13) + (rest < 0x7c00 ? kBias : 2 * kBias);  // from 0x7c00 on infinity and NaN
    const float tiny = float_of_bits(0x3f000000 | rest) - 0.5f;  // below 0x0400 bits count 2^-24, as those of 0.5 do
    return float_of_bits(sign | (rest < 0x0400 ? bits_of_float(tiny) : normal));
#endif
  }
};

// The upper half of a float.
struct BFloat16 {
  uint16_t bits;
  CROWDNAL_HD operator float() const { return float_of_bits(uint32_t(bits) << 16); }
};

// What is computed with stored elements of type E.
template <class E>
using Accumulate = std::conditional_t<std::is_same_v<E, double>, double, float>;

}  // namespace crowdnal
