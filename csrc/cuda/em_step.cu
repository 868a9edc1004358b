// A pass of EM: launcher and binding.
#include "cuda/em_step.cuh"

#include "cuda/detail/op.h"

namespace crowdnal::cuda {

#define CROWDNAL_TEMPLATE extern template
#include "cuda/detail/joint_link_instances.h"

namespace {

using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Tensors4 em_step_op(OptionalTensor log_prior, const Tensor& log_confusion, OptionalTensor weight, const Tensor& indptr,
                    const Tensor& annotator, OptionalTensor order, const Tensor& label) {
  STD_TORCH_CHECK(order, "crowdnal: em_step on CUDA needs the order of the annotators");
  Op op(log_confusion);
  const Shape shape = shape_of(log_confusion);
  const int64_t nnz = length(annotator, "annotator"), num_items = count_items(indptr);
  STD_TORCH_CHECK(log_prior || shape.rows == shape.cols, "crowdnal: without log_prior the labels must be the classes");
  int64_t* item = op.scratch<int64_t>(nnz);
  const Index index{op.longs(indptr, "indptr", num_items + 1),
                    item,
                    op.longs(annotator, "annotator", nnz),
                    op.longs(*order, "order", nnz),
                    num_items,
                    nnz};
  const int64_t* labels = op.longs(label, "label", nnz);
  const bool shared = log_prior && log_prior->dim() == 2 && log_prior->size(0) == 1;
  Tensor loss = op.empty({}), posterior = op.empty({num_items, shape.cols}), totals = op.empty({shape.cols});
  Tensor counts = op.empty({shape.num_annotators, shape.rows, shape.cols});
  dispatch_stored(log_confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    em_step(op, op.values<T>(log_prior, "log_prior", {shared ? 1 : num_items, shape.cols}), shared,
            op.matrices<E>(log_confusion), op.values<T>(weight, "weight", {nnz}), labels, index, item, shape,
            output<T>(loss), output<T>(posterior), output<T>(counts), output<T>(totals));
  });
  return {loss, posterior, counts, totals};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) { m.impl("em_step", TORCH_BOX(&em_step_op)); }

}  // namespace crowdnal::cuda
