// The primitives: launchers and bindings.
#include "cuda/detail/items.cuh"
#include "cuda/mix.cuh"
#include "cuda/detail/op.h"
#include "cuda/detail/outer.cuh"

namespace crowdnal::cuda {

#define CROWDNAL_TEMPLATE template
#include "cuda/detail/mix_instances.h"

namespace {

Tensor mix_op(const Tensor& scores, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
              const Tensor& annotator, const Tensor& order, OptionalTensor plan) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);
  const Index index = op.index(indptr, item, annotator, order, plan);
  Tensor out = op.empty({index.nnz, shape.cols});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const MixInput<T, E> input{op.values<T>(scores, "scores", {index.num_items, shape.rows}),
                               op.matrices<E>(confusion)};
    mix(op, input, index, shape, output<T>(out), static_cast<T*>(nullptr));
  });
  return out;
}

Tensor mix_items_op(const Tensor& grad, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
                    const Tensor& annotator, const Tensor& order, OptionalTensor plan) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);
  const Index index = op.index(indptr, item, annotator, order, plan);
  Tensor out = op.empty({index.num_items, shape.rows});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const GradRows<T> rows{op.values<T>(grad, "grad", {index.nnz, shape.cols}), shape.cols};
    mix_items(op, rows, op.matrices<E>(confusion), index, shape, output<T>(out));
  });
  return out;
}

Tensor mix_annotators_op(const Tensor& scores, const Tensor& grad, const Tensor& indptr, const Tensor& item,
                         const Tensor& annotator, const Tensor& order, OptionalTensor plan, int64_t num_annotators) {
  STD_TORCH_CHECK(scores.dim() == 2 && grad.dim() == 2, "crowdnal: scores and grad must have 2 dimensions");
  check_floating(scores, "scores");
  Op op(scores);
  const Shape shape = check_sizes(num_annotators, scores.size(1), grad.size(1), "the classes");
  const Index index = op.index(indptr, item, annotator, order, plan);
  Tensor out = op.empty({num_annotators, shape.rows, shape.cols});
  dispatch(scores, [&](auto zero) {
    using T = decltype(zero);
    const GradRows<T> rows{op.values<T>(grad, "grad", {index.nnz, shape.cols}), shape.cols};
    mix_annotators(op, rows, op.values<T>(scores, "scores", {index.num_items, shape.rows}), index, shape,
                   output<T>(out));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) {
  m.impl("mix", TORCH_BOX(&mix_op));
  m.impl("mix_items", TORCH_BOX(&mix_items_op));
  m.impl("mix_annotators", TORCH_BOX(&mix_annotators_op));
}

}  // namespace crowdnal::cuda
