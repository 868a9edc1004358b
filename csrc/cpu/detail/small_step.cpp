#include "cpu/detail/small_step.h"

#include <algorithm>
#include <vector>

#include "cpu/detail/lanes.h"
#include "cpu/detail/prior.h"
#include "cpu/detail/runs.h"

namespace crowdnal::cpu {
namespace {

constexpr int64_t kRows = 8;        // rows of a matrix whose sums are in registers
constexpr int64_t kTransposed = 4;  // annotations of one annotator from which on its matrix is worth transposing

// Takes the annotations in the annotators' order, kLanes at a time whoever they belong to: their scores, the softmax of
// all, then for each annotator among them the products of its matrix, and its share of the outer product.
template <class T, int N>
struct Walk {
  static constexpr int64_t L = kLanes<T>;
  const MixInput<T>& in;
  const StepScale<T>& scale;
  const Index& index;
  const Runs& runs;
  const Shape& shape;
  const StepOut<T>& out;
  Prior<T>& prior;
  MatricesOut<T> place;
  Row<T, N> row;
  Matrices<T, N> matrices;
  int64_t width;              // padded(rows)
  std::vector<T> transposed;  // [cols, width]
  BlockSums<T> block_sums;    // [rows, N L]
  int64_t n[L];               // the annotations
  const T *z[L], *w[L];       // their scores and matrices
  T h[L * N * L] = {};        // their scores under the matrix, then the gradient for these
  T gap[L * N * L];           // shared - own scores; room for the prior

  CROWDNAL_INLINE Walk(const MixInput<T>& in, const StepScale<T>& scale, const Index& index, const Runs& runs,
                       const Shape& shape, const StepOut<T>& out, Prior<T>& prior)
      : in(in), scale(scale), index(index), runs(runs), shape(shape), out(out), prior(prior),
        place{out.confusion, index, runs, shape}, row(shape.cols), matrices(in.confusion, shape),
        width(padded<T>(shape.rows)), transposed(out.each ? shape.cols * width : 0),
        block_sums(out.confusion ? shape.rows * N * L : 0) {}

  CROWDNAL_INLINE void mix(int64_t count) {
    for (int64_t j = 0; j < count;) {
      if (j + 8 <= L && w[j] == w[j + 7]) {  // in order: all eight are of one annotator
        scores_of<8, true>(j);
        j += 8;
      } else {
        scores_of<4, false>(j);
        j += 4;
      }
    }
  }

  // The scores of G annotations, interleaved to hide FMA latency; `same`: under one matrix.
  template <int G, bool same>
  CROWDNAL_INLINE void scores_of(int64_t j) {
    Vec<T> acc[G][N];
    for (int b = 0; b < G; ++b) {
      for (int64_t i = 0; i < N; ++i) acc[b][i] = Vec<T>{};
      if (in.shared && !in.mixing) row.read(in.shared, index.item[n[j + b]], index.num_items, acc[b]);
    }
    for (int64_t c = 0; c < shape.rows; ++c) {
      for (int64_t i = 0; i < N; ++i) {
        const int64_t at = c * shape.cols + i * L;
        const Vec<T> first = load(w[j] + at);
        for (int b = 0; b < G; ++b) acc[b][i] += z[j + b][c] * (same || b == 0 ? first : load(w[j + b] + at));
      }
    }
    for (int b = 0; b < G; ++b) {
      if (in.mixing) {
        Vec<T> d[N];
        row.read(in.shared, index.item[n[j + b]], index.num_items, d);
        for (int64_t i = 0; i < N; ++i) {
          d[i] = i == N - 1 ? only<T>(d[i] - acc[b][i], row.last) : d[i] - acc[b][i];
          acc[b][i] += in.mixing[n[j + b]] * d[i];
          store(gap + ((j + b) * N + i) * L, d[i]);
        }
      }
      for (int64_t i = 0; i < N; ++i) store(h + ((j + b) * N + i) * L, acc[b][i]);
    }
  }

