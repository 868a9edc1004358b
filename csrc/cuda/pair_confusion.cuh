// Pair confusion of LIA: log_q[n, k] = log_softmax over j of logsumexp_l (D_i + C_r)[k, j, l] at the observed label.
#pragma once

#include "cuda/evidence.cuh"

namespace crowdnal::cuda {

template <class T, class E>
struct Pairs {
  const E* difficulty;  // [B, classes, labels, latents]
  const E* competence;  // [R, classes, labels, latents]
  int64_t num_annotators, classes, labels, latents;
  Index index;
  const int64_t* label;  // [nnz]
  const T* highest_difficulty;  // [B, classes], over labels and latents; 0 where that is -infinity
  const T* highest_competence;  // [R, classes]

  __host__ __device__ int64_t tile() const { return labels * latents; }
  // D_i + C_r less their own maxima, at class k and m = (label, latent).
  __device__ T operator()(int64_t n, int64_t k, int64_t m) const {
    const int64_t i = index.item[n] * classes + k, r = index.annotator[n] * classes + k;
    return (T(difficulty[i * tile() + m]) - highest_difficulty[i]) +
           (T(competence[r * tile() + m]) - highest_competence[r]);
  }
};

constexpr int kPairLanes = 8;  // that share a class of an annotation

// highest[row] = maximum of a row of `width`; 0 where that is -infinity
template <class T, class E>
__global__ void __launch_bounds__(kThreads) highest_kernel(const E* values, int64_t rows, int64_t width, T* highest) {
  constexpr int kGroups = kThreads / kPairLanes;
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < rows; base += int64_t(gridDim.x) * kGroups) {
    const int64_t row = base + threadIdx.x / kPairLanes;
    T most = -INFINITY;
    for (int64_t m = threadIdx.x % kPairLanes; row < rows && m < width; m += kPairLanes) {
      const T v = values[row * width + m];
      most = v > most ? v : most;
    }
    most = group_max<kPairLanes>(most);
    if (row < rows && threadIdx.x % kPairLanes == 0) highest[row] = most == T(-INFINITY) ? T(0) : most;
  }
}

// logsumexp of pairs(n, k, m) for first <= m < last, by kPairLanes lanes; all lanes of the warp take part.
template <class T, class E>
__device__ T pair_log_sum(const Pairs<T, E>& pairs, bool active, int64_t n, int64_t k, int64_t first, int64_t last) {
  T most = -INFINITY, sum = T(0);
  for (int64_t m = first + threadIdx.x % kPairLanes; active && m < last; m += kPairLanes) {
    const T v = pairs(n, k, m);
    most = v > most ? v : most;
  }
  most = group_max<kPairLanes>(most);
  const T shift = most == T(-INFINITY) ? T(0) : most;
  for (int64_t m = first + threadIdx.x % kPairLanes; active && m < last; m += kPairLanes) {
    sum += std::exp(pairs(n, k, m) - shift);
  }
  return shift + std::log(group_sum<kPairLanes>(sum));
}

template <class T, class E>
__global__ void __launch_bounds__(kThreads) pair_kernel(Pairs<T, E> pairs, T* log_q, T* log_norm) {
  constexpr int kGroups = kThreads / kPairLanes;
  const int64_t rows = pairs.index.nnz * pairs.classes;
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < rows; base += int64_t(gridDim.x) * kGroups) {
    const int64_t row = base + threadIdx.x / kPairLanes, n = row / pairs.classes, k = row % pairs.classes;
    const bool active = row < rows;
    const int64_t y = active ? pairs.label[n] : 0;
    if (active) {
      CROWDNAL_ASSERT(0 <= y && y < pairs.labels && 0 <= pairs.index.item[n] &&
                      pairs.index.item[n] < pairs.index.num_items && 0 <= pairs.index.annotator[n] &&
                      pairs.index.annotator[n] < pairs.num_annotators);
    }
    const T all = pair_log_sum(pairs, active, n, k, 0, pairs.tile());
    const T own = pair_log_sum(pairs, active, n, k, y * pairs.latents, (y + 1) * pairs.latents);
    if (active && threadIdx.x % kPairLanes == 0) {
      log_norm[row] = all;
      log_q[row] = all == T(-INFINITY) ? all : own - all;
    }
  }
}

// d output / d pairs(n, k, m)
template <class T, class E>
struct PairGrad {
  Pairs<T, E> pairs;
  const T *grad, *log_q, *log_norm;  // [nnz, classes]

  __device__ static T share(T value, T log_sum) {
    return log_sum == T(-INFINITY) ? T(0) : std::exp(value - log_sum);
  }
  __device__ T operator()(int64_t n, int64_t k, int64_t m) const {
    const int64_t row = n * pairs.classes + k;
    const T value = pairs(n, k, m), g = grad[row];
    const T rest = -g * share(value, log_norm[row]);
    return m / pairs.latents == pairs.label[n] ? rest + g * share(value, log_norm[row] + log_q[row]) : rest;
  }
  // The same with k and m in one number e.
  template <int V>
  __device__ void load(int64_t n, int64_t e, T* to) const {
    for (int v = 0; v < V; ++v) to[v] = (*this)(n, (e + v) / pairs.tile(), (e + v) % pairs.tile());
  }
};

// Fills in the maxima.
template <class T, class E>
Pairs<T, E> with_highest(Context& context, Pairs<T, E> pairs) {
  const int64_t items = pairs.index.num_items * pairs.classes, annotators = pairs.num_annotators * pairs.classes;
  T *first = context.template scratch<T>(items), *second = context.template scratch<T>(annotators);
  launch(context, highest_kernel<T, E>, group_blocks<kPairLanes>(items), kThreads, 0, pairs.difficulty, items, pairs.tile(),
         first);
  launch(context, highest_kernel<T, E>, group_blocks<kPairLanes>(annotators), kThreads, 0, pairs.competence, annotators,
         pairs.tile(), second);
  pairs.highest_difficulty = first;
  pairs.highest_competence = second;
  return pairs;
}

// log_q, log_norm: [nnz, classes]
template <class T, class E>
void pair_confusion(Context& context, const Pairs<T, E>& pairs, T* log_q, T* log_norm) {
  launch(context, pair_kernel<T, E>, group_blocks<kPairLanes>(pairs.index.nnz * pairs.classes), kThreads, 0,
         with_highest(context, pairs), log_q, log_norm);
}

template <class T, class E>
void pair_confusion_backward(Context& context, PairGrad<T, E> grad, T* difficulty_grad, T* competence_grad) {
  grad.pairs = with_highest(context, grad.pairs);
  const Pairs<T, E>& pairs = grad.pairs;
  if (difficulty_grad) {
    evidence(context, grad, static_cast<const T*>(nullptr), pairs.index, pairs.classes * pairs.tile(), difficulty_grad);
  }
  if (competence_grad) {
    sum_annotators(context, grad, pairs.index, Shape{pairs.num_annotators, pairs.classes, pairs.tile()},
                   competence_grad);
  }
}

}  // namespace crowdnal::cuda
