#include "cpu/detail/rows.h"

#include <limits>
#include <vector>

namespace crowdnal::cpu {

namespace {

template <class T, class Out>
CROWDNAL_INLINE void add_row_to(const GradRows<T>& grad, int64_t n, Out* __restrict out, int64_t cols) {
  const T* values = grad.values + n * cols;
  const Out u = grad.factor(n);
  for (int64_t k = 0; k < cols; ++k) out[k] += u * values[k];
  if (grad.label) out[grad.label[n]] -= u;
}

// out = sum of the rows first..last-1
template <class T>
CROWDNAL_CLONES void sum_long_segment(const GradRows<T>& grad, int64_t first, int64_t last, int64_t cols, T* out) {
  std::vector<double> sums(cols, 0.0);
  for (int64_t n = first; n < last; ++n) add_row_to(grad, n, sums.data(), cols);
  for (int64_t k = 0; k < cols; ++k) out[k] = static_cast<T>(sums[k]);
}

}  // namespace

template <class T>
CROWDNAL_CLONES void add_row(const GradRows<T>& grad, int64_t n, T* out, int64_t cols) {
  add_row_to(grad, n, out, cols);
}

template <class T>
CROWDNAL_CLONES void sum_segments(const GradRows<T>& grad, int64_t nnz, const int64_t* indptr, int64_t begin,
                                  int64_t end, int64_t cols, T* out) {
  for (int64_t i = begin; i < end; ++i) {
    if (indptr[i + 1] - indptr[i] > kSegmentBlock) {
      sum_long_segment(grad, indptr[i], indptr[i + 1], cols, out + i * cols);
      continue;
    }
    for (int64_t k = 0; k < cols; k += kLanes<T>) {
      Vec<T> sum = Vec<T>{};
      for (int64_t n = indptr[i]; n < indptr[i + 1]; ++n) {
        sum += grad.factor(n) * load_some(grad.values + n * cols + k, (nnz - n) * cols - k);
      }
      store_some(out + i * cols + k, sum, (end - i) * cols - k);
    }
    for (int64_t n = indptr[i]; grad.label && n < indptr[i + 1]; ++n) {
      out[i * cols + grad.label[n]] -= grad.factor(n);
    }
  }
}

template <class T>
CROWDNAL_CLONES void mixing_gradient(const GradRows<T>& grad, const T* shared, const T* own, const int64_t* item,
                                     int64_t begin, int64_t end, int64_t cols, T* out) {
  for (int64_t n = begin; n < end; ++n) {
    const T *values = grad.values + n * cols, *s = shared + item[n] * cols, *h = own + n * cols;
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t k = 0; k < cols; ++k) sum += values[k] * (s[k] - h[k]);
    out[n] = grad.factor(n) * (sum - (s[grad.label[n]] - h[grad.label[n]]));
  }
}

template <class T>
CROWDNAL_CLONES T weighted_sum(const T* values, const T* weight, int64_t count) {
  constexpr int64_t kTerms = 16;
  double sums[kTerms] = {}, total = 0;
  int64_t n = 0;
  for (; n + kTerms <= count; n += kTerms) {
    for (int64_t l = 0; l < kTerms; ++l) {
      sums[l] += weight ? static_cast<double>(weight[n + l]) * values[n + l] : static_cast<double>(values[n + l]);
    }
  }
  for (; n < count; ++n) total += weight ? static_cast<double>(weight[n]) * values[n] : static_cast<double>(values[n]);
  for (int64_t l = 0; l < kTerms; ++l) total += sums[l];
  return static_cast<T>(total);
}

template <class T>
CROWDNAL_CLONES T softmax_row(T* h, int64_t cols) {
  constexpr T kLowest = -std::numeric_limits<T>::infinity();
  T highest = kLowest, sum = 0;
#pragma omp simd reduction(max : highest)
  for (int64_t k = 0; k < cols; ++k) highest = h[k] > highest ? h[k] : highest;
  const T shift = highest == kLowest ? T(0) : highest;
  for (int64_t k = 0; k < cols; ++k) h[k] = fast_decay(h[k] - shift);
#pragma omp simd reduction(+ : sum)
  for (int64_t k = 0; k < cols; ++k) sum += h[k];
  const T inverse = sum == 0 ? T(0) : T(1) / sum;
  for (int64_t k = 0; k < cols; ++k) h[k] *= inverse;
  return fast_log(sum) + shift;
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
CROWDNAL_CLONES void matrix_group(const T* matrix, const T* const* grad, T* const* out, int64_t count, int64_t rows,
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
      out[n][c] = s0;
      out[n][c + 1] = s1;
      out[n][c + 2] = s2;
      out[n][c + 3] = s3;
    }
  }
  for (; c < rows; ++c) {
    for (int64_t n = 0; n < count; ++n) {
      T sum = 0;
#pragma omp simd reduction(+ : sum)
      for (int64_t k = 0; k < cols; ++k) sum += matrix[c * cols + k] * grad[n][k];
      out[n][c] = sum;
    }
  }
}

template <class T>
CROWDNAL_CLONES void outer_group(const T* const* scores, const T* const* grad, T* out, int64_t count, int64_t rows,
                                 int64_t cols, bool first) {
  for (int64_t c = 0; c < rows; ++c) {
    T* __restrict row = out + c * cols;
    int64_t n = 0;
    if (first && count >= 4) {
      const T z0 = scores[0][c], z1 = scores[1][c], z2 = scores[2][c], z3 = scores[3][c];
      const T *g0 = grad[0], *g1 = grad[1], *g2 = grad[2], *g3 = grad[3];
      for (int64_t k = 0; k < cols; ++k) row[k] = z0 * g0[k] + z1 * g1[k] + z2 * g2[k] + z3 * g3[k];
      n = 4;
    } else if (first) {
      const T z = scores[0][c];
      const T* g = grad[0];
      for (int64_t k = 0; k < cols; ++k) row[k] = z * g[k];
      n = 1;
    }
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

#define CROWDNAL_INSTANTIATE(T)                                                                                       \
  template void add_row<T>(const GradRows<T>&, int64_t, T*, int64_t);                                                 \
  template void sum_segments<T>(const GradRows<T>&, int64_t, const int64_t*, int64_t, int64_t, int64_t, T*);          \
  template void mixing_gradient<T>(const GradRows<T>&, const T*, const T*, const int64_t*, int64_t, int64_t, int64_t, \
                                   T*);                                                                               \
  template T weighted_sum<T>(const T*, const T*, int64_t);                                                            \
  template T softmax_row<T>(T*, int64_t);                                                                             \
  template void mix_group<T>(const T* const*, const T*, T* const*, int64_t, int64_t, int64_t);                        \
  template void matrix_group<T>(const T*, const T* const*, T* const*, int64_t, int64_t, int64_t);                     \
  template void outer_group<T>(const T* const*, const T* const*, T*, int64_t, int64_t, int64_t, bool);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