  // nll, then u (softmax - onehot) in the place of the scores, and what of it belongs to the shared term.
  CROWDNAL_INLINE void residuals(int64_t count) {
    T target[L], sums[L], log_sum[L];
    Bits<T> lane;
    for (int64_t l = 0; l < L; ++l) lane[l] = l;
    for (int64_t j = 0; j < count; ++j) target[j] = h[j * N * L + in.label[n[j]]];
    softmax_rows<T, N>(h, nullptr, row, sums, log_sum);
    for (int64_t j = 0; j < count; ++j) {
      out.nll[n[j]] = log_sum[j] - target[j];
      T* g = h + j * N * L;
      const T u = scale.of(n[j]), mixing = in.mixing ? in.mixing[n[j]] : T(0);
      const Bits<T> hot = Bits<T>{} + static_cast<decltype(Bits<T>{}[0] + 0)>(in.label[n[j]]);
      Vec<T> along = {};
      for (int64_t i = 0; i < N; ++i) {
        Vec<T> v = load(g + i * L);
        v = u * only<T>(lane + static_cast<int>(i * L) == hot ? v - T(1) : v, i == N - 1 ? row.last : ~Bits<T>{});
        if (out.share) store(out.share + (n[j] * N + i) * L, in.mixing ? mixing * v : v);
        if (out.mixing) along += v * load(gap + (j * N + i) * L);
        store(g + i * L, in.mixing ? (T(1) - mixing) * v : v);
      }
      if (out.mixing) out.mixing[n[j]] = sum_of<T>(along);
    }
  }

  CROWDNAL_INLINE void transpose(const T* matrix) {
    for (int64_t c = 0; c < shape.rows; c += L) {
      for (int64_t k = 0; k < shape.cols; k += L) {
        Vec<T> tile[L];
        for (int64_t l = 0; l < L; ++l) {
          tile[l] = c + l < shape.rows ? load(matrix + (c + l) * shape.cols + k) : Vec<T>{};
        }
        transpose_tile<T>(tile);
        for (int64_t l = 0; l < std::min(L, shape.cols - k); ++l)
          store(transposed.data() + (k + l) * width + c, tile[l]);
      }
    }
  }

  // W_r g for the annotations first..last-1 of this block, of one annotator whose matrix is transposed.
  CROWDNAL_INLINE void products(int64_t first, int64_t last) {
    for (int64_t d = 0; d < width; d += L) {
      int64_t j = first;
      for (; last - j > 4; j += 8) products_of<8>(j, last, d);
      if (j < last) products_of<4>(j, last, d);
    }
  }
  template <int G>
  CROWDNAL_INLINE void products_of(int64_t j, int64_t last, int64_t d) {
    Vec<T> acc[G] = {};
    const T* g[G];
    for (int b = 0; b < G; ++b) g[b] = h + std::min(j + b, last - 1) * N * L;
    for (int64_t k = 0; k < shape.cols; ++k) {
      const Vec<T> w = load(transposed.data() + k * width + d);
      for (int b = 0; b < G; ++b) acc[b] += g[b][k] * w;
    }
    for (int b = 0; b < G && j + b < last; ++b) store(out.each + n[j + b] * width + d, acc[b]);
  }

  // The same where the annotator has few.
  CROWDNAL_INLINE void products_of_rows(int64_t first, int64_t last) {
    for (int64_t j = first; j < last; ++j) {
      Vec<T> g[N];
      for (int64_t i = 0; i < N; ++i) g[i] = load(h + (j * N + i) * L);
      for (int64_t c = 0; c < shape.rows; c += kRows) {
        Vec<T> acc[kRows];
        for (int64_t b = 0; b < kRows; ++b) {
          const T* from = w[j] + std::min(c + b, shape.rows - 1) * shape.cols;
          acc[b] = only<T>(load(from + (N - 1) * L), row.last) * g[N - 1];
          if constexpr (N == 2) acc[b] += load(from) * g[0];
        }
        T totals[L];
        store(totals, reduce_eight<T, Sum>(acc));
        std::copy_n(totals, kRows, out.each + n[j] * width + c);
      }
    }
  }

  // sum (+)= scores x gradient of the annotations first..last-1 of this block, of one annotator.
  CROWDNAL_INLINE void outer(int64_t first, int64_t last, bool fresh) {
    for (int64_t c = 0; c < shape.rows; c += kRows) {
      Vec<T> acc[kRows][N];
      T* at = block_sums.sum.data() + c * N * L;
      const int64_t count = std::min(kRows, shape.rows - c);
      for (int64_t b = 0; b < kRows; ++b) {
        for (int64_t i = 0; i < N; ++i) acc[b][i] = fresh || b >= count ? Vec<T>{} : load(at + (b * N + i) * L);
      }
      for (int64_t j = first; j < last; ++j) {
        Vec<T> g[N];
        for (int64_t i = 0; i < N; ++i) g[i] = load(h + (j * N + i) * L);
        for (int64_t b = 0; b < kRows; ++b) {
          const T score = z[j][std::min(c + b, shape.rows - 1)];
          for (int64_t i = 0; i < N; ++i) acc[b][i] += score * g[i];
        }
      }
      for (int64_t b = 0; b < count; ++b) {
        for (int64_t i = 0; i < N; ++i) store(at + (b * N + i) * L, acc[b][i]);
      }
    }
  }

