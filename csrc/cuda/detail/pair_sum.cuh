// Sums of the pair confusion's gradient: over annotations of one item or of one annotator.
#pragma once

#include "cuda/detail/pair_rows.cuh"

namespace crowdnal::cuda {

template <class T, class E>
struct PairGrad {
  Pairs<T, E> pairs;
  const T *grad, *log_q, *log_norm;  // [nnz, classes]
};

// What multiplies exp(D + C) of an annotation's class in the gradient: for the labels that were not observed, and for
// the one that was. Neither for an exact row.
template <class T>
struct Coefficients {
  T other, observed;
  bool exact;
  template <class E>
  __device__ Coefficients(const PairGrad<T, E>& grad, int64_t at) {
    const T g = grad.grad[at], norm = grad.log_norm[at], gap = -norm - grad.log_q[at];
    const T all = std::exp(-norm), own = std::exp(gap);
    exact = !(gap <= kGap<T>);
    other = exact ? T(0) : -g * all;
    observed = exact ? T(0) : g * (own - all);  // exactly 0 where the label is certain
  }
};

// Sums of one class over a block of annotations of an item or an annotator.
template <class T, class L>
struct PairSum {
  T scaled[L::kOwn] = {};  // what the owner's exponentials are yet to multiply
  bool exact = false;      // whether there are exact rows

  // `other(t)`: the exponentials of the other side.
  template <class Other>
  __device__ void add(const Coefficients<T>& by, const Other& other, const Place<L>& place, int own, int latents) {
    for (int j = 0; j < L::kPer; ++j) {
      const T factor = place.observed(j, own, latents) ? by.observed : by.other;
      for (int t = j * L::V; t < (j + 1) * L::V; ++t) scaled[t] += factor * other(t);
    }
    exact = exact || by.exact;
  }
  // to = values, or that much more.
  __device__ static void write(const T (&values)[L::kOwn], bool more, const Place<L>& place, T* to) {
    to += place.at;
    for (int j = 0; j < L::kPer; ++j) {
      if (!place.has(j)) continue;
      T sum[L::V] = {};
      if (more) load<L::V>(to + place.step(j), sum);
      for (int v = 0; v < L::V; ++v) sum[v] += values[j * L::V + v];
      store<L::V>(sum, to + place.step(j));
    }
  }
  // Writes the block and begins again: annotations order(begin) .. order(end - 1), e of the owner.
  template <class E, class Order>
  __device__ void close(const PairGrad<T, E>& grad, const T (&e)[L::kOwn], int64_t begin, int64_t end,
                        const Order& order, int k, const Place<L>& place, bool more, T* to) {
    for (int t = 0; t < L::kOwn; ++t) scaled[t] *= e[t];
    write(scaled, more, place, to);
    for (int t = 0; t < L::kOwn; ++t) scaled[t] = T(0);
    if (exact) add_exact(grad, begin, end, order, k, place, to);
    exact = false;
  }
  // From the sums once more: logarithms as large as these are too coarse to take an exponential of.
  template <class E, class Order>
  __device__ static void add_exact(const PairGrad<T, E>& grad, int64_t begin, int64_t end, const Order& order, int k,
                                   const Place<L>& place, T* to) {
    const Pairs<T, E>& pairs = grad.pairs;
    T total[L::kOwn] = {};
    CROWDNAL_ROLLED
    for (int64_t p = begin; p < end; ++p) {
      const Annotation a = pairs.fetch(order(p));
      const int64_t at = a.n * pairs.classes + k;
      if (!Coefficients<T>(grad, at).exact) continue;
      const int latents = static_cast<int>(pairs.latents), own = pairs.observed(a);
      const ExactRow<T, E, L::G> row(pairs, a, k);
      const ShiftedSum<T> all = row.sum(0, place.tile), observed = row.sum(own, own + latents);
      const T g = grad.grad[at];
      // nothing of a sum without terms
      const T by_all = all.sum == T(0) ? T(0) : -g / all.sum, by_own = observed.sum == T(0) ? T(0) : g / observed.sum;
      for (int j = 0; j < L::kPer; ++j) {
        for (int v = 0; place.has(j) && v < L::V; ++v) {
          const T value = row(place.begin + place.step(j) + v);
          total[j * L::V + v] += by_all * std::exp(value - all.shift);
          if (place.observed(j, own, latents)) total[j * L::V + v] += by_own * std::exp(value - observed.shift);
        }
      }
    }
    write(total, true, place, to);
  }
};

}  // namespace crowdnal::cuda
