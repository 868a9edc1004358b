// Joint link: nll_i = -log sum_k prior_i[k] prod_{n of i} A_r[y_n, k]^w_n, in log space (Dawid & Skene 1979).
// The stored confusion has the observed label outermost, as in the mixture link.
#include "cpu/joint_link.h"

#include "cpu/detail/spare.h"

namespace crowdnal::cpu {
namespace {

bool is_normalized(Normalization kind) { return kind != Normalization::kNone; }

bool annotated(const Index& view, int64_t i) { return view.indptr[i] < view.indptr[i + 1]; }

int64_t most_runs(const Index& view, const Shape& shape, Normalization kind) {
  return is_normalized(kind) ? std::min(view.nnz, shape.num_annotators) : 0;
}

}  // namespace

int64_t joint_denominator(const Index& view, bool mean) {
  int64_t count = mean ? 0 : 1;
  for (int64_t i = 0; mean && i < view.num_items; ++i) count += annotated(view, i);
  return std::max<int64_t>(1, count);
}

template <class T>
void log_rows(const T* confusion, const int64_t* label, const CheckedIndex& index, const Shape& shape,
              Normalization kind, T* log_norm, T* rows) {
  const std::vector<T> none(shape.cols, T(0));
  for_each_run(index.view, index.runs, tasks_per_thread(shape.matrix() * 8),
               [&](int64_t run, int64_t first, int64_t last) {
                 const T* matrix = confusion + index.view.annotator[index.view.order[first]] * shape.matrix();
                 T* norm = log_norm + run * shape.cols;
                 std::vector<T> apart;
                 log_norms<T>(matrix, shape.rows, shape.cols, kind, norm, nullptr, nullptr, &apart);
                 for (int64_t p = first; p < last; ++p) {
                   const int64_t n = index.view.order[p];
                   log_joint(none.data(), matrix + label[n] * shape.cols, norm, apart, shape.cols, kind,
                             rows + n * shape.cols);
                 }
               });
}

template <class T>
void joint_upstream(const T* posterior, const Index& view, int64_t classes, T scale, const T* upstream, T* dt) {
  parallel_for(0, view.num_items, tasks_per_thread(classes), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T u = annotated(view, i) ? scale + (upstream ? upstream[i] : T(0)) : T(0);
      for (int64_t k = i * classes; k < (i + 1) * classes; ++k) dt[k] = -u * posterior[k];
    }
  });
}

template <class T>
void joint_confusion(const T* confusion, const T* log_norm, const T* dt, const T* weight, const int64_t* label,
                     const CheckedIndex& index, const Shape& shape, Normalization kind, T* rows, T* out) {
  const Index& view = index.view;
  if (!is_normalized(kind)) return label_counts(dt, weight, label, view, index.runs, shape, out);
  parallel_for(0, view.nnz, tasks_per_thread(shape.cols), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      std::copy_n(dt + view.item[n] * shape.cols, shape.cols, rows + n * shape.cols);
    }
  });
  const GradRows<T> grad{rows, nullptr, weight};
  const MatricesOut<T> place{out, view, index.runs, shape};
  for_each_run(view, index.runs, tasks_per_thread(shape.matrix() * 8), [&](int64_t run, int64_t first, int64_t last) {
    std::vector<T> own(log_norm ? 0 : shape.cols);
    const T* matrix = confusion + place.annotator(run) * shape.matrix();
    if (!log_norm) log_norms<T>(matrix, shape.rows, shape.cols, kind, own.data(), nullptr, nullptr, nullptr);
    through_normalization<T>(matrix, log_norm ? log_norm + run * shape.cols : own.data(), grad, label, view.order,
                             first, last, shape.rows, shape.cols, kind, nullptr, place(run));
  });
  place.finish();
}

