// Softmax link: nll_n = logsumexp(h_n) - h_n[y_n] with h_n = scores_i W_r (+ shared_i), and its gradients.
#include "cpu/softmax_link.h"

#include "cpu/detail/runs.h"
#include "cpu/detail/spare.h"
#include "cpu/mix.h"

namespace crowdnal::cpu {

SoftmaxArguments check_softmax(const Tensor& scores, const Tensor& confusion, OptionalTensor shared,
                               OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                               const Tensor& annotator, const Tensor& order, const Tensor& label, bool runs) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators,
                                   runs || is_large(stored, shape));
  const Index& view = index.view;
  const Tensor w = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, view.nnz, shape.cols);
  const Tensor z = check_values(scores, "scores", w, {view.num_items, shape.rows});
  if (shared) shared = check_values(*shared, "shared", w, {view.num_items, shape.cols});
  if (mixing) mixing = check_values(*mixing, "mixing", w, {view.nnz});
  STD_TORCH_CHECK(shared || !mixing, "crowdnal: mixing needs shared");
  if (weight) weight = check_values(*weight, "weight", w, {view.nnz});
  return {shape, std::move(index), w, labels, z, shared, mixing, weight};
}

namespace {

std::tuple<Tensor, Tensor, Tensor> softmax_link_op(const Tensor& scores, const Tensor& confusion, OptionalTensor shared,
                                                   OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr,
                                                   const Tensor& item, const Tensor& annotator, const Tensor& order,
                                                   const Tensor& label, bool mean) {
  const SoftmaxArguments a = check_softmax(scores, confusion, shared, mixing, weight, indptr, item, annotator, order,
                                           label, false);
  const Index& view = a.index.view;
  Tensor loss = empty(a.matrices, {}), nll = empty(a.matrices, {view.nnz});
  Tensor probs = empty(a.matrices, {view.nnz, a.shape.cols});
  dispatch(a.matrices, [&](auto zero) {
    using T = decltype(zero);
    mix(a.input<T>(), view, a.index.runs, a.shape, output<T>(probs), output<T>(nll));
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(a.weight), view.nnz);
    *output<T>(loss) = mean ? total / static_cast<T>(std::max<int64_t>(1, view.nnz)) : total;
  });
  return {loss, nll, probs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> softmax_link_backward_op(
    OptionalTensor grad_loss, OptionalTensor grad_nll, const Tensor& scores, const Tensor& confusion,
    OptionalTensor shared, OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
    const Tensor& annotator, const Tensor& order, const Tensor& label, const Tensor& probs, bool mean, bool need_scores,
    bool need_confusion, bool need_shared, bool need_mixing) {
  const SoftmaxArguments a = check_softmax(scores, confusion, shared, mixing, weight, indptr, item, annotator, order,
                                           label, need_confusion);
  const Shape& shape = a.shape;
  const Index& view = a.index.view;
  const Tensor& w = a.matrices;
  const bool large = is_large(w, shape);
  const Tensor softmax = check_values(probs, "probs", w, {view.nnz, shape.cols});
  STD_TORCH_CHECK(shared || !need_mixing, "crowdnal: mixing needs shared");
  if (grad_loss) grad_loss = check_values(*grad_loss, "grad_loss", w, {});
  if (grad_nll) grad_nll = check_values(*grad_nll, "grad_nll", w, {view.nnz});
  Tensor dscores = empty(w, {need_scores ? view.num_items : 0, shape.rows});
  Tensor dconfusion = empty_gradient(w, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  Tensor dshared = empty(w, {need_shared ? view.num_items : 0, shape.cols});
  Tensor dmixing = empty(w, {need_mixing ? view.nnz : 0}), own = empty(w, {need_mixing ? view.nnz : 0, shape.cols});
  Tensor each = empty(w, {large && need_scores ? view.nnz : 0, shape.rows});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1);
    GradRows<T> grad{pointer<T>(softmax), pointer<int64_t>(a.labels), pointer<T>(a.weight), pointer<T>(grad_nll),
                     grad_loss ? *pointer<T>(grad_loss) / count : T(0)};
    if (need_mixing) {
      mix<T>({pointer<T>(a.scores), pointer<T>(w), nullptr, nullptr, nullptr}, view, a.index.runs, shape,
             output<T>(own), nullptr);
      parallel_for(0, view.nnz, tasks_per_thread(shape.cols * 4), [&](int64_t begin, int64_t end) {
        mixing_gradient(grad, pointer<T>(a.shared), pointer<T>(own), view.item, begin, end, shape.cols,
                        output<T>(dmixing));
      });
    }
    grad.mixing = pointer<T>(a.mixing);
    unmix(grad, pointer<T>(a.scores), pointer<T>(w), view, a.index.runs, shape,
          need_scores ? output<T>(dscores) : nullptr, need_confusion ? output<T>(dconfusion) : nullptr,
          output<T>(each));
    grad.share = true;
    if (need_shared) sum_items(grad, view, shape.cols, output<T>(dshared));
  });
  return {dscores, dconfusion, dshared, dmixing};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) {
  m.impl("softmax_link", TORCH_BOX(&softmax_link_op));
  m.impl("softmax_link_backward", TORCH_BOX(&softmax_link_backward_op));
}

}  // namespace crowdnal::cpu
