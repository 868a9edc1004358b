// The mixture link with its gradients in one pass over the annotators, where a row of a matrix fits into one or two
// vectors.
#pragma once

#include "cpu/detail/normalization.h"
#include "cpu/detail/small_step.h"

namespace crowdnal::cpu {

template <class T>
struct MixtureInput {
  const T* log_probs;    // [B, classes]
  const T* confusion;    // [R, labels, classes]
  const int64_t* label;  // [nnz]
  Normalization kind;
};

// out = the posterior of annotation n [classes], in log space; returns its nll. log_norm, apart: from `log_norms`.
template <class T>
T posterior_row(const MixtureInput<T>& in, const Index& index, const Shape& shape, int64_t n, const T* log_norm,
                const std::vector<T>& apart, T* out) {
  const T* x = in.confusion + index.annotator[n] * shape.matrix() + in.label[n] * shape.cols;
  log_joint(in.log_probs + index.item[n] * shape.cols, x, log_norm, apart, shape.cols, in.kind, out);
  return -softmax_row(out, shape.cols);
}

// Of `out` nll, each (what the annotation adds to the gradient of its item's log_probs) and confusion, for the annotations
// of the runs run..end-1, and the prior of these.
template <class T>
void mixture_step_small(const MixtureInput<T>& input, const StepScale<T>& scale, const Index& index, const Runs& runs,
                        const Shape& shape, int64_t run, int64_t end, const StepOut<T>& out, Prior<T>& prior);

}  // namespace crowdnal::cpu
