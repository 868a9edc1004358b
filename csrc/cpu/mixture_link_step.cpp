// The mixture link and its gradients for an upstream of 1 in one pass: a matrix is activated once for both.
#include "cpu/detail/prior.h"
#include "cpu/detail/spare.h"
#include "cpu/mix.h"
#include "cpu/mixture_link.h"

namespace crowdnal::cpu {
namespace {

// Values of a matrix up to this size are kept from its normalisation to its gradient; those of a larger one would leave
// the cache, and are made twice.
constexpr int64_t kKept = 1 << 17;

template <class T>
void step_large(const MixtureInput<T>& in, const StepScale<T>& scale, const Index& index, const Runs& runs,
                const Shape& shape, int64_t run, int64_t end, const StepOut<T>& out, Prior<T>& prior) {
  const MatricesOut<T> place{out.confusion, index, runs, shape};
  const bool keep = out.confusion && shape.matrix() <= kKept, softplus = in.kind == Normalization::kSoftplus;
  const int64_t classes = shape.cols;
  std::vector<T> norm(classes), apart, values(keep ? shape.matrix() : 0), slopes(keep && softplus ? shape.matrix() : 0);
  for (; run < end; ++run) {
    const T* matrix = in.confusion + place.annotator(run) * shape.matrix();
    bool good = true;
    if (in.kind != Normalization::kNone) {
      good = log_norms<T>(matrix, shape.rows, classes, in.kind, norm.data(), keep ? values.data() : nullptr,
                          keep && softplus ? slopes.data() : nullptr, &apart);
    }
    for (int64_t p = runs[run]; p < runs[run + 1]; ++p) {
      const int64_t n = index.order[p];
      T* g = out.each + n * classes;
      out.nll[n] = posterior_row(in, index, shape, n, norm.data(), apart, g);
      const T u = -scale.of(n);
      for (int64_t k = 0; k < classes; ++k) g[k] *= u;
    }
    const T *f = keep && good ? values.data() : nullptr, *steep = f && softplus ? slopes.data() : nullptr;
    T* to = out.confusion ? place(run) : nullptr;
    if (to) {
      through_normalization<T>(matrix, norm.data(), {out.each}, in.label, index.order, runs[run], runs[run + 1],
                               shape.rows, classes, in.kind, softplus ? steep : f, to);
    }
    if (!prior) continue;
    const T u = prior.share(scale, index.order, runs[run], runs[run + 1], place.annotator(run));
    prior.value[run] = prior_of_normalized<T>(prior, matrix, norm.data(), apart, f, steep, in.kind, u, to);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> mixture_link_step_op(
    const Tensor& log_probs, const Tensor& confusion, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
    const Tensor& annotator, const Tensor& order, OptionalTensor plan, const Tensor& label, OptionalTensor prior,
    OptionalTensor labels_given, int64_t normalization, bool mean, bool need_log_probs, bool need_confusion) {
  const MixtureArguments a = check_mixture(log_probs, confusion, weight, indptr, item, annotator, order, plan, label,
                                           normalization);
  const Shape& shape = a.shape;
  const Index& view = a.index.view;
  const Tensor& like = a.matrices;
  const PriorArguments given = check_prior(prior, std::nullopt, labels_given, like, shape);
  Tensor loss = empty(like, {}), nll = empty(like, {view.nnz});
  Tensor dlog_probs = empty(like, {need_log_probs ? view.num_items : 0, shape.cols});
  Tensor dconfusion = empty_gradient(like, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  dispatch(like, [&](auto zero) {
    using T = decltype(zero);
    const bool compact = is_small<T>(shape);
    Tensor each = empty(like,
                        {need_log_probs || !compact ? view.nnz : 0, compact ? padded<T>(shape.cols) : shape.cols});
    const StepOut<T> out{output<T>(nll), need_log_probs || !compact ? output<T>(each) : nullptr, nullptr, nullptr,
                         need_confusion ? output<T>(dconfusion) : nullptr};
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1);
    Prior<T> rows(given, shape, 0, static_cast<int64_t>(a.index.runs.size()) - 1);
    const StepScale<T> scale{pointer<T>(a.weight), T(1) / count};
    for_each_share(view, a.index.runs, tasks_of(shape, a.kind), [&](int64_t run, int64_t end) {
      const auto kernel = compact ? mixture_step_small<T> : step_large<T>;
      kernel(a.input<T>(), scale, view, a.index.runs, shape, run, end, out, rows);
    });
    if (need_confusion) MatricesOut<T>{out.confusion, view, a.index.runs, shape}.finish();
    if (need_log_probs) sum_each(pointer<T>(each), compact, view, shape.cols, output<T>(dlog_probs));
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(a.weight), view.nnz);
    *output<T>(loss) = (mean ? total / count : total) + rows.total();
  });
  return {loss, nll, dlog_probs, dconfusion};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) { m.impl("mixture_link_step", TORCH_BOX(&mixture_link_step_op)); }

}  // namespace crowdnal::cpu
