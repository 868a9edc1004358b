// Scalar and row formulas that host and device share. No torch.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__CUDACC__)
#define CROWDNAL_HD __host__ __device__
#else
#define CROWDNAL_HD
#endif

namespace crowdnal {

// How a stored confusion becomes log-probabilities over the observed labels.
enum class Normalization : int64_t { kNone = 0, kSoftmax = 1, kSoftplus = 2 };

// Below this, softplus(x) = exp(x) (1 - exp(x) / 2 + ...): its logarithm is finite where softplus underflows.
constexpr double kSoftplusTail = -20.0;

// log(1 + exp(x)); 0 where it underflows.
template <class T>
CROWDNAL_HD inline T softplus(T x) {
  return x > T(20) ? x + std::exp(-x) : std::log1p(std::exp(x));
}

// log(softplus(x)), finite for every finite x.
template <class T>
CROWDNAL_HD inline T log_softplus(T x) {
  if (x < T(kSoftplusTail)) return x - T(0.5) * std::exp(x);
  return std::log(softplus(x));
}

// log(sigmoid(x)), the logarithm of d softplus(x) / dx.
template <class T>
CROWDNAL_HD inline T log_sigmoid(T x) {
  return (x < T(0) ? x : T(0)) - std::log1p(std::exp(x < T(0) ? x : -x));
}

// d log_softplus(x) / dx = sigmoid(x) / softplus(x).
template <class T>
CROWDNAL_HD inline T log_softplus_grad(T x) {
  if (x < T(kSoftplusTail)) return T(1) - T(0.5) * std::exp(x);
  return T(1) / ((T(1) + std::exp(-x)) * softplus(x));
}

}  // namespace crowdnal
