// Joint link: nll_i = -log sum_k prior_i[k] prod_{n of i} A_r[y_n, k]^w_n, in log space (Dawid & Skene 1979).
#pragma once

#include "cuda/detail/label_counts.cuh"
#include "cuda/label_log_likelihood.cuh"
#include "cuda/detail/posterior.cuh"
#include "cuda/detail/reduce.cuh"

namespace crowdnal::cuda {

// log prior_i[k] plus the sum of weight_n log A_r[y_n, k]
template <class T, class Rows>
struct JointTerm {
  const T* prior;  // [B, classes], or one row for all items
  bool shared;
  const T* weight;  // [nnz] or null
  Index index;
  Rows rows;
  int64_t alignment_bits() const { return rows.alignment_bits() | cuda::alignment_bits(0, prior); }
  // In one walk along the annotations.
  template <int V, int kPieces>
  __device__ void load(int64_t i, int64_t k, int64_t step, T* to) const {
    sum_terms<V, kPieces>(rows, weight, index, i, k, step, to);
    for (int j = 0; j < kPieces; ++j) {
      if (k + j * step >= rows.classes) continue;
      T own[V];
      cuda::load<V>(prior + (shared ? 0 : i * rows.classes) + k + j * step, own);
      for (int v = 0; v < V; ++v) to[j * V + v] += own[v];
    }
  }
};

// 0 without annotations.
template <class T>
struct ItemNegativeLog {
  T* nll;
  const int64_t* indptr;
  __device__ void operator()(int64_t i, T log_sum) const { nll[i] = indptr[i] < indptr[i + 1] ? -log_sum : T(0); }
};

// posterior [B, classes], nll [B], loss [], log_norm [min(nnz, R), classes] ([0, classes] for kNone)
template <class T, class E>
void joint_link(Context& context, const T* log_prior, bool shared, const E* confusion, const T* weight,
                const int64_t* label, const Index& index, const Shape& shape, Normalization kind, bool mean, T* loss,
                T* nll, T* posterior, T* log_norm) {
  with_normalized(context, confusion, label, index, shape, kind, log_norm, [&](auto rows) {
    const JointTerm<T, decltype(rows)> term{log_prior, shared, weight, index, rows};
    posteriors(context, term, ItemNegativeLog<T>{nll, index.indptr}, index.num_items, shape.cols, posterior);
  });
  const double* count = mean ? count_annotated(context, index) : nullptr;
  sum_values(context, nll, static_cast<const T*>(nullptr), index.num_items, 1, count, loss);
}

// out[i, k] = -d output / d nll_i posterior[i, k]
template <class T>
__global__ void __launch_bounds__(kThreads)
    joint_grad_kernel(const T* grad_loss, const T* grad_nll, const double* count, const T* posterior, Index index,
                      int64_t classes, T* out) {
  const int64_t size = index.num_items * classes;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < size; e += int64_t(gridDim.x) * kThreads) {
    const int64_t i = Divided(e, classes).quotient;
    const T scale = grad_loss ? (count ? *grad_loss / static_cast<T>(*count > 1 ? *count : 1) : *grad_loss) : T(0);
    const bool annotated = index.indptr[i] < index.indptr[i + 1];
    out[e] = annotated ? -(scale + (grad_nll ? grad_nll[i] : T(0))) * posterior[e] : T(0);
  }
}

template <class T, class E>
void joint_link_backward(Context& context, const T* grad_loss, const T* grad_nll, const E* confusion, const T* weight,
                         const int64_t* label, const T* posterior, const T* log_norm, const Index& index,
                         const Shape& shape, Normalization kind, bool mean, T* log_prior_grad, T* confusion_grad) {
  const int64_t size = index.num_items * shape.cols;
  T* grad = log_prior_grad ? log_prior_grad : context.template scratch<T>(size);
  const double* count = mean ? count_annotated(context, index) : nullptr;
  launch(context, joint_grad_kernel<T>, ceil_div(size, kThreads), kThreads, 0, grad_loss, grad_nll, count, posterior,
         index, shape.cols, grad);
  if (!confusion_grad) return;
  confusion_gradient(context, item_rows<T>(grad, shape.cols, index.item, weight), label, confusion, log_norm, index,
                     shape, kind, confusion_grad);
}

}  // namespace crowdnal::cuda
