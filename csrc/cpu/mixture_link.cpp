// Mixture link: nll_n = -log sum_k p_i[k] A_r[y_n, k], A_r = a normalised [labels, classes] matrix, in log space.
// The observed label is outermost: an annotation reads one row of its annotator's matrix, and the matrix is normalised
// once for all annotations of its annotator.
#include "cpu/mixture_link.h"

#include <cmath>

#include "cpu/detail/lanes.h"
#include "cpu/detail/spare.h"
#include "cpu/mix.h"

namespace crowdnal::cpu {

MixtureArguments check_mixture(const Tensor& log_probs, const Tensor& confusion, OptionalTensor weight,
                               const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
                               const Tensor& label, int64_t normalization) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, true);
  const Index& view = index.view;
  const Tensor a = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  const Tensor log_p = check_values(log_probs, "log_probs", a, {view.num_items, shape.cols});
  const auto kind = check_normalization(normalization);
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  return {shape, std::move(index), a, labels, log_p, weight, kind};
}

namespace {

template <class T>
struct MixtureOut {
  T* nll;        // [nnz]
  T* posterior;  // [nnz, classes]
  T* log_norm;   // [runs, classes], not for kNone
};

template <class T>
void one_row(const MixtureInput<T>& in, const Index& index, const Shape& shape, int64_t n, const T* log_norm,
             const std::vector<T>& apart, const MixtureOut<T>& out) {
  out.nll[n] = posterior_row(in, index, shape, n, log_norm, apart, out.posterior + n * shape.cols);
}

// Rows of one or two vectors, kLanes annotations at a time, whoever their annotators are. Softplus takes the posterior
// from p_i[k] softplus(x) / sum, which spares a logarithm, and once more in log space where that may have underflowed.
template <class T, int N>
struct PendingRows {
  static constexpr int64_t L = kLanes<T>;
  const MixtureInput<T>& in;
  const Index& index;
  const Shape& shape;
  const MixtureOut<T>& out;
  Row<T, N> row;
  int64_t n[L], count = 0;
  const T* log_norm[L];
  T joint[L * N * L] = {}, factor[L * N * L] = {};

  CROWDNAL_INLINE PendingRows(const MixtureInput<T>& in, const Index& index, const Shape& shape,
                              const MixtureOut<T>& out)
      : in(in), index(index), shape(shape), out(out), row(shape.cols) {}

  // values: softplus of the annotator's matrix, or null
  CROWDNAL_INLINE void add(int64_t annotation, const T* norm, const Vec<T>* norms, const T* values) {
    const int64_t matrix_row = index.annotator[annotation] * shape.rows + in.label[annotation];
    Vec<T> t[N], x[N];
    row.read(in.log_probs, index.item[annotation], index.num_items, t);
    if (values) {
      row.read(values, in.label[annotation], shape.rows, x);
      for (int64_t i = 0; i < N; ++i) store(factor + (count * N + i) * L, x[i] * fast_exp(-norms[i]));
    } else {
      row.read(in.confusion, matrix_row, shape.num_annotators * shape.rows, x);
      for (int64_t i = 0; i < N; ++i) t[i] = t[i] + x[i] - norms[i];
    }
    for (int64_t i = 0; i < N; ++i) store(joint + (count * N + i) * L, t[i]);
    n[count] = annotation;
    log_norm[count] = norm;
    if (++count == L) finish();
  }

