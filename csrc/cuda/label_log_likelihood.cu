// The sufficient statistics of the joint link: launchers and bindings.
#include "cuda/label_log_likelihood.cuh"

#include "cuda/detail/label_counts.cuh"
#include "cuda/detail/op.h"

namespace crowdnal::cuda {
namespace {

Tensor label_log_likelihood_op(const Tensor& log_confusion, OptionalTensor weight, const Tensor& indptr,
                               const Tensor& item, const Tensor& annotator, const Tensor& order, OptionalTensor plan,
                               const Tensor& label) {
  Op op(log_confusion);
  const Shape shape = shape_of(log_confusion);
  const Index index = op.index(indptr, item, annotator, order, plan);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Tensor out = op.empty({index.num_items, shape.cols});
  dispatch_stored(log_confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const LogConfusion<T, E> rows{op.matrices<E>(log_confusion),
                                  shape.num_annotators,
                                  shape.rows,
                                  shape.cols,
                                  Normalization::kNone,
                                  index.annotator,
                                  labels,
                                  nullptr,
                                  nullptr};
    label_log_likelihood(op, rows, op.values<T>(weight, "weight", {index.nnz}), index, shape.cols, output<T>(out));
  });
  return out;
}

Tensor label_counts_op(const Tensor& values, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                       const Tensor& annotator, const Tensor& order, OptionalTensor plan, const Tensor& label,
                       int64_t num_annotators, int64_t num_labels) {
  STD_TORCH_CHECK(values.dim() == 2, "crowdnal: values must have 2 dimensions");
  check_floating(values, "values");
  Op op(values);
  const Shape shape = check_sizes(num_annotators, num_labels, values.size(1), "num_labels");
  const Index index = op.index(indptr, item, annotator, order, plan);
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
  m.impl("label_log_likelihood", TORCH_BOX(&label_log_likelihood_op));
  m.impl("label_counts", TORCH_BOX(&label_counts_op));
}

}  // namespace crowdnal::cuda
