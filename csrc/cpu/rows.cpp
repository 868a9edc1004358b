#include "cpu/rows.h"

#include <cmath>
#include <limits>

#include "cpu/simd.h"

namespace crowdnal::cpu {
namespace {

// `body` with the number of columns as a constant, 0 for more than kSmall. A macro: a lambda would not be cloned.
#define CROWDNAL_BY_COLS(cols, body) \
  switch (cols) {                    \
    case 1: return body(1);          \
    case 2: return body(2);          \
    case 3: return body(3);          \
    case 4: return body(4);          \
    case 5: return body(5);          \
    case 6: return body(6);          \
    case 7: return body(7);          \
    case 8: return body(8);          \
    case 9: return body(9);          \
    case 10: return body(10);        \
    case 11: return body(11);        \
    case 12: return body(12);        \
    case 13: return body(13);        \
    case 14: return body(14);        \
    case 15: return body(15);        \
    case 16: return body(16);        \
    default: return body(0);         \
  }

template <int64_t K, class T>
CROWDNAL_INLINE void mix_row_of(const T* z, const T* w, const T* shared, T* __restrict out, int64_t rows,
                                int64_t cols) {
  if constexpr (K > 0) {
    T h[K];
    for (int64_t k = 0; k < K; ++k) h[k] = shared ? shared[k] : T(0);
    for (int64_t c = 0; c < rows; ++c) {
      for (int64_t k = 0; k < K; ++k) h[k] += z[c] * w[c * K + k];
    }
    for (int64_t k = 0; k < K; ++k) out[k] = h[k];
  } else {
    for (int64_t k = 0; k < cols; ++k) out[k] = shared ? shared[k] : T(0);
    const T* scores[1] = {z};
    T* outs[1] = {out};
    mix_group(scores, w, outs, 1, rows, cols);
  }
}

template <int64_t K, class T>
CROWDNAL_INLINE void add_matrix_row_of(const T* w, const T* g, T* __restrict out, int64_t rows, int64_t cols) {
  if constexpr (K > 0) {
    for (int64_t c = 0; c < rows; ++c) {
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < K; ++k) sum += w[c * K + k] * g[k];
      out[c] += sum;
    }
  } else {
    const T* grads[1] = {g};
    T* outs[1] = {out};
    add_matrix_group(w, grads, outs, 1, rows, cols);
  }
}

template <int64_t K, class T>
CROWDNAL_INLINE void add_outer_of(const T* z, const T* g, T* __restrict out, int64_t rows, int64_t cols) {
  if constexpr (K > 0) {
    for (int64_t c = 0; c < rows; ++c) {
      for (int64_t k = 0; k < K; ++k) out[c * K + k] += z[c] * g[k];
    }
  } else {
    const T *scores[1] = {z}, *grads[1] = {g};
    add_outer_group(scores, grads, out, 1, rows, cols);
  }
}

template <class T>
CROWDNAL_INLINE T softmax_row(T* h, int64_t cols) {
  constexpr T kLowest = -std::numeric_limits<T>::infinity();
  T highest = kLowest, sum = 0;
#pragma omp simd reduction(max : highest)
  for (int64_t k = 0; k < cols; ++k) highest = h[k] > highest ? h[k] : highest;
  const T shift = highest == kLowest ? T(0) : highest;
  for (int64_t k = 0; k < cols; ++k) h[k] = fast_exp(h[k] - shift);
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < cols; ++k) sum += h[k];
  const T inverse = sum == 0 ? T(0) : T(1) / sum;
  for (int64_t k = 0; k < cols; ++k) h[k] *= inverse;
  return fast_log(sum) + shift;
}

// Short rows transposed, a row a lane: a row alone would wait for its own maximum, exponentials and sum.
constexpr int64_t kShort = 32;

template <class T>
CROWDNAL_INLINE void softmax_lanes(T* const* h, T* log_sums, int64_t count, int64_t cols) {
  constexpr T kLowest = -std::numeric_limits<T>::infinity();
  T lanes[kShort * kLanes], shift[kLanes], sum[kLanes], inverse[kLanes];
  for (int64_t j = 0; j < kLanes; ++j) {
    const T* row = h[j < count ? j : 0];
    for (int64_t k = 0; k < cols; ++k) lanes[k * kLanes + j] = row[k];
  }
  for (int64_t j = 0; j < kLanes; ++j) shift[j] = kLowest;
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const T x = lanes[k * kLanes + j];
      shift[j] = x > shift[j] ? x : shift[j];
    }
  }
  for (int64_t j = 0; j < kLanes; ++j) {
    shift[j] = shift[j] == kLowest ? T(0) : shift[j];
    sum[j] = 0;
  }
  for (int64_t k = 0; k < cols; ++k) {
    for (int64_t j = 0; j < kLanes; ++j) {
      const T e = fast_exp(lanes[k * kLanes + j] - shift[j]);
      lanes[k * kLanes + j] = e;
      sum[j] += e;
    }
  }
  for (int64_t j = 0; j < kLanes; ++j) inverse[j] = sum[j] == 0 ? T(0) : T(1) / sum[j];
  for (int64_t j = 0; j < kLanes; ++j) sum[j] = fast_log(sum[j]) + shift[j];
  for (int64_t j = 0; j < count; ++j) {
    for (int64_t k = 0; k < cols; ++k) h[j][k] = lanes[k * kLanes + j] * inverse[j];
    log_sums[j] = sum[j];
  }
}

}  // namespace

