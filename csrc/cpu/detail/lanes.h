// Short rows, of one or two vectors, in registers; only for use in functions with CROWDNAL_CLONES.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/index.h"
#include "cpu/detail/simd.h"

namespace crowdnal::cpu {

// A row of `cols` numbers in N vectors. Whole vectors are read wherever the tensor goes on far enough.
template <class T, int N>
struct Row {
  int64_t cols;
  Bits<T> last;  // lanes of the last vector that belong to the row

  CROWDNAL_INLINE explicit Row(int64_t cols) : cols(cols), last(first_lanes<T>(cols - (N - 1) * kLanes<T>)) {}

  // Row `n` of `total` rows; 0 in the lanes behind it.
  CROWDNAL_INLINE void read(const T* rows, int64_t n, int64_t total, Vec<T>* v) const {
    const int64_t available = (total - n) * cols;
    for (int64_t j = 0; j < N; ++j) v[j] = load_some(rows + n * cols + j * kLanes<T>, available - j * kLanes<T>);
    v[N - 1] = only<T>(v[N - 1], last);
  }

  // The same row, in front of rows that are written later (or of nothing, if it is the last of `total`).
  CROWDNAL_INLINE void write(const Vec<T>* v, T* rows, int64_t n, int64_t total) const {
    const int64_t available = (total - n) * cols;
    for (int64_t j = 0; j < N; ++j) store_some(rows + n * cols + j * kLanes<T>, v[j], available - j * kLanes<T>);
  }
};

// The matrices, with the last one (behind which a whole vector may not be read) copied to where it may.
template <class T, int N>
struct Matrices {
  const T* confusion;
  int64_t matrix, from;
  std::vector<T> copy;

  Matrices(const T* confusion, const Shape& shape) : confusion(confusion), matrix(shape.matrix()) {
    const int64_t pad = N * kLanes<T> - shape.cols;
    from = std::max<int64_t>(0, shape.num_annotators - (pad + matrix - 1) / matrix);
    if (from == shape.num_annotators) return;
    copy.resize((shape.num_annotators - from) * matrix + pad);
    std::copy_n(confusion + from * matrix, (shape.num_annotators - from) * matrix, copy.data());
  }
  CROWDNAL_INLINE const T* of(int64_t annotator) const {
    return annotator < from ? confusion + annotator * matrix : copy.data() + (annotator - from) * matrix;
  }
};

// For kLanes rows of N vectors: softmax in place, of exp(row) factor if there are factors, the sum of exp(row - largest)
// factor, and the logarithm of the sum of exp(row) factor. Only -infinity in a row: 0, 0 and -infinity. Lanes behind a
// row are anything.
template <class T, int N>
CROWDNAL_INLINE void softmax_rows(T* rows, const T* factors, const Row<T, N>& row, T* sums, T* log_sum) {
  constexpr int64_t L = kLanes<T>;
  const Vec<T> lowest = broadcast<T>(-std::numeric_limits<T>::infinity());
  Vec<T> v[L];
  for (int64_t j = 0; j < L; ++j) {
    T* at = rows + j * N * L;
    v[j] = row.last ? load(at + (N - 1) * L) : lowest;
    store(at + (N - 1) * L, v[j]);
    if constexpr (N == 2) v[j] = Max::of(load(at), v[j]);
  }
  const Vec<T> highest = reduce<T, Max>(v);
  T shift[L], inverse[L];
  store(shift, highest == lowest ? Vec<T>{} : highest);
  for (int64_t j = 0; j < L; ++j) {
    Vec<T> e[N];
    for (int64_t i = 0; i < N; ++i) {
      e[i] = fast_decay(load(rows + (j * N + i) * L) - shift[j]);
      if (factors) e[i] = e[i] * load(factors + (j * N + i) * L);
      store(rows + (j * N + i) * L, e[i]);
    }
    v[j] = N == 2 ? e[0] + e[N - 1] : e[0];
  }
  const Vec<T> sum = reduce<T, Sum>(v), none = Vec<T>{};
  store(inverse, sum == none ? none : T(1) / sum);
  store(sums, sum);
  store(log_sum, fast_log(sum) + load(shift));
  for (int64_t j = 0; j < L; ++j) {
    for (int64_t i = 0; i < N; ++i) store(rows + (j * N + i) * L, load(rows + (j * N + i) * L) * inverse[j]);
  }
}

}  // namespace crowdnal::cpu
