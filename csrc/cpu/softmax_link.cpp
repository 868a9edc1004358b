// Softmax link: nll_n = logsumexp(h_n) - h_n[y_n] with h_n = scores_i W_r (+ shared_i), and its gradients.
#include "cpu/detail/runs.h"
#include "cpu/mix.h"

namespace crowdnal::cpu {
namespace {

std::tuple<Tensor, Tensor, Tensor> softmax_link_op(const Tensor& scores, const Tensor& confusion, OptionalTensor shared,
                                                   OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr,
                                                   const Tensor& item, const Tensor& annotator, const Tensor& order,
                                                   const Tensor& label, bool mean) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, is_large(stored, shape));
  const Index& view = index.view;
  const Tensor w = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, view.nnz, shape.cols);
  const Tensor z = check_values(scores, "scores", w, {view.num_items, shape.rows});
  if (shared) shared = check_values(*shared, "shared", w, {view.num_items, shape.cols});
  if (mixing) mixing = check_values(*mixing, "mixing", w, {view.nnz});
  STD_TORCH_CHECK(shared || !mixing, "crowdnal: mixing needs shared");
  if (weight) weight = check_values(*weight, "weight", w, {view.nnz});
  Tensor loss = empty(w, {}), nll = empty(w, {view.nnz}), probs = empty(w, {view.nnz, shape.cols});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    const MixInput<T> input{pointer<T>(z), pointer<T>(w), pointer<T>(shared), pointer<T>(mixing),
                            pointer<int64_t>(labels)};
    mix(input, view, index.runs, shape, output<T>(probs), output<T>(nll));
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(weight), view.nnz);
    *output<T>(loss) = mean ? total / static_cast<T>(std::max<int64_t>(1, view.nnz)) : total;
  });
  return {loss, nll, probs};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> softmax_link_backward_op(
    OptionalTensor grad_loss, OptionalTensor grad_nll, const Tensor& scores, const Tensor& confusion,
    OptionalTensor shared, OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
    const Tensor& annotator, const Tensor& order, const Tensor& label, const Tensor& probs, bool mean, bool need_scores,
    bool need_confusion, bool need_shared, bool need_mixing) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  const bool large = is_large(stored, shape);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, need_confusion || large);
  const Index& view = index.view;
  const Tensor w = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, view.nnz, shape.cols);
  const Tensor z = check_values(scores, "scores", w, {view.num_items, shape.rows});
  const Tensor softmax = check_values(probs, "probs", w, {view.nnz, shape.cols});
  if (shared) shared = check_values(*shared, "shared", w, {view.num_items, shape.cols});
  if (mixing) mixing = check_values(*mixing, "mixing", w, {view.nnz});
  STD_TORCH_CHECK(shared || !need_mixing, "crowdnal: mixing needs shared");
  if (weight) weight = check_values(*weight, "weight", w, {view.nnz});
  if (grad_loss) grad_loss = check_values(*grad_loss, "grad_loss", w, {});
  if (grad_nll) grad_nll = check_values(*grad_nll, "grad_nll", w, {view.nnz});
  Tensor dscores = empty(w, {need_scores ? view.num_items : 0, shape.rows});
  Tensor dconfusion = empty(w, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  Tensor dshared = empty(w, {need_shared ? view.num_items : 0, shape.cols});
  Tensor dmixing = empty(w, {need_mixing ? view.nnz : 0}), own = empty(w, {need_mixing ? view.nnz : 0, shape.cols});
  Tensor each = empty(w, {large && need_scores ? view.nnz : 0, shape.rows});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1);
    GradRows<T> grad{pointer<T>(softmax), pointer<int64_t>(labels), pointer<T>(weight), pointer<T>(grad_nll),
                     grad_loss ? *pointer<T>(grad_loss) / count : T(0)};
    if (need_mixing) {
      mix<T>({pointer<T>(z), pointer<T>(w), nullptr, nullptr, nullptr}, view, index.runs, shape, output<T>(own),
             nullptr);
      parallel_for(0, view.nnz, tasks_per_thread(shape.cols * 4), [&](int64_t begin, int64_t end) {
        mixing_gradient(grad, pointer<T>(shared), pointer<T>(own), view.item, begin, end, shape.cols,
                        output<T>(dmixing));
      });
    }
    grad.mixing = pointer<T>(mixing);
    unmix(grad, pointer<T>(z), pointer<T>(w), view, index.runs, shape, need_scores ? output<T>(dscores) : nullptr,
          need_confusion ? output<T>(dconfusion) : nullptr, output<T>(each));
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
