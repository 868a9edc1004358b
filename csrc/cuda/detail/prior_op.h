// The prior of a step's op, behind what the links make.
#pragma once

#include "cuda/detail/op.h"
#include "cuda/detail/prior.cuh"

namespace crowdnal::cuda {

// The tensors that ops with a prior take beside those of their links.
struct PriorArguments {
  OptionalTensor counts, common, labels_given;
};

// Adds what a prior adds to the loss and, if it is needed, to the gradient of the matrices, whose rows are softmax (the
// softmax link), or that are normalised as `kind` says (the mixture link). nll [nnz]: what the loss sums.
inline void add_prior(const PriorArguments& prior, const Tensor& confusion, std::optional<Normalization> kind,
                      const OptionalTensor& weight, const Tensor& indptr, const Tensor& item, const Tensor& annotator,
                      const Tensor& order, const OptionalTensor& plan, bool mean, bool need_confusion,
                      const Tensor& nll, Tensor& loss, Tensor& dconfusion) {
  STD_TORCH_CHECK(prior.labels_given || !prior.counts, "crowdnal: prior needs labels_given");
  if (!prior.counts && !prior.common && !prior.labels_given) return;
  const Shape shape = shape_of(confusion);
  Op op(confusion);
  const Index index = op.index(indptr, item, annotator, order, plan);
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const Prior<T> given{op.values<T>(prior.counts, "prior", {shape.rows, shape.cols}),
                         op.values<T>(prior.common, "common", {shape.rows, shape.cols}),
                         op.values<T>(prior.labels_given, "labels_given", {shape.num_annotators})};
    if (!given.counts) return;
    add_prior(op, op.matrices<E>(confusion), kind, given, op.values<T>(weight, "weight", {index.nnz}), index, shape,
              mean, pointer<T>(nll), output<T>(loss), output_if<T>(need_confusion, dconfusion));
  });
}

}  // namespace crowdnal::cuda
