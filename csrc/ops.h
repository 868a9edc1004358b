// The native ops, as the CPU library registers them. Schemas: crowdnal/ops.py.
#pragma once

#include <optional>
#include <tuple>

#include "cpu/tensors.h"

namespace crowdnal::cpu {

Tensor mix_op(const Tensor& scores, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
              const Tensor& annotator, const Tensor& order);

Tensor mix_items_op(const Tensor& grad, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
                    const Tensor& annotator, const Tensor& order);

Tensor mix_annotators_op(const Tensor& scores, const Tensor& grad, const Tensor& indptr, const Tensor& item,
                         const Tensor& annotator, const Tensor& order, int64_t num_annotators);

Tensor select_op(const Tensor& confusion, const Tensor& annotators);

std::tuple<Tensor, Tensor, Tensor> softmax_link_op(const Tensor& scores, const Tensor& confusion, OptionalTensor shared,
                                                   OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr,
                                                   const Tensor& item, const Tensor& annotator, const Tensor& order,
                                                   const Tensor& label, bool mean);

std::tuple<Tensor, Tensor, Tensor, Tensor> softmax_link_backward_op(
    OptionalTensor grad_loss, OptionalTensor grad_nll, const Tensor& scores, const Tensor& confusion,
    OptionalTensor shared, OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
    const Tensor& annotator, const Tensor& order, const Tensor& label, const Tensor& probs, bool mean, bool need_scores,
    bool need_confusion, bool need_shared, bool need_mixing);

std::tuple<Tensor, Tensor, Tensor, Tensor> mixture_link_op(const Tensor& log_probs, const Tensor& confusion,
                                                           OptionalTensor weight, const Tensor& indptr,
                                                           const Tensor& item, const Tensor& annotator,
                                                           const Tensor& order, const Tensor& label,
                                                           int64_t normalization, bool mean);

std::tuple<Tensor, Tensor> mixture_link_backward_op(
    OptionalTensor grad_loss, OptionalTensor grad_nll, const Tensor& log_probs, const Tensor& confusion,
    OptionalTensor weight, const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
    const Tensor& label, const Tensor& posterior, OptionalTensor log_norm, int64_t normalization, bool mean,
    bool need_log_probs, bool need_confusion);

Tensor label_log_likelihood_op(const Tensor& log_confusion, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                   const Tensor& annotator, const Tensor& order, const Tensor& label);

Tensor label_counts_op(const Tensor& values, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                 const Tensor& annotator, const Tensor& order, const Tensor& label, int64_t num_annotators,
                 int64_t num_labels);

std::tuple<Tensor, Tensor, Tensor, Tensor> em_step_op(OptionalTensor log_prior, const Tensor& log_confusion,
                                                      OptionalTensor weight, const Tensor& indptr,
                                                      const Tensor& annotator, OptionalTensor order,
                                                      const Tensor& label);

std::tuple<Tensor, Tensor, Tensor, Tensor> joint_link_op(const Tensor& log_prior, const Tensor& confusion,
                                                         OptionalTensor weight, const Tensor& indptr,
                                                         const Tensor& item, const Tensor& annotator,
                                                         const Tensor& order, const Tensor& label,
                                                         int64_t normalization, bool mean);

std::tuple<Tensor, Tensor> joint_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll,
                                                  const Tensor& log_prior, const Tensor& confusion,
                                                  OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                  const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                  const Tensor& posterior, OptionalTensor log_norm,
                                                  int64_t normalization, bool mean, bool need_log_prior,
                                                  bool need_confusion);

std::tuple<Tensor, Tensor> pair_confusion_op(const Tensor& difficulty, const Tensor& competence, const Tensor& indptr,
                                             const Tensor& item, const Tensor& annotator, const Tensor& order,
                                             const Tensor& label);

std::tuple<Tensor, Tensor> pair_confusion_backward_op(const Tensor& grad, const Tensor& difficulty,
                                                      const Tensor& competence, const Tensor& indptr,
                                                      const Tensor& item, const Tensor& annotator, const Tensor& order,
                                                      const Tensor& label, const Tensor& log_q, const Tensor& log_norm,
                                                      bool need_difficulty, bool need_competence);

}  // namespace crowdnal::cpu
