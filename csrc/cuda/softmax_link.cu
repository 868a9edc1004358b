// The softmax link: launchers and bindings.
#include "cuda/softmax_link.cuh"

#include "cuda/detail/prior_op.h"
#include "cuda/softmax_step.cuh"

namespace crowdnal::cuda {

#define CROWDNAL_TEMPLATE extern template
#include "cuda/detail/mix_instances.h"

namespace {

using Tensors3 = std::tuple<Tensor, Tensor, Tensor>;
using Tensors4 = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Tensors6 = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class T, class E>
MixInput<T, E> input_of(Op& op, const Tensor& scores, const Tensor& confusion, const OptionalTensor& shared,
                        const OptionalTensor& mixing, const int64_t* labels, const Index& index, const Shape& shape) {
  STD_TORCH_CHECK(shared || !mixing, "crowdnal: mixing needs shared");
  return {op.values<T>(scores, "scores", {index.num_items, shape.rows}),
          op.matrices<E>(confusion),
          {op.values<T>(shared, "shared", {index.num_items, shape.cols}), op.values<T>(mixing, "mixing", {index.nnz}),
           labels}};
}

// Where the gradients go, with 0 rows what is not needed.
struct Gradients {
  Tensor scores, confusion, shared, mixing;
  bool need_scores, need_confusion, need_shared, need_mixing;

  Gradients(const Op& op, const Index& index, const Shape& shape, bool need_scores, bool need_confusion,
            bool need_shared, bool need_mixing)
      : scores(op.empty({need_scores ? index.num_items : 0, shape.rows})),
        confusion(op.empty({need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols})),
        shared(op.empty({need_shared ? index.num_items : 0, shape.cols})),
        mixing(op.empty({need_mixing ? index.nnz : 0})), need_scores(need_scores), need_confusion(need_confusion),
        need_shared(need_shared), need_mixing(need_mixing) {}

  template <class T>
  SoftmaxLinkGrads<T> pointers() {
    return {output_if<T>(need_scores, scores), output_if<T>(need_confusion, confusion),
            output_if<T>(need_shared, shared), output_if<T>(need_mixing, mixing)};
  }
};

Tensors3 softmax_link_op(const Tensor& scores, const Tensor& confusion, OptionalTensor shared, OptionalTensor mixing,
                         OptionalTensor weight, const Tensor& indptr, const Tensor& item, const Tensor& annotator,
                         const Tensor& order, OptionalTensor plan, const Tensor& label, bool mean) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);
  const Index index = op.index(indptr, item, annotator, order, plan);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Tensor loss = op.empty({}), nll = op.empty({index.nnz}), probs = op.empty({index.nnz, shape.cols});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const auto input = input_of<T, E>(op, scores, confusion, shared, mixing, labels, index, shape);
    softmax_link(op, input, op.values<T>(weight, "weight", {index.nnz}), index, shape, mean, output<T>(loss),
                 output<T>(nll), output<T>(probs));
  });
  return {loss, nll, probs};
}

// `upstream`: the gradient for the loss where there is no grad_loss.
Tensors4 gradients(double upstream, OptionalTensor grad_loss, OptionalTensor grad_nll, const Tensor& scores,
                   const Tensor& confusion, OptionalTensor shared, OptionalTensor mixing, OptionalTensor weight,
                   const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
                   OptionalTensor plan, const Tensor& label, const Tensor& probs, bool mean, bool need_scores,
                   bool need_confusion, bool need_shared, bool need_mixing) {
  STD_TORCH_CHECK(shared || !need_mixing, "crowdnal: mixing needs shared");
  Op op(confusion);
  const Shape shape = shape_of(confusion);
  const Index index = op.index(indptr, item, annotator, order, plan);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Gradients to(op, index, shape, need_scores, need_confusion, need_shared, need_mixing);
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, index.nnz) : 1);
    const GradRows<T> grad{op.values<T>(probs, "probs", {index.nnz, shape.cols}),
                           shape.cols,
                           labels,
                           op.values<T>(weight, "weight", {index.nnz}),
                           op.values<T>(grad_nll, "grad_nll", {index.nnz}),
                           op.values<T>(grad_loss, "grad_loss", {}),
                           count,
                           static_cast<T>(upstream) / count};
    const auto input = input_of<T, E>(op, scores, confusion, shared, mixing, labels, index, shape);
    softmax_link_backward(op, grad, input, index, shape, to.pointers<T>());
  });
  return {to.scores, to.confusion, to.shared, to.mixing};
}