#define CROWDNAL_INSTANTIATE(T)                                                                                  \
  template void log_rows<T>(const T*, const int64_t*, const CheckedIndex&, const Shape&, Normalization, T*, T*); \
  template void joint_upstream<T>(const T*, const Index&, int64_t, T, const T*, T*);                             \
  template void joint_confusion<T>(const T*, const T*, const T*, const T*, const int64_t*, const CheckedIndex&,  \
                                   const Shape&, Normalization, T*, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> joint_link_op(const Tensor& log_prior, const Tensor& confusion,
                                                         OptionalTensor weight, const Tensor& indptr,
                                                         const Tensor& item, const Tensor& annotator,
                                                         const Tensor& order, const Tensor& label,
                                                         int64_t normalization, bool mean) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);  // rows = observed labels, cols = classes
  const auto kind = check_normalization(normalization);
  const bool own_rows = is_normalized(kind);  // log A itself is read where it lies
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, own_rows);
  const Index& view = index.view;
  const Tensor a = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  const Tensor prior = check_values(log_prior, "log_prior", a, {view.num_items, shape.cols});
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  Tensor loss = empty(a, {}), nll = empty(a, {view.num_items}), posterior = empty(a, {view.num_items, shape.cols});
  Tensor log_norm = empty(a, {most_runs(view, shape, kind), shape.cols});
  Tensor rows = empty(a, {own_rows ? view.nnz : 0, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const int64_t* y = pointer<int64_t>(labels);
    LabelTerms<T> terms{pointer<T>(a), shape.num_annotators * shape.rows, shape.rows, pointer<T>(weight), y};
    if (own_rows) {
      log_rows(pointer<T>(a), y, index, shape, kind, output<T>(log_norm), output<T>(rows));
      const int64_t used = static_cast<int64_t>(index.runs.size()) - 1;
      std::fill(output<T>(log_norm) + used * shape.cols, output<T>(log_norm) + log_norm.numel(), T(0));
      terms = {pointer<T>(rows), view.nnz, 0, pointer<T>(weight), nullptr};
    }
    const int64_t per_item = view.nnz / std::max<int64_t>(1, view.num_items) + 8;
    parallel_for(0, view.num_items, tasks_per_thread(shape.cols * per_item), [&](int64_t begin, int64_t end) {
      posteriors<T>(terms, view, {pointer<T>(prior), false}, shape.cols, begin, end, output<T>(posterior),
                    output<T>(nll));
    });
    const T total = weighted_sum(pointer<T>(nll), static_cast<const T*>(nullptr), view.num_items);
    *output<T>(loss) = total / static_cast<T>(joint_denominator(view, mean));
  });
  return {loss, nll, posterior, log_norm};
}

std::tuple<Tensor, Tensor> joint_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll,
                                                  const Tensor& log_prior, const Tensor& confusion,
                                                  OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                  const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                  const Tensor& posterior, OptionalTensor log_norm,
                                                  int64_t normalization, bool mean, bool need_log_prior,
                                                  bool need_confusion) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  const auto kind = check_normalization(normalization);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, need_confusion);
  const Index& view = index.view;
  const Tensor a = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  check_like(log_prior, "log_prior", a.scalar_type(), {view.num_items, shape.cols});
  const Tensor s = check_values(posterior, "posterior", a, {view.num_items, shape.cols});
  if (log_norm) log_norm = check_values(*log_norm, "log_norm", a, {most_runs(view, shape, kind), shape.cols});
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  if (grad_loss) grad_loss = check_values(*grad_loss, "grad_loss", a, {});
  if (grad_nll) grad_nll = check_values(*grad_nll, "grad_nll", a, {view.num_items});
  Tensor dlog_prior = empty(a, {view.num_items, shape.cols});
  Tensor dconfusion = empty_gradient(a, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  Tensor rows = empty(a, {need_confusion && is_normalized(kind) ? view.nnz : 0, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const T scale = grad_loss ? *pointer<T>(grad_loss) / static_cast<T>(joint_denominator(view, mean)) : T(0);
    T* dt = output<T>(dlog_prior);
    joint_upstream(pointer<T>(s), view, shape.cols, scale, pointer<T>(grad_nll), dt);
    if (!need_confusion) return;
    joint_confusion(pointer<T>(a), pointer<T>(log_norm), dt, pointer<T>(weight), pointer<int64_t>(labels), index, shape,
                    kind, output<T>(rows), output<T>(dconfusion));
  });
  if (!need_log_prior) dlog_prior = empty(a, {0, shape.cols});
  return {dlog_prior, dconfusion};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) {
  m.impl("joint_link", TORCH_BOX(&joint_link_op));
  m.impl("joint_link_backward", TORCH_BOX(&joint_link_backward_op));
}

}  // namespace crowdnal::cpu
