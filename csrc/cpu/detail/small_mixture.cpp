#include "cpu/detail/small_mixture.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "cpu/detail/prior.h"
#include "cpu/detail/runs.h"
#include "cpu/detail/small_normalization.h"

namespace crowdnal::cpu {
namespace {

// Takes the annotations in the annotators' order, kLanes at a time whoever they belong to. A matrix is activated when its
// first annotation comes, and kept until its gradient is written. The posterior is p_i[k] f(x) / sum, which spares
// logarithms, and taken once more in log space where that may have underflowed.
template <class T, int N>
struct MixtureWalk {
  static constexpr int64_t L = kLanes<T>;
  const MixtureInput<T>& in;
  const StepScale<T>& scale;
  const Index& index;
  const Runs& runs;
  const Shape& shape;
  const StepOut<T>& out;
  Prior<T>& prior;
  MatricesOut<T> place;
  Row<T, N> row;
  Matrices<T, N> matrices;
  bool normalized, softplus;
  int64_t size;                   // of a matrix whose rows have N vectors
  std::vector<T> values, slopes;  // [L, rows, N L]: f and, of softplus, df/dx, of run r at r % L
  BlockSums<T> grads;             // [rows, N L]: G
  int64_t n[L], slot[L];          // the annotations of a block, and where the values of their runs are
  T inverse[L * N * L];           // [L, N L]: 1 / sum_y f, of run r at r % L
  T joint[L * N * L] = {}, factor[L * N * L] = {};

  CROWDNAL_INLINE MixtureWalk(const MixtureInput<T>& in, const StepScale<T>& scale, const Index& index,
                              const Runs& runs, const Shape& shape, const StepOut<T>& out, Prior<T>& prior)
      : in(in), scale(scale), index(index), runs(runs), shape(shape), out(out), prior(prior),
        place{out.confusion, index, runs, shape}, row(shape.cols), matrices(in.confusion, shape),
        normalized(in.kind != Normalization::kNone), softplus(in.kind == Normalization::kSoftplus),
        size(shape.rows * N * L), values(normalized ? L * size : 0), slopes(softplus && out.confusion ? L * size : 0),
        grads(out.confusion ? size : 0) {}

  CROWDNAL_INLINE Activated<T, N> activated(int64_t run) {
    const int64_t at = run % L;
    return {values.data() + at * size, slopes.empty() ? nullptr : slopes.data() + at * size, inverse + at * N * L};
  }
  CROWDNAL_INLINE bool activate(int64_t run) {
    return activated(run).fill(matrices.of(index.annotator[index.order[runs[run]]]), shape.rows, row, softplus);
  }

  CROWDNAL_INLINE void add(int64_t j, int64_t annotation, int64_t at) {
    n[j] = annotation;
    slot[j] = at;
    Vec<T> t[N];
    row.read(in.log_probs, index.item[annotation], index.num_items, t);
    if (normalized) {
      const T* f = values.data() + at * size + in.label[annotation] * N * L;
      for (int64_t i = 0; i < N; ++i) {
        const Vec<T> v = load(f + i * L), share = v * load(inverse + (at * N + i) * L);
        store(factor + (j * N + i) * L, i == N - 1 ? only<T>(share, row.last) : share);
      }
    } else {
      const T* x = matrices.of(index.annotator[annotation]) + in.label[annotation] * shape.cols;
      for (int64_t i = 0; i < N; ++i) t[i] = t[i] + load(x + i * L);
    }
    for (int64_t i = 0; i < N; ++i) store(joint + (j * N + i) * L, t[i]);
  }

  // nll, then the gradient for the log joint in the place of it.
  CROWDNAL_INLINE void residuals(int64_t count) {
    T sums[L], log_sum[L];
    softmax_rows<T, N>(joint, normalized ? factor : nullptr, row, sums, log_sum);
    for (int64_t j = 0; j < count; ++j) {
      T* g = joint + j * N * L;
      out.nll[n[j]] = -log_sum[j];
      if (normalized && sums[j] < T(kTiny)) in_log_space(j, g);
      const T u = -scale.of(n[j]);
      for (int64_t i = 0; i < N; ++i) {
        const Vec<T> v = u * load(g + i * L);
        store(g + i * L, v);
        if (out.each) store(out.each + (n[j] * N + i) * L, v);
      }
    }
  }

  void in_log_space(int64_t j, T* posterior) {
    T log_norm[N * L];
    for (int64_t k = 0; k < shape.cols; ++k) log_norm[k] = -fast_log(inverse[slot[j] * N * L + k]);
    out.nll[n[j]] = posterior_row(in, index, shape, n[j], log_norm, {}, posterior);
  }

  // G (+)= the gradients of the annotations first..last-1 of this block, of one annotator.
  CROWDNAL_INLINE void add_labelled(int64_t first, int64_t last, bool fresh) {
    T* sum = grads.sum.data();
    if (fresh) {
      for (int64_t e = 0; e < size; e += L) store(sum + e, Vec<T>{});
    }
    for (int64_t j = first; j < last; ++j) {
      T* to = sum + in.label[n[j]] * N * L;
      for (int64_t i = 0; i < N; ++i) store(to + i * L, load(to + i * L) + load(joint + (j * N + i) * L));
    }
  }

