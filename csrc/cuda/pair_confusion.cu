// The pair confusion: launchers and bindings.
#include "cuda/pair_confusion.cuh"

#include "cuda/detail/op.h"

namespace crowdnal::cuda {
namespace {

template <class T, class E>
Pairs<T, E> pairs_of(Op& op, const Tensor& difficulty, const Tensor& competence, const Index& index,
                     const Tensor& label) {
  const int64_t annotators = competence.size(0), classes = competence.size(1), labels = competence.size(2),
                latents = competence.size(3);
  return {op.stored<E>(difficulty, "difficulty", {index.num_items, classes, labels, latents}),
          op.stored<E>(competence, "competence", {annotators, classes, labels, latents}),
          annotators,
          classes,
          labels,
          latents,
          index,
          op.longs(label, "label", index.nnz)};
}

void check_pairs(const Tensor& competence) {
  check_competence(competence);
  STD_TORCH_CHECK(competence.size(1) * competence.size(2) * competence.size(3) <= INT32_MAX,
                  "crowdnal: competence of an annotator must have fewer than 2^31 elements");
}

std::tuple<Tensor, Tensor> pair_confusion_op(const Tensor& difficulty, const Tensor& competence, const Tensor& indptr,
                                             const Tensor& item, const Tensor& annotator, const Tensor& order,
                                             OptionalTensor plan, const Tensor& label) {
  check_pairs(competence);
  Op op(competence);
  const Index index = op.index(indptr, item, annotator, order, plan);
  Tensor log_q = op.empty({index.nnz, competence.size(1)}), log_norm = op.empty({index.nnz, competence.size(1)});
  dispatch_stored(competence, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    pair_confusion(op, pairs_of<T, E>(op, difficulty, competence, index, label), output<T>(log_q), output<T>(log_norm));
  });
  return {log_q, log_norm};
}

std::tuple<Tensor, Tensor> pair_confusion_backward_op(const Tensor& grad, const Tensor& difficulty,
                                                      const Tensor& competence, const Tensor& indptr,
                                                      const Tensor& item, const Tensor& annotator, const Tensor& order,
                                                      OptionalTensor plan, const Tensor& label, const Tensor& log_q,
                                                      const Tensor& log_norm, bool need_difficulty,
                                                      bool need_competence) {
  check_pairs(competence);
  Op op(competence);
  const Index index = op.index(indptr, item, annotator, order, plan);
  const int64_t classes = competence.size(1), labels = competence.size(2), latents = competence.size(3);
  Tensor ddifficulty = op.empty({need_difficulty ? index.num_items : 0, classes, labels, latents});
  Tensor dcompetence = op.empty({need_competence ? competence.size(0) : 0, classes, labels, latents});
  dispatch_stored(competence, [&](auto zero) {
    using E = decltype(zero);
    using T = Accumulate<E>;
    const PairGrad<T, E> rows{pairs_of<T, E>(op, difficulty, competence, index, label),
                              op.values<T>(grad, "grad", {index.nnz, classes}),
                              op.values<T>(log_q, "log_q", {index.nnz, classes}),
                              op.values<T>(log_norm, "log_norm", {index.nnz, classes})};
    pair_confusion_backward(op, rows, output_if<T>(need_difficulty, ddifficulty),
                            output_if<T>(need_competence, dcompetence));
  });
  return {ddifficulty, dcompetence};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) {
  m.impl("pair_confusion", TORCH_BOX(&pair_confusion_op));
  m.impl("pair_confusion_backward", TORCH_BOX(&pair_confusion_backward_op));
}

}  // namespace crowdnal::cuda
