#include "cpu/normalization.h"

#include "cpu/simd.h"

namespace crowdnal::cpu {
namespace {

// A sum of softplus below this may have lost terms to underflow: its logarithm is then taken in log space.
constexpr double kTinySum = 1e-30;

template <class T>
CROWDNAL_CLONES void softmax_sums(const T* matrix, int64_t labels, int64_t classes, T* highest, T* log_sum) {
  for (int64_t k = 0; k < classes; ++k) highest[k] = matrix[k];
  for (int64_t y = 1; y < labels; ++y) {
    const T* row = matrix + y * classes;
    for (int64_t k = 0; k < classes; ++k) highest[k] = row[k] > highest[k] ? row[k] : highest[k];
  }
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    const T* row = matrix + y * classes;
    for (int64_t k = 0; k < classes; ++k) log_sum[k] += fast_exp(row[k] - highest[k]);
  }
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = fast_log(log_sum[k]) + highest[k];
}

// Returns the smallest sum; `log_sum` is only right where that is not tiny.
template <class T>
CROWDNAL_CLONES T softplus_sums(const T* __restrict matrix, int64_t labels, int64_t classes, T* __restrict softplus,
                                T* __restrict sigmoid, T* __restrict log_sum) {
  for (int64_t e = 0; e < labels * classes; ++e) {
    const T x = matrix[e], decay = fast_exp(x < 0 ? x : -x);
    softplus[e] = (x > 0 ? x : T(0)) + fast_log1p(decay);
    sigmoid[e] = (x < 0 ? decay : T(1)) / (T(1) + decay);
  }
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) log_sum[k] += softplus[y * classes + k];
  }
  T smallest = log_sum[0];
  for (int64_t k = 0; k < classes; ++k) smallest = log_sum[k] < smallest ? log_sum[k] : smallest;
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = fast_log(log_sum[k]);
  return smallest;
}

// log softplus of a row, from its softplus where that is not in the tail.
template <class T>
CROWDNAL_CLONES void log_softplus_row(const T* x, const T* softplus, int64_t classes, T* out) {
  for (int64_t k = 0; k < classes; ++k) {
    const T tail = x[k] - T(0.5) * fast_exp(x[k]), body = fast_log(softplus[k]);
    out[k] = x[k] < T(kSoftplusTail) ? tail : body;
  }
}

// out = offset + log_row - log_sum; `out` may be `log_row`.
template <class T>
CROWDNAL_CLONES void shifted(const T* offset, const T* log_row, const T* log_sum, int64_t classes, T* out) {
  if (offset) {
    for (int64_t k = 0; k < classes; ++k) out[k] = offset[k] + log_row[k] - log_sum[k];
  } else {
    for (int64_t k = 0; k < classes; ++k) out[k] = log_row[k] - log_sum[k];
  }
}

// out = slope (G - A sum_y G), with `out` holding G, the gradient for log A.
template <class T>
CROWDNAL_CLONES void through_softplus(const T* softplus, const T* sigmoid, const T* log_sum, int64_t labels,
                                      int64_t classes, T* __restrict column, T* __restrict out) {
  for (int64_t k = 0; k < classes; ++k) column[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) column[k] += out[y * classes + k];
  }
  for (int64_t k = 0; k < classes; ++k) column[k] *= fast_exp(-log_sum[k]);
  for (int64_t y = 0; y < labels; ++y) {
    const T *positive = softplus + y * classes, *slope = sigmoid + y * classes;
    T* row = out + y * classes;
    for (int64_t k = 0; k < classes; ++k) {
      // slope = sigmoid / softplus, which goes to 1 where both underflow
      const T share = positive[k] > T(kTinySum) ? slope[k] * row[k] / positive[k] : row[k];
      row[k] = share - slope[k] * column[k];
    }
  }
}

// The same for softmax, where the slope is 1: `log_values` are the stored ones.
template <class T>
CROWDNAL_CLONES void through_softmax(const T* log_values, const T* log_sum, int64_t labels, int64_t classes,
                                     T* __restrict column, T* __restrict out) {
  for (int64_t k = 0; k < classes; ++k) column[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) column[k] += out[y * classes + k];
  }
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) {
      out[y * classes + k] -= fast_exp(log_values[y * classes + k] - log_sum[k]) * column[k];
    }
  }
}

}  // namespace

template <class T>
Normalized<T>::Normalized(int64_t labels, int64_t classes, Normalization kind)
    : labels_(labels), classes_(classes), kind_(kind), log_sum_(classes, T(0)) {
  if (kind == Normalization::kNone) return;
  scratch_.resize(classes);
  if (kind == Normalization::kSoftmax) return;
  softplus_.resize(labels * classes);
  sigmoid_.resize(labels * classes);
}

// Fills the sums; returns whether `softplus_` and `sigmoid_` hold what they say. For softplus without that,
// `softplus_` holds its logarithm.
template <class T>
bool Normalized<T>::normalize(const T* matrix) {
  if (kind_ == Normalization::kNone) return false;
  if (kind_ == Normalization::kSoftmax) {
    softmax_sums(matrix, labels_, classes_, scratch_.data(), log_sum_.data());
    return false;
  }
  const T smallest =
      softplus_sums(matrix, labels_, classes_, softplus_.data(), sigmoid_.data(), log_sum_.data());
  if (smallest > T(kTinySum)) return true;
  for (int64_t e = 0; e < labels_ * classes_; ++e) softplus_[e] = log_softplus(matrix[e]);
  softmax_sums(softplus_.data(), labels_, classes_, scratch_.data(), log_sum_.data());
  return false;
}

template <class T>
void Normalized<T>::read(const T* matrix, int64_t rows) {
  const bool ready = normalize(matrix);
  const bool whole = ready && rows >= labels_;  // then the logarithm of all of it is less work
  if (whole) log_softplus_row(matrix, softplus_.data(), labels_ * classes_, softplus_.data());
  matrix_ = matrix;
  values_ = kind_ == Normalization::kSoftplus ? softplus_.data() : matrix;
  pending_ = ready && !whole;
}

template <class T>
void Normalized<T>::log_row(int64_t label, const T* offset, T* out) const {
  const int64_t start = label * classes_;
  if (pending_) log_softplus_row(matrix_ + start, softplus_.data() + start, classes_, out);
  shifted(offset, pending_ ? out : values_ + start, log_sum_.data(), classes_, out);
}

template <class T>
void Normalized<T>::pull_back(const T* matrix, T* grad) {
  if (kind_ == Normalization::kNone) return;
  const bool ready = normalize(matrix);
  if (ready) {
    through_softplus(softplus_.data(), sigmoid_.data(), log_sum_.data(), labels_, classes_, scratch_.data(), grad);
    return;
  }
  const bool is_softplus = kind_ == Normalization::kSoftplus;  // then with the logarithms of tiny values
  through_softmax(is_softplus ? softplus_.data() : matrix, log_sum_.data(), labels_, classes_, scratch_.data(), grad);
  for (int64_t e = 0; is_softplus && e < labels_ * classes_; ++e) grad[e] *= log_softplus_grad(matrix[e]);
}

template class Normalized<float>;
template class Normalized<double>;

}  // namespace crowdnal::cpu
