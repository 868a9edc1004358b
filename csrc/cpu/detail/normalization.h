// Confusions stored with the observed label outermost, [labels, classes] per annotator: A[y, k] = f(x[y, k]) divided by
// its sum over y, f = exp or softplus; or log A itself is stored (kNone).
#pragma once

#include <cstdint>
#include <vector>

#include "common/math.h"
#include "cpu/detail/rows.h"

namespace crowdnal::cpu {

// A sum outside of these may have lost terms: it is then taken in log space.
constexpr double kTiny = 1e-30, kHuge = 1e30;

template <class T>
struct Softplus {
  Vec<T> value, slope;  // softplus(x), sigmoid(x)

  CROWDNAL_INLINE explicit Softplus(const Vec<T>& x) {
    const Vec<T> none = Vec<T>{}, one = none + T(1), decay = fast_decay(x < none ? x : -x);
    value = (x > none ? x : none) + fast_log1p(decay);
    slope = (x < none ? decay : one) / (one + decay);
  }
};

// log softplus(x), finite where softplus underflows.
template <class T>
CROWDNAL_INLINE Vec<T> log_softplus_of(const Vec<T>& x) {
  const Vec<T> tail = x - T(0.5) * fast_exp(x), body = fast_log(Softplus<T>(x).value);
  return x < broadcast<T>(T(kSoftplusTail)) ? tail : body;
}

template <class T>
CROWDNAL_INLINE Vec<T> log_value(const Vec<T>& x, Normalization kind) {
  return kind == Normalization::kSoftplus ? log_softplus_of<T>(x) : x;
}

// log_norm[k] = log sum_y f(x[y, k]), finite where a sum over- or underflows. values: null, or [labels, classes] for f;
// slopes: null, or the same for df/dx of softplus (that of exp is f).
// Returns false where one does: `values` do not hold f to full precision then, nor does log_norm tell log f - log_norm.
// apart: null, or where to put what does, [2, classes] for log f - apart[0] - apart[1]: the highest log f of the column,
// and the logarithm of the sum relative to it. Nothing where true is returned.
template <class T>
bool log_norms(const T* x, int64_t labels, int64_t classes, Normalization kind, T* log_norm, T* values, T* slopes,
               std::vector<T>* apart);

// out[k] = prior[k] + log A[y, k], of the row x = x[y]; log_norm is not read for kNone, nor if `apart` is not empty.
template <class T>
void log_joint(const T* prior, const T* x, const T* log_norm, const std::vector<T>& apart, int64_t classes,
               Normalization kind, T* out);

// d / d x [labels, classes] of a function whose gradient for log A is G[y] = sum of the rows order[first..last-1] of
// `grad` with label y: out = slope (G - A sum_y G), slope = d log f / dx. Written, not added to. slopes: df/dx
// [labels, classes] where `log_norms` returned true, or null.
template <class T>
void through_normalization(const T* x, const T* log_norm, const GradRows<T>& grad, const int64_t* label,
                           const int64_t* order, int64_t first, int64_t last, int64_t labels, int64_t classes,
                           Normalization kind, const T* slopes, T* out);

}  // namespace crowdnal::cpu
