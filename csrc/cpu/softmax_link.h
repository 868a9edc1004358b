// What the ops of the softmax link share: their arguments, checked.
#pragma once

#include "cpu/detail/tensors.h"

namespace crowdnal::cpu {

// Owns what `input` points to.
struct SoftmaxArguments {
  Shape shape;
  CheckedIndex index;
  Tensor matrices, labels, scores;  // matrices: contiguous, in the precision of the computation
  OptionalTensor shared, mixing, weight;

  template <class T>
  MixInput<T> input() const {
    return {pointer<T>(scores), pointer<T>(matrices), pointer<T>(shared), pointer<T>(mixing), pointer<int64_t>(labels)};
  }
};

// `runs`: the kernel walks the annotators whatever the size of their matrices.
SoftmaxArguments check_softmax(const Tensor& scores, const Tensor& confusion, OptionalTensor shared,
                               OptionalTensor mixing, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                               const Tensor& annotator, const Tensor& order, OptionalTensor plan, const Tensor& label,
                               bool runs);

}  // namespace crowdnal::cpu