  // The run's part of the prior: a gradient for log A more.
  CROWDNAL_INLINE void add_prior(int64_t run) {
    const int64_t annotator = place.annotator(run);
    const T u = prior.share(scale, index.order, runs[run], runs[run + 1], annotator);
    const T* matrix = matrices.of(annotator);
    const Activated<T, N> at = activated(run);
    Vec<T> each = {};
    for (int64_t i = 0; i < N; ++i) {
      const Bits<T> here = i == N - 1 ? row.last : ~Bits<T>{};
      for (int64_t y = 0; y < shape.rows; ++y) {
        const int64_t e = (y * N + i) * L;
        const Vec<T> counts = load(prior.counts.data() + e);
        Vec<T> log_f = only<T>(load(matrix + y * shape.cols + i * L), here);
        if (softplus) {
          const Vec<T> f = load(at.values + e);
          log_f = f > broadcast<T>(T(kTiny)) ? only<T>(fast_log(f), here) : log_f;  // below, softplus is exp
        }
        each += counts * (load(prior.constant.data() + e) - log_f);
        if (out.confusion) store(grads.sum.data() + e, load(grads.sum.data() + e) - u * counts);
      }
      if (normalized) {
        each -= only<T>(load(prior.strength.data() + i * L) * fast_log(load(at.inverse + i * L)), here);
      }
    }
    prior.value[run] = u * sum_of<T>(each);
  }

  // The whole is written at the annotator's end.
  CROWDNAL_INLINE void finish(int64_t run, bool first_block, bool last_block) {
    if (out.confusion) grads.join(first_block, last_block);
    if (!last_block) return;
    if (prior) add_prior(run);
    if (!out.confusion) return;
    T* matrix = place(run);
    if (!normalized) return write_rows(grads.sum.data(), shape.rows, row, matrix);
    activated(run).gradient(grads.sum.data(), shape.rows, row, softplus, matrix);
  }

  // A run whose matrix has an extreme column: all in log space.
  void exact(int64_t run) {
    const int64_t first = runs[run], count = runs[run + 1] - first, classes = shape.cols;
    const T* x = in.confusion + index.annotator[index.order[first]] * shape.matrix();
    std::vector<T> log_norm(classes), apart, rows(count * classes);
    std::vector<int64_t> label(count), order(count);
    std::iota(order.begin(), order.end(), int64_t(0));
    log_norms<T>(x, shape.rows, classes, in.kind, log_norm.data(), nullptr, nullptr, &apart);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t a = index.order[first + j];
      T* g = rows.data() + j * classes;
      label[j] = in.label[a];
      out.nll[a] = posterior_row(in, index, shape, a, log_norm.data(), apart, g);
      for (int64_t k = 0; k < classes; ++k) g[k] *= -scale.of(a);
      for (int64_t k = 0; out.each && k < N * L; ++k) out.each[a * N * L + k] = k < classes ? g[k] : T(0);
    }
    T* matrix = out.confusion ? place(run) : nullptr;
    if (matrix) {
      through_normalization<T>(x, log_norm.data(), {rows.data()}, label.data(), order.data(), 0, count, shape.rows,
                               classes, in.kind, nullptr, matrix);
    }
    if (!prior) return;
    const T u = prior.share(scale, index.order, first, first + count, place.annotator(run));
    prior.value[run] = prior_of_normalized<T>(prior, x, log_norm.data(), apart, nullptr, nullptr, in.kind, u, matrix);
  }

  CROWDNAL_INLINE void walk(int64_t run, int64_t end) {
    const int64_t last = runs[end];
    for (int64_t position = runs[run]; position < last;) {
      int64_t count = 0, next = run;
      bool good = true;
      while (count < L && position + count < last) {
        const int64_t at = position + count, stop = std::min(runs[next + 1], position + L);
        good = !normalized || at > runs[next] || activate(next);
        if (!good) break;
        for (int64_t p = at; p < stop; ++p) add(count++, index.order[p], next % L);
        next += stop == runs[next + 1];
      }
      if (count > 0) residuals(count);
      for (int64_t j = 0; j < count;) {
        const int64_t first = runs[run], stop = runs[run + 1], done = position + j - first;
        const int64_t block_end = std::min(stop, first + (done / kSegmentBlock + 1) * kSegmentBlock);
        const int64_t until = std::min(count, block_end - position);
        if (out.confusion) add_labelled(j, until, done % kSegmentBlock == 0);
        if (position + until == block_end) finish(run, block_end - first <= kSegmentBlock, block_end == stop);
        j = until;
        run += position + j == stop;
      }
      position += count;
      if (good) continue;
      exact(run++);
      position = runs[run];
    }
  }
};

}  // namespace

template <class T>
CROWDNAL_CLONES void mixture_step_small(const MixtureInput<T>& input, const StepScale<T>& scale, const Index& index,
                                        const Runs& runs, const Shape& shape, int64_t run, int64_t end,
                                        const StepOut<T>& out, Prior<T>& prior) {
  if (run == end) return;
  if (shape.cols <= kLanes<T>) {
    MixtureWalk<T, 1>(input, scale, index, runs, shape, out, prior).walk(run, end);
  } else {
    MixtureWalk<T, 2>(input, scale, index, runs, shape, out, prior).walk(run, end);
  }
}

#define CROWDNAL_INSTANTIATE(T)                                                                               \
  template void mixture_step_small<T>(const MixtureInput<T>&, const StepScale<T>&, const Index&, const Runs&, \
                                      const Shape&, int64_t, int64_t, const StepOut<T>&, Prior<T>&);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
