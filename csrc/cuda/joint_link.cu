// The joint link: launchers and bindings.
#include "cuda/joint_link.cuh"

#include "cuda/detail/op.h"

namespace crowdnal::cuda {

#define CROWDNAL_TEMPLATE template
#include "cuda/detail/joint_link_instances.h"

namespace {

using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensors4 joint_link_op(const Tensor& log_prior, const Tensor& confusion, OptionalTensor weight, const Tensor& indptr,
                       const Tensor& item, const Tensor& annotator, const Tensor& order, const Tensor& label,
                       int64_t normalization, bool mean) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);  // rows = observed labels, cols = classes
  const auto kind = check_normalization(normalization);
  const Index index = op.index(indptr, item, annotator, order);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Tensor loss = op.empty({}), nll = op.empty({index.num_items}), posterior = op.empty({index.num_items, shape.cols});
  Tensor log_norm = op.empty({most_runs(index, shape, kind), shape.cols});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    joint_link(op, op.values<T>(log_prior, "log_prior", {index.num_items, shape.cols}), false,
               op.matrices<E>(confusion), op.values<T>(weight, "weight", {index.nnz}), labels, index, shape, kind, mean,
               output<T>(loss), output<T>(nll), output<T>(posterior), output<T>(log_norm));
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
  Op op(confusion);
  const Shape shape = shape_of(confusion);
  const auto kind = check_normalization(normalization);
  const Index index = op.index(indptr, item, annotator, order);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  check_like(log_prior, "log_prior", compute_type(confusion.scalar_type()), {index.num_items, shape.cols});
  Tensor dlog_prior = op.empty({need_log_prior ? index.num_items : 0, shape.cols});
  Tensor dconfusion = op.empty({need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    joint_link_backward(op, op.values<T>(grad_loss, "grad_loss", {}),
                        op.values<T>(grad_nll, "grad_nll", {index.num_items}), op.matrices<E>(confusion),
                        op.values<T>(weight, "weight", {index.nnz}), labels,
                        op.values<T>(posterior, "posterior", {index.num_items, shape.cols}),
                        op.values<T>(log_norm, "log_norm", {most_runs(index, shape, kind), shape.cols}), index, shape,
                        kind, mean, output_if<T>(need_log_prior, dlog_prior), output_if<T>(need_confusion, dconfusion));
  });
  return {dlog_prior, dconfusion};
}

// The two ops one after the other.
std::tuple<Tensor, Tensor, Tensor, Tensor> joint_link_step_op(const Tensor& log_prior, const Tensor& confusion,
                                                              OptionalTensor weight, const Tensor& indptr,
                                                              const Tensor& item, const Tensor& annotator,
                                                              const Tensor& order, const Tensor& label,
                                                              int64_t normalization, bool mean, bool need_log_prior,
                                                              bool need_confusion) {
  auto [loss, nll, posterior, log_norm] = joint_link_op(log_prior, confusion, weight, indptr, item, annotator, order,
                                                        label, normalization, mean);
  auto [dlog_prior, dconfusion] = joint_link_backward_op(one_like(loss), std::nullopt, log_prior, confusion, weight,
                                                         indptr, item, annotator, order, label, posterior, log_norm,
                                                         normalization, mean, need_log_prior, need_confusion);
  return {loss, nll, dlog_prior, dconfusion};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) {
  m.impl("joint_link", TORCH_BOX(&joint_link_op));
  m.impl("joint_link_backward", TORCH_BOX(&joint_link_backward_op));
  m.impl("joint_link_step", TORCH_BOX(&joint_link_step_op));
}

}  // namespace crowdnal::cuda
