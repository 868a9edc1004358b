// Softmax link: nll_n = logsumexp(h_n) - h_n[y_n] with h_n = scores_i W_r (+ shared_i), and its gradients.
#include <cmath>

#include "cpu/kernels.h"
#include "ops.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

std::tuple<Tensor, Tensor, Tensor> softmax_link_op(const Tensor& scores, const Tensor& confusion, OptionalTensor shared,
                                                   OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                   const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                   bool mean) {
  const Tensor w = check_confusion(confusion);
  const Shape shape = shape_of(w);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         by_annotator(shape));
  const Index& view = index.view;
  const Tensor labels = check_labels(label, view.nnz, shape.cols);
  const Tensor z = check_values(scores, "scores", w, {view.num_items, shape.rows});
  if (shared) shared = check_values(*shared, "shared", w, {view.num_items, shape.cols});
  if (weight) weight = check_values(*weight, "weight", w, {view.nnz});
  Tensor loss = torch::stable::new_empty(w, {});
  Tensor nll = torch::stable::new_empty(w, {view.nnz});
  Tensor probs = torch::stable::new_empty(w, {view.nnz, shape.cols});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    const int64_t* y = pointer<int64_t>(labels);
    const auto finish = [&](const int64_t* n, T* const* h, int64_t count) {
      T target[kLanes], log_sum[kLanes];
      for (int64_t j = 0; j < count; ++j) target[j] = h[j][y[n[j]]];
      softmax_rows(h, log_sum, count, shape.cols);
      for (int64_t j = 0; j < count; ++j) output<T>(nll)[n[j]] = log_sum[j] - target[j];
    };
    mix(pointer<T>(z), pointer<T>(w), pointer<T>(shared), output<T>(probs), view, shape, finish);
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(weight), view.nnz);
    *output<T>(loss) = mean ? total / static_cast<T>(std::max<int64_t>(1, view.nnz)) : total;
  });
  return {loss, nll, probs};
}

std::tuple<Tensor, Tensor, Tensor> softmax_link_backward_op(
    OptionalTensor grad_loss, OptionalTensor grad_nll, const Tensor& scores, const Tensor& confusion,
    OptionalTensor, OptionalTensor weight, const Tensor& indptr, const Tensor& item, const Tensor& annotator,
    const Tensor& order, const Tensor& label, const Tensor& probs, bool mean, bool need_scores, bool need_confusion,
    bool need_shared) {
  const Tensor w = check_confusion(confusion);
  const Shape shape = shape_of(w);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         need_confusion || by_annotator(shape));
  const Index& view = index.view;
  const Tensor labels = check_labels(label, view.nnz, shape.cols);
  const Tensor z = check_values(scores, "scores", w, {view.num_items, shape.rows});
  const Tensor softmax = check_values(probs, "probs", w, {view.nnz, shape.cols});
  if (weight) weight = check_values(*weight, "weight", w, {view.nnz});
  if (grad_loss) grad_loss = check_values(*grad_loss, "grad_loss", w, {});
  if (grad_nll) grad_nll = check_values(*grad_nll, "grad_nll", w, {view.nnz});
  Tensor dscores = torch::stable::new_empty(w, {need_scores ? view.num_items : 0, shape.rows});
  Tensor dconfusion = torch::stable::new_zeros(
      w, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  Tensor dshared = torch::stable::new_empty(w, {need_shared ? view.num_items : 0, shape.cols});
  Tensor dh = torch::stable::new_empty(w, {view.nnz, shape.cols});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1);
    const T scale = grad_loss ? *pointer<T>(grad_loss) / count : T(0);
    const T* weights = pointer<T>(weight);
    const T* upstream = pointer<T>(grad_nll);
    const int64_t* y = pointer<int64_t>(labels);
    parallel_for(0, view.nnz, grain(shape.cols * 2), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const T u = (weights ? scale * weights[n] : scale) + (upstream ? upstream[n] : T(0));
        const T* s = pointer<T>(softmax) + n * shape.cols;
        T* g = output<T>(dh) + n * shape.cols;
        for (int64_t k = 0; k < shape.cols; ++k) g[k] = u * s[k];
        g[y[n]] -= u;
      }
    });
    if (need_scores) mix_items(pointer<T>(dh), pointer<T>(w), output<T>(dscores), view, shape);
    if (need_confusion) mix_annotators(pointer<T>(z), pointer<T>(dh), output<T>(dconfusion), view, shape);
    if (need_shared) sum_items(pointer<T>(dh), output<T>(dshared), view, shape.cols);
  });
  return {dscores, dconfusion, dshared};
}

}  // namespace crowdnal::cpu
