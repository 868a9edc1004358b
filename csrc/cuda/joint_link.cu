// The joint link and EM: launchers under the schemas of crowdnal/ops.py.
#include "cuda/em_step.cuh"
#include "cuda/op.h"

namespace crowdnal::cuda {
namespace {

using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensors4 joint_link_op(const Tensor& log_prior, const Tensor& confusion, OptionalTensor weight, const Tensor& indptr,
                       const Tensor& item, const Tensor& annotator, const Tensor& order, const Tensor& label,
                       int64_t normalization, bool mean) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);  // rows = observed labels, cols = classes
  const auto kind = static_cast<Normalization>(normalization);
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
  const auto kind = static_cast<Normalization>(normalization);
  const Index index = op.index(indptr, item, annotator, order);
  const int64_t* labels = op.longs(label, "label", index.nnz);
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

Tensors4 em_step_op(OptionalTensor log_prior, const Tensor& log_confusion, OptionalTensor weight, const Tensor& indptr,
                    const Tensor& annotator, OptionalTensor order, const Tensor& label) {
  STD_TORCH_CHECK(order, "crowdnal: em_step on CUDA needs the order of the annotators");
  Op op(log_confusion);
  const Shape shape = shape_of(log_confusion);
  const int64_t nnz = annotator.size(0), num_items = indptr.size(0) - 1;
  STD_TORCH_CHECK(log_prior || shape.rows == shape.cols, "crowdnal: without log_prior the labels must be the classes");
  int64_t* item = op.scratch<int64_t>(nnz);
  const Index index{op.longs(indptr, "indptr", num_items + 1), item, op.longs(annotator, "annotator", nnz),
                    op.longs(*order, "order", nnz), num_items, nnz};
  const int64_t* labels = op.longs(label, "label", nnz);
  const bool shared = log_prior && log_prior->size(0) == 1;
  Tensor loss = op.empty({}), posterior = op.empty({num_items, shape.cols}), totals = op.empty({shape.cols});
  Tensor counts = op.empty({shape.num_annotators, shape.rows, shape.cols});
  dispatch_stored(log_confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    em_step(op, op.values<T>(log_prior, "log_prior", {shared ? 1 : num_items, shape.cols}),
            shared, op.matrices<E>(log_confusion), op.values<T>(weight, "weight", {nnz}), labels, index, item, shape,
            output<T>(loss), output<T>(posterior), output<T>(counts), output<T>(totals));
  });
  return {loss, posterior, counts, totals};
}

Tensor label_log_likelihood_op(const Tensor& log_confusion, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                   const Tensor& annotator, const Tensor& order, const Tensor& label) {
  Op op(log_confusion);
  const Shape shape = shape_of(log_confusion);
  const Index index = op.index(indptr, item, annotator, order);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Tensor out = op.empty({index.num_items, shape.cols});
  dispatch_stored(log_confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const LogConfusion<T, E> rows{op.matrices<E>(log_confusion), shape.num_annotators, shape.rows, shape.cols,
                                  Normalization::kNone, index.annotator, labels, nullptr, nullptr};
    label_log_likelihood(op, rows, op.values<T>(weight, "weight", {index.nnz}), index, shape.cols, output<T>(out));
  });
  return out;
}

Tensor label_counts_op(const Tensor& values, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                 const Tensor& annotator, const Tensor& order, const Tensor& label, int64_t num_annotators,
                 int64_t num_labels) {
  STD_TORCH_CHECK(values.dim() == 2, "crowdnal: values must have 2 dimensions");
  STD_TORCH_CHECK(num_annotators >= 0 && num_labels >= 0, "crowdnal: sizes must not be negative");
  Op op(values);
  const Shape shape{num_annotators, num_labels, values.size(1)};
  const Index index = op.index(indptr, item, annotator, order);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Tensor out = op.empty({num_annotators, num_labels, shape.cols});
  dispatch(values, [&](auto zero) {
    using T = decltype(zero);
    const auto rows = item_rows<T>(op.values<T>(values, "values", {index.num_items, shape.cols}), shape.cols,
                                   index.item, op.values<T>(weight, "weight", {index.nnz}));
    label_counts(op, rows, labels, index, shape, output<T>(out));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) {
  m.impl("joint_link", TORCH_BOX(&joint_link_op));
  m.impl("joint_link_backward", TORCH_BOX(&joint_link_backward_op));
  m.impl("em_step", TORCH_BOX(&em_step_op));
  m.impl("label_log_likelihood", TORCH_BOX(&label_log_likelihood_op));
  m.impl("label_counts", TORCH_BOX(&label_counts_op));
}

}  // namespace crowdnal::cuda