  // The whole is written at the annotator's end.
  CROWDNAL_INLINE void finish(int64_t run, bool first_block, bool last_block) {
    if (out.confusion) block_sums.join(first_block, last_block);
    if (!last_block) return;
    if (prior) {
      const int64_t annotator = place.annotator(run);
      const T u = prior.share(scale, index.order, runs[run], runs[run + 1], annotator);
      T* sum = out.confusion ? block_sums.sum.data() : nullptr;
      prior.value[run] = prior_of_rows<T>(prior, matrices.of(annotator), N * L - shape.cols, u, sum, N * L, gap, N);
    }
    if (!out.confusion) return;
    T* matrix = place(run);
    for (int64_t c = 0; c < shape.rows; ++c) {
      Vec<T> v[N];
      for (int64_t i = 0; i < N; ++i) v[i] = load(block_sums.sum.data() + (c * N + i) * L);
      row.write(v, matrix, c, shape.rows);
    }
  }

  CROWDNAL_INLINE void walk(int64_t run, int64_t end) {
    const int64_t last = runs[end];
    for (int64_t block = runs[run]; block < last; block += L) {
      const int64_t count = std::min(L, last - block);
      for (int64_t j = 0; j < L; ++j) {
        n[j] = index.order[std::min(block + j, last - 1)];
        z[j] = in.scores + index.item[n[j]] * shape.rows;
        w[j] = matrices.of(index.annotator[n[j]]);
      }
      mix(count);
      residuals(count);
      for (int64_t j = 0; j < count;) {
        const int64_t first = runs[run], stop = runs[run + 1], done = block + j - first;
        const int64_t block_end = std::min(stop, first + (done / kSegmentBlock + 1) * kSegmentBlock);
        const int64_t next = std::min(count, block_end - block);
        if (out.each && stop - first >= kTransposed) {
          if (done == 0) transpose(w[j]);
          products(j, next);
        } else if (out.each) {
          products_of_rows(j, next);
        }
        if (out.confusion) outer(j, next, done % kSegmentBlock == 0);
        if (block + next == block_end) finish(run, block_end - first <= kSegmentBlock, block_end == stop);
        j = next;
        run += block + j == stop;
      }
    }
  }
};

}  // namespace

template <class T>
CROWDNAL_CLONES void step_small(const MixInput<T>& input, const StepScale<T>& scale, const Index& index,
                                const Runs& runs, const Shape& shape, int64_t run, int64_t end, const StepOut<T>& out,
                                Prior<T>& prior) {
  if (run == end) return;
  if (shape.cols <= kLanes<T>) {
    Walk<T, 1>(input, scale, index, runs, shape, out, prior).walk(run, end);
  } else {
    Walk<T, 2>(input, scale, index, runs, shape, out, prior).walk(run, end);
  }
}

template <class T>
CROWDNAL_CLONES void sum_padded(const T* rows, const Index& index, int64_t begin, int64_t end, int64_t cols, T* out) {
  const int64_t width = padded<T>(cols);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = index.indptr[i], last = index.indptr[i + 1];
    for (int64_t d = 0; d < width; d += kLanes<T>) {
      Vec<T> sum = {};
      for (int64_t n = first; n < std::min(last, first + kSegmentBlock); ++n) sum += load(rows + n * width + d);
      store_some(out + i * cols + d, sum, (end - i) * cols - d);
    }
    if (last - first <= kSegmentBlock) continue;
    for (int64_t c = 0; c < cols; ++c) {
      double sum = 0;
      for (int64_t n = first; n < last; ++n) sum += rows[n * width + c];
      out[i * cols + c] = static_cast<T>(sum);
    }
  }
}

#define CROWDNAL_INSTANTIATE(T)                                                                                 \
  template void step_small<T>(const MixInput<T>&, const StepScale<T>&, const Index&, const Runs&, const Shape&, \
                              int64_t, int64_t, const StepOut<T>&, Prior<T>&);                                  \
  template void sum_padded<T>(const T*, const Index&, int64_t, int64_t, int64_t, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
