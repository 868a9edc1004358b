// Normalised confusions whose rows fit into one or two vectors: activated once for loss and gradient. Only for use in
// functions with CROWDNAL_CLONES.
#pragma once

#include <algorithm>

#include "cpu/detail/lanes.h"
#include "cpu/detail/normalization.h"

namespace crowdnal::cpu {

// matrix = G                                                               G: [labels, N L], matrix: [labels, classes]
template <class T, int N>
CROWDNAL_INLINE void write_rows(const T* G, int64_t labels, const Row<T, N>& row, T* matrix) {
  for (int64_t y = 0; y < labels; ++y) {
    Vec<T> v[N];
    for (int64_t i = 0; i < N; ++i) v[i] = load(G + (y * N + i) * kLanes<T>);
    row.write(v, matrix, y, labels);
  }
}

// A matrix [labels, classes] activated, in rows of N vectors; see normalization.h.
template <class T, int N>
struct Activated {
  static constexpr int64_t L = kLanes<T>;
  T* values;   // [labels, N L]: f
  T* slopes;   // the same for df/dx of softplus, or null
  T* inverse;  // [N L]: 1 / sum_y f; 0 in the lanes behind a row

  // From x, behind which a whole vector may be read; false where a sum is extreme.
  CROWDNAL_INLINE bool fill(const T* x, int64_t labels, const Row<T, N>& row, bool softplus) const {
    Vec<T> sum[N] = {};
    for (int64_t y = 0; y < labels; ++y) {
      for (int64_t i = 0; i < N; ++i) {
        const Vec<T> v = load(x + y * row.cols + i * L);
        Vec<T> value;
        if (softplus) {
          const Softplus<T> both(v);
          value = both.value;
          if (slopes) store(slopes + (y * N + i) * L, both.slope);
        } else {
          value = fast_exp(v);
        }
        store(values + (y * N + i) * L, value);
        sum[i] += value;
      }
    }
    bool good = true;
    for (int64_t i = 0; i < N; ++i) {
      T sums[L];
      store(sums, sum[i]);
      for (int64_t l = 0; l < std::min(L, row.cols - i * L); ++l) good &= sums[l] > T(kTiny) && sums[l] < T(kHuge);
      const Vec<T> inverted = T(1) / sum[i];
      store(inverse + i * L, i == N - 1 ? only<T>(inverted, row.last) : inverted);
    }
    return good;
  }

  // matrix = slope G - slope A sum_y G, slope A = df/dx / sum_y f            G: [labels, N L], matrix: [labels, classes]
  CROWDNAL_INLINE void gradient(const T* G, int64_t labels, const Row<T, N>& row, bool softplus, T* matrix) const {
    Vec<T> column[N] = {};
    for (int64_t y = 0; y < labels; ++y) {
      for (int64_t i = 0; i < N; ++i) column[i] += load(G + (y * N + i) * L);
    }
    for (int64_t i = 0; i < N; ++i) column[i] = column[i] * load(inverse + i * L);
    for (int64_t y = 0; y < labels; ++y) {
      Vec<T> v[N];
      for (int64_t i = 0; i < N; ++i) {
        const int64_t at = (y * N + i) * L;
        v[i] = load(G + at);
        const Vec<T> value = load(values + at);
        if (softplus) {
          const Vec<T> slope = load(slopes + at);
          v[i] = (value > broadcast<T>(T(kTiny)) ? slope / value : Vec<T>{} + T(1)) * v[i] - slope * column[i];
        } else {
          v[i] = v[i] - value * column[i];
        }
      }
      row.write(v, matrix, y, labels);
    }
  }
};

}  // namespace crowdnal::cpu
