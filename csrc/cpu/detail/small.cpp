#include "cpu/detail/small.h"

#include <algorithm>

#include "cpu/detail/lanes.h"
#include "cpu/detail/runs.h"

namespace crowdnal::cpu {
namespace {

constexpr int64_t kTogether = 4;  // annotations whose sums are interleaved to hide FMA latency

template <class T, int N>
CROWDNAL_INLINE void mix_of(const MixInput<T>& in, const Index& index, const Shape& shape, int64_t begin, int64_t end,
                            T* out, T* nll) {
  constexpr int64_t L = kLanes<T>;
  const int64_t rows = shape.rows, cols = shape.cols;
  const Row<T, N> row(cols);
  const Matrices<T, N> matrices(in.confusion, shape);
  T h[L * N * L] = {}, target[L], sums[L], log_sum[L];
  for (int64_t block = begin; block < end; block += L) {
    const int64_t count = std::min(L, end - block);
    for (int64_t j = 0; j < count; j += kTogether) {
      const T *z[kTogether], *w[kTogether];
      Vec<T> sum[kTogether][N];
      for (int64_t b = 0; b < kTogether; ++b) {
        const int64_t n = std::min(block + j + b, end - 1);
        z[b] = in.scores + index.item[n] * rows;
        w[b] = matrices.of(index.annotator[n]);
        for (int i = 0; i < N; ++i) sum[b][i] = Vec<T>{};
        if (in.shared && !in.mixing) row.read(in.shared, index.item[n], index.num_items, sum[b]);
      }
      for (int64_t c = 0; c < rows; ++c) {
        for (int64_t b = 0; b < kTogether; ++b) {
          for (int64_t i = 0; i < N; ++i) sum[b][i] += z[b][c] * load(w[b] + c * cols + i * L);
        }
      }
      for (int64_t b = 0; b < kTogether; ++b) {
        if (in.mixing) {
          const int64_t n = std::min(block + j + b, end - 1);
          Vec<T> shared[N];
          row.read(in.shared, index.item[n], index.num_items, shared);
          for (int64_t i = 0; i < N; ++i) sum[b][i] += in.mixing[n] * (shared[i] - sum[b][i]);
        }
        for (int64_t i = 0; i < N; ++i) store(h + ((j + b) * N + i) * L, sum[b][i]);
      }
    }
    if (in.label) {
      for (int64_t j = 0; j < count; ++j) target[j] = h[j * N * L + in.label[block + j]];
      softmax_rows<T, N>(h, nullptr, row, sums, log_sum);
      for (int64_t j = 0; j < count; ++j) nll[block + j] = log_sum[j] - target[j];
    }
    for (int64_t j = 0; j < count; ++j) {
      Vec<T> done[N];
      for (int64_t i = 0; i < N; ++i) done[i] = load(h + (j * N + i) * L);
      row.write(done, out, block + j, end);
    }
  }
}

// Row n of `grad`; 0 in the lanes behind it.
template <class T, int N>
CROWDNAL_INLINE void grad_row(const GradRows<T>& grad, const Row<T, N>& row, int64_t n, int64_t nnz, Vec<T>* g) {
  row.read(grad.values, n, nnz, g);
  const T u = grad.factor(n);
  if (!grad.label) {
    for (int i = 0; i < N; ++i) g[i] = u * g[i];
    return;
  }
  const Bits<T> hot = Bits<T>{} + static_cast<decltype(Bits<T>{}[0] + 0)>(grad.label[n]);
  Bits<T> lane;
  for (int64_t l = 0; l < kLanes<T>; ++l) lane[l] = l;
  for (int i = 0; i < N; ++i) {
    g[i] = u * (lane + i * static_cast<int>(kLanes<T>) == hot ? g[i] - T(1) : g[i]);
  }
}

constexpr int64_t kRows = 8;  // rows of a matrix whose sums are in registers

template <class T, int N>
CROWDNAL_INLINE void items_of(const GradRows<T>& grad, const T* confusion, const Index& index, const Shape& shape,
                              int64_t begin, int64_t end, T* out) {
  constexpr int64_t L = kLanes<T>;
  const int64_t rows = shape.rows, cols = shape.cols;
  const Row<T, N> row(cols);
  const Matrices<T, N> matrices(confusion, shape);
  for (int64_t i = begin; i < end; ++i) {
    for (int64_t c = 0; c < rows; c += kRows) {
      int64_t offset[kRows];
      for (int64_t b = 0; b < kRows; ++b) offset[b] = std::min(c + b, rows - 1) * cols;
      T totals[L];
      const int64_t first = index.indptr[i], last = index.indptr[i + 1];
      for (int64_t block = first; block == first || block < last; block += kSegmentBlock) {
        Vec<T> sum[kRows] = {};
        for (int64_t n = block; n < std::min(last, block + kSegmentBlock); ++n) {
          const T* w = matrices.of(index.annotator[n]);
          Vec<T> g[N];
          grad_row(grad, row, n, index.nnz, g);
          for (int64_t b = 0; b < kRows; ++b) {
            if constexpr (N == 2) sum[b] += load(w + offset[b]) * g[0];
            sum[b] += only<T>(load(w + offset[b] + (N - 1) * L), row.last) * g[N - 1];
          }
        }
        const Vec<T> total = reduce_eight<T, Sum>(sum);
        store(totals, block == first ? total : load(totals) + total);
      }
      for (int64_t b = 0; b < std::min(kRows, rows - c); ++b) out[i * rows + c + b] = totals[b];
    }
  }
}

template <class T, int N>
CROWDNAL_INLINE void outer_of(const GradRows<T>& grad, const T* scores, const Index& index, const Shape& shape,
                              int64_t first, int64_t last, T* out) {
  const int64_t rows = shape.rows;
  const Row<T, N> row(shape.cols);
  for (int64_t c = 0; c < rows; c += kRows) {
    Vec<T> total[kRows][N];
    for (int64_t block = first; block < last; block += kSegmentBlock) {
      Vec<T> sum[kRows][N] = {};
      for (int64_t p = block; p < std::min(last, block + kSegmentBlock); ++p) {
        const int64_t n = index.order[p];
        const T* z = scores + index.item[n] * rows;
        Vec<T> g[N];
        grad_row(grad, row, n, index.nnz, g);
        for (int64_t b = 0; b < kRows; ++b) {
          const T score = z[std::min(c + b, rows - 1)];
          for (int64_t i = 0; i < N; ++i) sum[b][i] += score * g[i];
        }
      }
      for (int64_t b = 0; b < kRows; ++b) {
        for (int64_t i = 0; i < N; ++i) total[b][i] = block == first ? sum[b][i] : total[b][i] + sum[b][i];
      }
    }
    for (int64_t b = 0; b < std::min(kRows, rows - c); ++b) row.write(total[b], out, c + b, rows);
  }
}

}  // namespace

template <class T>
CROWDNAL_CLONES void mix_small(const MixInput<T>& input, const Index& index, const Shape& shape, int64_t begin,
                               int64_t end, T* out, T* nll) {
  if (shape.cols <= kLanes<T>) return mix_of<T, 1>(input, index, shape, begin, end, out, nll);
  mix_of<T, 2>(input, index, shape, begin, end, out, nll);
}

template <class T>
CROWDNAL_CLONES void items_small(const GradRows<T>& grad, const T* confusion, const Index& index, const Shape& shape,
                                 int64_t begin, int64_t end, T* out) {
  if (shape.cols <= kLanes<T>) return items_of<T, 1>(grad, confusion, index, shape, begin, end, out);
  items_of<T, 2>(grad, confusion, index, shape, begin, end, out);
}

template <class T>
CROWDNAL_CLONES void outer_small(const GradRows<T>& grad, const T* scores, const Index& index, const Shape& shape,
                                 int64_t first, int64_t last, T* out) {
  if (shape.cols <= kLanes<T>) return outer_of<T, 1>(grad, scores, index, shape, first, last, out);
  outer_of<T, 2>(grad, scores, index, shape, first, last, out);
}

#define CROWDNAL_INSTANTIATE(T)                                                                                 \
  template void mix_small<T>(const MixInput<T>&, const Index&, const Shape&, int64_t, int64_t, T*, T*);         \
  template void items_small<T>(const GradRows<T>&, const T*, const Index&, const Shape&, int64_t, int64_t, T*); \
  template void outer_small<T>(const GradRows<T>&, const T*, const Index&, const Shape&, int64_t, int64_t, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