template <class T>
CROWDNAL_CLONES void mix_row(const T* scores, const T* matrix, const T* shared, T* out, int64_t rows, int64_t cols) {
#define BODY(K) mix_row_of<K>(scores, matrix, shared, out, rows, cols)
  CROWDNAL_BY_COLS(cols, BODY)
#undef BODY
}

template <class T>
CROWDNAL_CLONES void add_matrix_row(const T* matrix, const T* grad, T* out, int64_t rows, int64_t cols) {
#define BODY(K) add_matrix_row_of<K>(matrix, grad, out, rows, cols)
  CROWDNAL_BY_COLS(cols, BODY)
#undef BODY
}

template <class T>
CROWDNAL_CLONES void add_outer(const T* scores, const T* grad, T* out, int64_t rows, int64_t cols) {
#define BODY(K) add_outer_of<K>(scores, grad, out, rows, cols)
  CROWDNAL_BY_COLS(cols, BODY)
#undef BODY
}

template <class T>
CROWDNAL_CLONES void softmax_rows(T* const* h, T* log_sums, int64_t count, int64_t cols) {
  if (cols <= kShort) return softmax_lanes(h, log_sums, count, cols);
  for (int64_t j = 0; j < count; ++j) log_sums[j] = softmax_row(h[j], cols);
}

template <class T>
CROWDNAL_CLONES void mix_group(const T* const* scores, const T* matrix, T* const* out, int64_t count, int64_t rows,
                               int64_t cols) {
  int64_t c = 0;
  for (; c + 8 <= rows; c += 8) {  // eight rows stay in the cache while every annotation uses them
    const T* w = matrix + c * cols;
    for (int64_t n = 0; n < count; ++n) {
      const T* z = scores[n] + c;
      T* __restrict h = out[n];
      for (int64_t k = 0; k < cols; ++k) {
        h[k] += z[0] * w[k] + z[1] * w[k + cols] + z[2] * w[k + 2 * cols] + z[3] * w[k + 3 * cols] +
                z[4] * w[k + 4 * cols] + z[5] * w[k + 5 * cols] + z[6] * w[k + 6 * cols] + z[7] * w[k + 7 * cols];
      }
    }
  }
  for (; c < rows; ++c) {
    for (int64_t n = 0; n < count; ++n) {
      const T z = scores[n][c];
      T* __restrict h = out[n];
      for (int64_t k = 0; k < cols; ++k) h[k] += z * matrix[c * cols + k];
    }
  }
}

template <class T>
CROWDNAL_CLONES void add_matrix_group(const T* matrix, const T* const* grad, T* const* out, int64_t count, int64_t rows,
                                      int64_t cols) {
  int64_t c = 0;
  for (; c + 4 <= rows; c += 4) {
    const T *w0 = matrix + c * cols, *w1 = w0 + cols, *w2 = w1 + cols, *w3 = w2 + cols;
    for (int64_t n = 0; n < count; ++n) {
      const T* g = grad[n];
      T s0 = 0, s1 = 0, s2 = 0, s3 = 0;
#pragma omp simd reduction(+ : s0, s1, s2, s3)
      for (int64_t k = 0; k < cols; ++k) {
        s0 += w0[k] * g[k];
        s1 += w1[k] * g[k];
        s2 += w2[k] * g[k];
        s3 += w3[k] * g[k];
      }
      out[n][c] += s0;
      out[n][c + 1] += s1;
      out[n][c + 2] += s2;
      out[n][c + 3] += s3;
    }
  }
  for (; c < rows; ++c) {
    for (int64_t n = 0; n < count; ++n) {
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < cols; ++k) sum += matrix[c * cols + k] * grad[n][k];
      out[n][c] += sum;
    }
  }
}

template <class T>
CROWDNAL_CLONES void add_outer_group(const T* const* scores, const T* const* grad, T* out, int64_t count, int64_t rows,
                                     int64_t cols) {
  for (int64_t c = 0; c < rows; ++c) {
    T* __restrict row = out + c * cols;
    int64_t n = 0;
    for (; n + 4 <= count; n += 4) {
      const T z0 = scores[n][c], z1 = scores[n + 1][c], z2 = scores[n + 2][c], z3 = scores[n + 3][c];
      const T *g0 = grad[n], *g1 = grad[n + 1], *g2 = grad[n + 2], *g3 = grad[n + 3];
      for (int64_t k = 0; k < cols; ++k) row[k] += z0 * g0[k] + z1 * g1[k] + z2 * g2[k] + z3 * g3[k];
    }
    for (; n < count; ++n) {
      const T z = scores[n][c];
      const T* g = grad[n];
      for (int64_t k = 0; k < cols; ++k) row[k] += z * g[k];
    }
  }
}

#define CROWDNAL_INSTANTIATE(T)                                                                                \
  template void mix_row<T>(const T*, const T*, const T*, T*, int64_t, int64_t);                                \
  template void add_matrix_row<T>(const T*, const T*, T*, int64_t, int64_t);                                   \
  template void add_outer<T>(const T*, const T*, T*, int64_t, int64_t);                                        \
  template void softmax_rows<T>(T* const*, T*, int64_t, int64_t);                                              \
  template void mix_group<T>(const T* const*, const T*, T* const*, int64_t, int64_t, int64_t);                 \
  template void add_matrix_group<T>(const T*, const T* const*, T* const*, int64_t, int64_t, int64_t);          \
  template void add_outer_group<T>(const T* const*, const T* const*, T*, int64_t, int64_t, int64_t);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