  CROWDNAL_INLINE void finish() {
    const bool factors = in.kind == Normalization::kSoftplus;
    T sums[L], log_sum[L];
    softmax_rows<T, N>(joint, factors ? factor : nullptr, row, sums, log_sum);
    for (int64_t j = 0; j < count; ++j) {
      if (factors && sums[j] < T(kTiny)) {
        one_row(in, index, shape, n[j], log_norm[j], {}, out);
        continue;
      }
      Vec<T> done[N];
      for (int64_t i = 0; i < N; ++i) done[i] = load(joint + (j * N + i) * L);
      row.write(done, out.posterior, n[j], n[j] + 1);
      out.nll[n[j]] = -log_sum[j];
    }
    count = 0;
  }
};

template <class T, int N>
CROWDNAL_INLINE void mixture_of(const MixtureInput<T>& in, const Index& index, const Runs& runs, const Shape& shape,
                                int64_t run, int64_t end, const MixtureOut<T>& out) {
  const bool softplus = in.kind == Normalization::kSoftplus;
  std::vector<T> values(softplus ? shape.matrix() : 0), apart;
  PendingRows<T, N> pending(in, index, shape, out);
  for (; run < end; ++run) {
    const T* matrix = in.confusion + index.annotator[index.order[runs[run]]] * shape.matrix();
    T* norm = out.log_norm + run * shape.cols;
    Vec<T> norms[N] = {};
    bool good = true;
    if (in.kind != Normalization::kNone) {
      good = log_norms<T>(matrix, shape.rows, shape.cols, in.kind, norm, softplus ? values.data() : nullptr, nullptr,
                          &apart);
      pending.row.read(out.log_norm, run, run + 1, norms);
    }
    for (int64_t p = runs[run]; p < runs[run + 1]; ++p) {
      if (!good) {
        one_row(in, index, shape, index.order[p], norm, apart, out);
      } else {
        pending.add(index.order[p], norm, norms, softplus ? values.data() : nullptr);
      }
    }
  }
  if (pending.count > 0) pending.finish();
}

template <class T>
CROWDNAL_CLONES void mixture_small(const MixtureInput<T>& in, const Index& index, const Runs& runs, const Shape& shape,
                                   int64_t run, int64_t end, const MixtureOut<T>& out) {
  if (shape.cols <= kLanes<T>) return mixture_of<T, 1>(in, index, runs, shape, run, end, out);
  mixture_of<T, 2>(in, index, runs, shape, run, end, out);
}

template <class T>
void mixture_large(const MixtureInput<T>& in, const Index& index, const Runs& runs, const Shape& shape, int64_t run,
                   int64_t end, const MixtureOut<T>& out) {
  std::vector<T> apart;
  for (; run < end; ++run) {
    const T* matrix = in.confusion + index.annotator[index.order[runs[run]]] * shape.matrix();
    T* norm = out.log_norm + run * shape.cols;
    if (in.kind != Normalization::kNone) {
      log_norms<T>(matrix, shape.rows, shape.cols, in.kind, norm, nullptr, nullptr, &apart);
    }
    for (int64_t p = runs[run]; p < runs[run + 1]; ++p) one_row(in, index, shape, index.order[p], norm, apart, out);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mixture_link_op(const Tensor& log_probs, const Tensor& confusion,
                                                           OptionalTensor weight, const Tensor& indptr,
                                                           const Tensor& item, const Tensor& annotator,
                                                           const Tensor& order, const Tensor& label,
                                                           int64_t normalization, bool mean) {
  const MixtureArguments g = check_mixture(log_probs, confusion, weight, indptr, item, annotator, order, label,
                                           normalization);
  const Shape& shape = g.shape;
  const CheckedIndex& index = g.index;
  const Index& view = index.view;
  const Tensor& a = g.matrices;
  const Normalization kind = g.kind;
  const int64_t most_runs = kind == Normalization::kNone ? 0 : std::min(view.nnz, shape.num_annotators);
  Tensor loss = empty(a, {}), nll = empty(a, {view.nnz}), posterior = empty(a, {view.nnz, shape.cols});
  Tensor log_norm = empty(a, {most_runs, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const MixtureInput<T> in = g.input<T>();
    const MixtureOut<T> out{output<T>(nll), output<T>(posterior), output<T>(log_norm)};
    for_each_share(view, index.runs, tasks_of(shape, kind), [&](int64_t run, int64_t end) {
      const auto kernel = is_small<T>(shape) ? mixture_small<T> : mixture_large<T>;
      kernel(in, view, index.runs, shape, run, end, out);
    });
    const int64_t used = kind == Normalization::kNone ? 0 : static_cast<int64_t>(index.runs.size()) - 1;
    std::fill(out.log_norm + used * shape.cols, out.log_norm + most_runs * shape.cols, T(0));
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(g.weight), view.nnz);
    *output<T>(loss) = mean ? total / static_cast<T>(std::max<int64_t>(1, view.nnz)) : total;
  });
  return {loss, nll, posterior, log_norm};
}

std::tuple<Tensor, Tensor> mixture_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll,
                                                    const Tensor& log_probs, const Tensor& confusion,
                                                    OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                    const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                    const Tensor& posterior, OptionalTensor log_norm,
                                                    int64_t normalization, bool mean, bool need_log_probs,
                                                    bool need_confusion) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, need_confusion);
  const Index& view = index.view;
  const Tensor a = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  check_like(log_probs, "log_probs", a.scalar_type(), {view.num_items, shape.cols});
  const Tensor r = check_values(posterior, "posterior", a, {view.nnz, shape.cols});
  const auto kind = check_normalization(normalization);
  const int64_t most_runs = kind == Normalization::kNone ? 0 : std::min(view.nnz, shape.num_annotators);
  if (log_norm) log_norm = check_values(*log_norm, "log_norm", a, {most_runs, shape.cols});
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  if (grad_loss) grad_loss = check_values(*grad_loss, "grad_loss", a, {});
  if (grad_nll) grad_nll = check_values(*grad_nll, "grad_nll", a, {view.nnz});
  Tensor dlog_probs = empty(a, {need_log_probs ? view.num_items : 0, shape.cols});
  Tensor dconfusion = empty_gradient(a, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1);
    const GradRows<T> grad{pointer<T>(r),
                           nullptr,
                           pointer<T>(weight),
                           pointer<T>(grad_nll),
                           grad_loss ? *pointer<T>(grad_loss) / count : T(0),
                           T(-1)};
    if (need_log_probs) sum_items(grad, view, shape.cols, output<T>(dlog_probs));
    if (!need_confusion) return;
    const MatricesOut<T> place{output<T>(dconfusion), view, index.runs, shape};
    for_each_share(view, index.runs, tasks_of(shape, kind), [&](int64_t run, int64_t end) {
      std::vector<T> own(log_norm || kind == Normalization::kNone ? 0 : shape.cols);
      for (; run < end; ++run) {
        const T* matrix = pointer<T>(a) + place.annotator(run) * shape.matrix();
        const T* norm = log_norm ? pointer<T>(log_norm) + run * shape.cols : own.data();
        if (!own.empty()) log_norms<T>(matrix, shape.rows, shape.cols, kind, own.data(), nullptr, nullptr, nullptr);
        through_normalization(matrix, norm, grad, pointer<int64_t>(labels), view.order, index.runs[run],
                              index.runs[run + 1], shape.rows, shape.cols, kind, static_cast<const T*>(nullptr),
                              place(run));
      }
    });
    place.finish();
  });
  return {dlog_probs, dconfusion};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) {
  m.impl("mixture_link", TORCH_BOX(&mixture_link_op));
  m.impl("mixture_link_backward", TORCH_BOX(&mixture_link_backward_op));
}

}  // namespace crowdnal::cpu
