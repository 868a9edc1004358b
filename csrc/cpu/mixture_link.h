// What the ops of the mixture link share: their arguments, checked, and the posterior of an annotation.
#pragma once

#include "cpu/detail/small_mixture.h"
#include "cpu/detail/runs.h"

namespace crowdnal::cpu {

// Owns what `input` points to.
struct MixtureArguments {
  Shape shape;  // rows = observed labels, cols = classes
  CheckedIndex index;
  Tensor matrices, labels, log_probs;  // matrices: contiguous, in the precision of the computation
  OptionalTensor weight;
  Normalization kind;

  template <class T>
  MixtureInput<T> input() const {
    return {pointer<T>(log_probs), pointer<T>(matrices), pointer<int64_t>(labels), kind};
  }
};

MixtureArguments check_mixture(const Tensor& log_probs, const Tensor& confusion, OptionalTensor weight,
                               const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
                               const Tensor& label, int64_t normalization);

inline int64_t tasks_of(const Shape& shape, Normalization kind) {  // an activation is worth about eight multiply-adds
  return tasks_per_thread(kind == Normalization::kNone ? shape.cols * 16 : shape.matrix() * 8);
}

}  // namespace crowdnal::cpu
