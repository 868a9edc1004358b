// The Dirichlet prior of the rows of annotators' matrices: its part of the loss and of their gradient, while a matrix is
// at hand. Annotator r adds u_r sum_ck counts[c, k] (log mean[c, k] - log row_r[c, k]), u_r the sum of what their
// annotations count in the loss, divided by all the labels that they gave; mean: the counts as distributions.
#pragma once

#include <vector>

#include "cpu/detail/lanes.h"
#include "cpu/detail/normalization.h"
#include "cpu/detail/small_step.h"

namespace crowdnal::cpu {

// The arguments of an op.
struct PriorArguments {
  OptionalTensor counts, common, labels_given;
};

// Checked, for matrices like `like`; sizes: of one of them.
PriorArguments check_prior(OptionalTensor prior, OptionalTensor common, OptionalTensor labels_given, const Tensor& like,
                           const Shape& shape);

// Tables of `rows` rows of whole vectors, zero behind their ends. Nothing where all counts are 0.
template <class T>
struct Prior {
  int64_t rows = 0, cols = 0, width = 0;
  std::vector<T> counts, constant;  // constant: log mean, and without what is common; 0 where a count is
  std::vector<T> common;            // [rows, width], -infinity behind the ends
  std::vector<T> strength;          // sum of the counts of each distribution, whole vectors
  const T* labels_given = nullptr;  // [R]
  std::vector<T> value;             // [runs]: what each adds to the loss

  Prior() = default;
  // `along`: the dimension of [rows, cols] that distributions lie in, 1 (the softmax link) or 0 (the mixture link).
  Prior(const PriorArguments& arguments, const Shape& shape, int along, int64_t runs);

  explicit operator bool() const { return !counts.empty(); }
  // u of an annotator whose annotations are order[first..last-1].
  CROWDNAL_INLINE T share(const StepScale<T>& scale, const int64_t* order, int64_t first, int64_t last,
                          int64_t annotator) const {
    T sum = scale.weight ? T(0) : scale.scale * static_cast<T>(last - first);
    for (int64_t p = first; scale.weight && p < last; ++p) sum += scale.of(order[p]);
    return sum / std::max(T(1), labels_given[annotator]);
  }
  // What all runs add, in their order.
  T total() const { return *this ? weighted_sum<T>(value.data(), nullptr, static_cast<int64_t>(value.size())) : T(0); }
};

// Of matrix [rows, cols] + common, whose rows' softmax are the distributions: returns what it adds to the loss, and adds
// to its gradient, if that is not null, whose rows are `stride` apart. Behind the matrix `slack` numbers may be read, and
// written behind the last row of the gradient up to `stride`. Up to kLanes rows at a time; scratch: as many of `width`.
template <class T>
CROWDNAL_INLINE T prior_of_rows(const Prior<T>& prior, const T* matrix, int64_t slack, T u, T* grad, int64_t stride,
                                T* scratch, int64_t vectors) {
  constexpr int64_t L = kLanes<T>;
  const Vec<T> lowest = broadcast<T>(-std::numeric_limits<T>::infinity()), none = Vec<T>{};
  const Bits<T> last = first_lanes<T>(prior.cols - (vectors - 1) * L);
  const int64_t width = vectors * L;
  Vec<T> each = {};
  T shifts[L], factors[L];
  for (int64_t c = 0; c < prior.rows; c += L) {
    const int64_t count = std::min(L, prior.rows - c);
    Vec<T> v[L] = {};
    for (int64_t j = 0; j < count; ++j) {
      const int64_t at = (c + j) * prior.cols, table = (c + j) * width;
      Vec<T> highest = lowest;
      for (int64_t i = 0; i < vectors; ++i) {
        Vec<T> w = load_some(matrix + at + i * L, prior.rows * prior.cols + slack - at - i * L);
        if (i == vectors - 1) w = only<T>(w, last);
        each += load(prior.counts.data() + table + i * L) * (load(prior.constant.data() + table + i * L) - w);
        w = w + load(prior.common.data() + table + i * L);
        highest = Max::of(w, highest);
        store(scratch + j * width + i * L, w);
      }
      v[j] = highest;
    }
    const Vec<T> highest = reduce<T, Max>(v), shift = highest == lowest ? none : highest;
    store(shifts, shift);
    for (int64_t j = 0; j < L; ++j) v[j] = none;
    for (int64_t j = 0; j < count; ++j) {
      for (int64_t i = 0; i < vectors; ++i) {
        const Vec<T> e = fast_decay(load(scratch + j * width + i * L) - shifts[j]);
        store(scratch + j * width + i * L, e);
        v[j] += e;
      }
    }
    const Vec<T> sum = reduce<T, Sum>(v), strength = load(prior.strength.data() + c);
    each += only<T>(strength * (fast_log(sum) + shift), first_lanes<T>(count));
    store(factors, strength / sum);
    for (int64_t j = 0; grad && j < count; ++j) {
      T* to = grad + (c + j) * stride;
      for (int64_t i = 0; i < vectors; ++i) {
        const Vec<T> change = factors[j] * load(scratch + j * width + i * L) -
                              load(prior.counts.data() + (c + j) * width + i * L);
        const int64_t available = (prior.rows - c - j) * stride - i * L;
        store_some(to + i * L, load_some(to + i * L, available) + u * change, available);
      }
    }
  }
  return u * sum_of<T>(each);
}

// The same of a large matrix; and of one whose stored values are normalised along its columns: norm, apart, values and
// slopes as `log_norms` leaves them, values and slopes also null.
template <class T>
T prior_of_large(const Prior<T>& prior, const T* matrix, T u, T* grad, T* scratch);
template <class T>
T prior_of_normalized(const Prior<T>& prior, const T* matrix, const T* norm, const std::vector<T>& apart,
                      const T* values, const T* slopes, Normalization kind, T u, T* grad);

// Scores log(p exp(common)) of what is common to all annotators, for probabilities p [B, rows].
template <class T>
struct CommonScores {
  const Shape& shape;
  int64_t num_items;
  std::vector<T> chances, sums, scores;  // exp(common) [rows, cols]; p exp(common) and the result, [B, cols]

  CommonScores(const T* common, const T* p, int64_t num_items, const Shape& shape);
  // to [B, rows] += the gradient for p, of grad [B, cols] for the scores, which is overwritten.
  void add_gradient(T* grad, T* to) const;
};

}  // namespace crowdnal::cpu