Tensors4 softmax_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll, const Tensor& scores,
                                  const Tensor& confusion, OptionalTensor shared, OptionalTensor mixing,
                                  OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                  const Tensor& annotator, const Tensor& order, OptionalTensor plan,
                                  const Tensor& label, const Tensor& probs, bool mean, bool need_scores,
                                  bool need_confusion, bool need_shared, bool need_mixing) {
  return gradients(0, grad_loss, grad_nll, scores, confusion, shared, mixing, weight, indptr, item, annotator, order,
                   plan, label, probs, mean, need_scores, need_confusion, need_shared, need_mixing);
}

// One pass where matrices are small, else the two ops one after the other.
Tensors6 link_and_gradients(const Tensor& scores, const Tensor& confusion, OptionalTensor shared, OptionalTensor mixing,
                            OptionalTensor weight, const Tensor& indptr, const Tensor& item, const Tensor& annotator,
                            const Tensor& order, OptionalTensor plan, const Tensor& label, bool mean, bool need_scores,
                            bool need_confusion, bool need_shared, bool need_mixing) {
  const Shape shape = shape_of(confusion);
  if (!fits_step(shape)) {
    auto [loss, nll, probs] = softmax_link_op(scores, confusion, shared, mixing, weight, indptr, item, annotator, order,
                                              plan, label, mean);
    auto [dscores, dconfusion, dshared, dmixing] = gradients(1, std::nullopt, std::nullopt, scores, confusion, shared,
                                                             mixing, weight, indptr, item, annotator, order, plan,
                                                             label, probs, mean, need_scores, need_confusion,
                                                             need_shared, need_mixing);
    return {loss, nll, dscores, dconfusion, dshared, dmixing};
  }
  STD_TORCH_CHECK(shared || !need_shared, "crowdnal: need_shared needs shared");
  STD_TORCH_CHECK(mixing || !need_mixing, "crowdnal: need_mixing needs mixing");
  Op op(confusion);
  const Index index = op.index(indptr, item, annotator, order, plan);
  const int64_t* labels = op.longs(label, "label", index.nnz);
  Tensor loss = op.empty({}), nll = op.empty({index.nnz});
  Gradients to(op, index, shape, need_scores, need_confusion, need_shared, need_mixing);
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const auto input = input_of<T, E>(op, scores, confusion, shared, mixing, labels, index, shape);
    softmax_step(op, input, op.values<T>(weight, "weight", {index.nnz}), index, shape, mean, output<T>(loss),
                 output<T>(nll), to.pointers<T>());
  });
  return {loss, nll, to.scores, to.confusion, to.shared, to.mixing};
}

Tensors6 softmax_link_step_op(const Tensor& scores, const Tensor& confusion, OptionalTensor shared,
                              OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                              const Tensor& annotator, const Tensor& order, OptionalTensor plan, const Tensor& label,
                              OptionalTensor prior, OptionalTensor common, OptionalTensor labels_given, bool mean,
                              bool need_scores, bool need_confusion, bool need_shared, bool need_mixing) {
  STD_TORCH_CHECK(shared || !common, "crowdnal: common needs shared on CUDA");
  Tensors6 out = link_and_gradients(scores, confusion, shared, mixing, weight, indptr, item, annotator, order, plan,
                                    label, mean, need_scores, need_confusion, need_shared, need_mixing);
  add_prior({prior, common, labels_given}, confusion, std::nullopt, weight, indptr, item, annotator, order, plan, mean,
            need_confusion, std::get<1>(out), std::get<0>(out), std::get<3>(out));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) {
  m.impl("softmax_link", TORCH_BOX(&softmax_link_op));
  m.impl("softmax_link_backward", TORCH_BOX(&softmax_link_backward_op));
  m.impl("softmax_link_step", TORCH_BOX(&softmax_link_step_op));
}

}  // namespace crowdnal::cuda
