// The mixture link: launchers and bindings.
#include "cuda/mixture_link.cuh"

#include "cuda/detail/prior_op.h"

namespace crowdnal::cuda {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor> mixture_link_op(const Tensor& log_probs, const Tensor& confusion,
                                                           OptionalTensor weight, const Tensor& indptr,
                                                           const Tensor& item, const Tensor& annotator,
                                                           const Tensor& order, OptionalTensor plan,
                                                           const Tensor& label, int64_t normalization, bool mean) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);  // rows = observed labels, cols = classes
  const auto kind = check_normalization(normalization);
  const Index index = op.index(indptr, item, annotator, order, plan);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Tensor loss = op.empty({}), nll = op.empty({index.nnz}), posterior = op.empty({index.nnz, shape.cols});
  Tensor log_norm = op.empty({most_runs(index, shape, kind), shape.cols});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    mixture_link(op, op.values<T>(log_probs, "log_probs", {index.num_items, shape.cols}), op.matrices<E>(confusion),
                 op.values<T>(weight, "weight", {index.nnz}), labels, index, shape, kind, mean, output<T>(loss),
                 output<T>(nll), output<T>(posterior), output<T>(log_norm));
  });
  return {loss, nll, posterior, log_norm};
}

std::tuple<Tensor, Tensor> mixture_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll,
                                                    const Tensor& log_probs, const Tensor& confusion,
                                                    OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                    const Tensor& annotator, const Tensor& order, OptionalTensor plan,
                                                    const Tensor& label, const Tensor& posterior,
                                                    OptionalTensor log_norm, int64_t normalization, bool mean,
                                                    bool need_log_probs, bool need_confusion) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);
  const auto kind = check_normalization(normalization);
  const Index index = op.index(indptr, item, annotator, order, plan);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  check_like(log_probs, "log_probs", compute_type(confusion.scalar_type()), {index.num_items, shape.cols});
  Tensor dlog_probs = op.empty({need_log_probs ? index.num_items : 0, shape.cols});
  Tensor dconfusion = op.empty({need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const GradRows<T> grad{op.values<T>(posterior, "posterior", {index.nnz, shape.cols}),
                           shape.cols,
                           nullptr,
                           op.values<T>(weight, "weight", {index.nnz}),
                           op.values<T>(grad_nll, "grad_nll", {index.nnz}),
                           op.values<T>(grad_loss, "grad_loss", {}),
                           static_cast<T>(mean ? std::max<int64_t>(1, index.nnz) : 1),
                           T(0),
                           T(-1)};
    mixture_link_backward(op, grad, op.matrices<E>(confusion), labels,
                          op.values<T>(log_norm, "log_norm", {most_runs(index, shape, kind), shape.cols}), index, shape,
                          kind, output_if<T>(need_log_probs, dlog_probs), output_if<T>(need_confusion, dconfusion));
  });
  return {dlog_probs, dconfusion};
}

// The two ops one after the other.
std::tuple<Tensor, Tensor, Tensor, Tensor> mixture_link_step_op(
    const Tensor& log_probs, const Tensor& confusion, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
    const Tensor& annotator, const Tensor& order, OptionalTensor plan, const Tensor& label, OptionalTensor prior,
    OptionalTensor labels_given, int64_t normalization, bool mean, bool need_log_probs, bool need_confusion) {
  auto [loss, nll, posterior, log_norm] = mixture_link_op(log_probs, confusion, weight, indptr, item, annotator, order,
                                                          plan, label, normalization, mean);
  auto [dlog_probs, dconfusion] = mixture_link_backward_op(one_like(loss), std::nullopt, log_probs, confusion, weight,
                                                           indptr, item, annotator, order, plan, label, posterior,
                                                           log_norm, normalization, mean, need_log_probs,
                                                           need_confusion);
  add_prior({prior, std::nullopt, labels_given}, confusion, check_normalization(normalization), weight, indptr, item,
            annotator, order, plan, mean, need_confusion, nll, loss, dconfusion);
  return {loss, nll, dlog_probs, dconfusion};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) {
  m.impl("mixture_link", TORCH_BOX(&mixture_link_op));
  m.impl("mixture_link_backward", TORCH_BOX(&mixture_link_backward_op));
  m.impl("mixture_link_step", TORCH_BOX(&mixture_link_step_op));
}

}  // namespace crowdnal::cuda
