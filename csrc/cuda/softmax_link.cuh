// Softmax link: nll_n = logsumexp(h_n) - h_n[y_n] with h_n = scores_i W_r (+ shared_i), and its gradients.
#pragma once

#include "cuda/detail/items.cuh"
#include "cuda/mix.cuh"
#include "cuda/detail/outer.cuh"
#include "cuda/detail/reduce.cuh"

namespace crowdnal::cuda {

// probs [nnz, cols], nll [nnz], loss []
template <class T, class E>
void softmax_link(Context& context, const MixInput<T, E>& input, const T* weight, const Index& index,
                  const Shape& shape, bool mean, T* loss, T* nll, T* probs) {
  mix(context, input, index, shape, probs, nll);
  weighted_sum(context, nll, weight, index.nnz, mean ? std::max<int64_t>(1, index.nnz) : 1, loss);
}

// out[n] = row n of `grad` . (shared[item_n] - own[n]), a warp per annotation
template <class T>
__global__ void __launch_bounds__(kThreads)
    mixing_kernel(GradRows<T> grad, const T* shared, const T* own, Index index, T* out) {
  constexpr int kWarps = kThreads / kLanes;
  for (int64_t n = int64_t(blockIdx.x) * kWarps + threadIdx.x / kLanes; n < index.nnz;
       n += int64_t(gridDim.x) * kWarps) {
    const GradRow<T> row = grad.find(n, index.num_items);
    T sum = T(0);
    for (int64_t k = threadIdx.x % kLanes; k < grad.cols; k += kLanes) {
      sum += row[k] * (shared[index.item[n] * grad.cols + k] - own[n * grad.cols + k]);
    }
    sum = group_sum<kLanes>(sum);
    if (threadIdx.x % kLanes == 0) out[n] = sum;
  }
}

// Where the gradients go; null where not wanted.
template <class T>
struct SoftmaxLinkGrads {
  T* scores;     // [B, rows]
  T* confusion;  // [R, rows, cols]
  T* shared;     // [B, cols]
  T* mixing;     // [nnz]
};

// `grad`: the gradient of h [nnz, cols] without mixing; `input` as in the forward.
template <class T, class E>
void softmax_link_backward(Context& context, GradRows<T> grad, const MixInput<T, E>& input, const Index& index,
                           const Shape& shape, const SoftmaxLinkGrads<T>& out) {
  if (out.mixing) {
    T* own = context.template scratch<T>(index.nnz * shape.cols);
    mix(context, MixInput<T, E>{input.scores, input.confusion}, index, shape, own, static_cast<T*>(nullptr));
    launch(context, mixing_kernel<T>, group_blocks<kLanes>(index.nnz), kThreads, 0, grad, input.then.shared, own, index,
           out.mixing);
  }
  grad.mixing = input.then.mixing;
  if (out.scores) mix_items(context, grad, input.confusion, index, shape, out.scores);
  if (out.confusion) mix_annotators(context, grad, input.scores, index, shape, out.confusion);
  grad.share = true;
  if (out.shared) sum_items(context, grad, index, out.shared);
}

}  // namespace crowdnal::cuda
