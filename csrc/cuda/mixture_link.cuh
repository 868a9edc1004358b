// Mixture link: nll_n = -log sum_k p_i[k] A_r[y_n, k], A_r = a normalised [labels, classes] matrix, in log space.
#pragma once

#include "cuda/detail/label_counts.cuh"
#include "cuda/detail/items.cuh"
#include "cuda/detail/posterior.cuh"
#include "cuda/detail/reduce.cuh"

namespace crowdnal::cuda {

// log p_i[k] A_r[y_n, k]
template <class T, class Rows>
struct MixtureTerm {
  const T* log_probs;   // [B, classes]
  const int64_t* item;  // [nnz]
  int64_t num_items;
  Rows rows;
  int64_t alignment_bits() const { return rows.alignment_bits() | cuda::alignment_bits(0, log_probs); }
  template <int V, int kPieces>
  __device__ void load(int64_t n, int64_t k, int64_t step, T* to) const {
    const int64_t i = item[n];
    CROWDNAL_ASSERT(0 <= i && i < num_items);
    for (int j = 0; j < kPieces; ++j) {
      if (k + j * step >= rows.classes) continue;
      T prior[V];
      cuda::load<V>(log_probs + i * rows.classes + k + j * step, prior);
      rows.template load<V>(n, k + j * step, to + j * V);
      for (int v = 0; v < V; ++v) to[j * V + v] += prior[v];
    }
  }
};

template <class T>
struct NegativeLog {
  T* nll;
  __device__ void operator()(int64_t n, T log_sum) const { nll[n] = -log_sum; }
};

// posterior [nnz, classes], nll [nnz], loss [], log_norm [min(nnz, R), classes] ([0, classes] for kNone)
template <class T, class E>
void mixture_link(Context& context, const T* log_probs, const E* confusion, const T* weight, const int64_t* label,
                  const Index& index, const Shape& shape, Normalization kind, bool mean, T* loss, T* nll, T* posterior,
                  T* log_norm) {
  with_normalized(context, confusion, label, index, shape, kind, log_norm, [&](auto rows) {
    const MixtureTerm<T, decltype(rows)> term{log_probs, index.item, index.num_items, rows};
    posteriors(context, term, NegativeLog<T>{nll}, index.nnz, shape.cols, posterior);
  });
  weighted_sum(context, nll, weight, index.nnz, mean ? std::max<int64_t>(1, index.nnz) : 1, loss);
}

// `grad`: -d output / d nll times the posterior. log_norm: that of the forward, or null to make it again.
template <class T, class E>
void mixture_link_backward(Context& context, const GradRows<T>& grad, const E* confusion, const int64_t* label,
                           const T* log_norm, const Index& index, const Shape& shape, Normalization kind,
                           T* log_probs_grad, T* confusion_grad) {
  if (log_probs_grad) sum_items(context, grad, index, log_probs_grad);
  if (!confusion_grad) return;
  confusion_gradient(context, grad, label, confusion, log_norm, index, shape, kind, confusion_grad);
}

}  // namespace crowdnal::cuda
