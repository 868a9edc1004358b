// Matrices of some annotators: launcher and binding.
#include "cuda/select.cuh"

#include "cuda/detail/op.h"

namespace crowdnal::cuda {
namespace {

Tensor select_op(const Tensor& confusion, const Tensor& annotators) {
  Op op(confusion);
  const Shape shape = shape_of(confusion);
  const int64_t count = length(annotators, "annotators");
  const int64_t* chosen = op.longs(annotators, "annotators", count);
  Tensor out = op.empty_stored({count, shape.rows, shape.cols});
  dispatch_stored(confusion, [&](auto zero) {
    using E = decltype(zero);
    select(op, op.matrices<E>(confusion, false), chosen, count, shape, output<E>(out));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CUDA, m) { m.impl("select", TORCH_BOX(&select_op)); }

}  // namespace crowdnal::cuda
