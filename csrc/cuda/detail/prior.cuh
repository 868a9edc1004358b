// The Dirichlet prior of the rows of annotators' matrices, behind the kernels that make a loss and its gradients: what it
// adds to both, see cpu/detail/prior.h. A block a run of annotations of one annotator.
#pragma once

#include <optional>

#include "common/math.h"
#include "cuda/detail/reduce.cuh"
#include "cuda/detail/runs.cuh"

namespace crowdnal::cuda {

template <class T>
struct Prior {
  const T* counts;        // [rows, cols]
  const T* common;        // the same, or null (0)
  const T* labels_given;  // [R]
};

constexpr int kPriorWarps = kThreads / kLanes;

// Over the threads of a block; every thread gets the result.
template <class T, class Array>
__device__ T block_sum(T v, Array& parts) {
  v = group_sum<kLanes>(v);
  __syncthreads();  // the parts before are read
  if (threadIdx.x % kLanes == 0) parts[threadIdx.x / kLanes] = v;
  __syncthreads();
  T sum = T(0);
  for (int w = 0; w < kPriorWarps; ++w) sum += parts[w];
  return sum;
}

// u of an annotator: the sum of scale weight over their annotations, divided by the labels that they gave.
template <class T, class Array>
__device__ T prior_share(const T* weight, T scale, const T* labels_given, const Index& index, int64_t r, Array& parts) {
  const int64_t first = first_position(index, r), last = first_position(index, r + 1, first);
  double sum = static_cast<double>(last - first);
  if (weight) {
    sum = 0;
    for (int64_t p = first + threadIdx.x; p < last; p += kThreads) {
      sum += static_cast<double>(weight[ordered(index, p).n]);
    }
    sum = block_sum(sum, parts);
  }
  const T given = labels_given[r];
  return scale * static_cast<T>(sum) / (given > T(1) ? given : T(1));
}

template <class T>
__device__ T prior_constant(T count, T strength) {
  return count == T(0) ? T(0) : std::log(count / strength);
}

// Rows softmax(W_r + common): a warp a row.                                                    value: [runs.most]
template <class T, class E>
__global__ void __launch_bounds__(kThreads)
    prior_of_rows_kernel(const E* confusion, Prior<T> prior, const T* weight, T scale, Index index, Shape shape,
                         Runs runs, T* value, T* grad) {
  CROWDNAL_SHARED(double, parts, kPriorWarps);
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  for (int64_t run = blockIdx.x; run < runs.most; run += gridDim.x) {
    const int64_t r = runs.annotator[run];
    if (r < 0) {
      if (threadIdx.x == 0) value[run] = T(0);
      continue;
    }
    const T u = prior_share(weight, scale, prior.labels_given, index, r, parts);
    double distance = 0;
    for (int64_t c = warp; c < shape.rows; c += kPriorWarps) {
      const E* row = confusion + r * shape.matrix() + c * shape.cols;
      const T* counts = prior.counts + c * shape.cols;
      const T* common = prior.common ? prior.common + c * shape.cols : nullptr;
      const auto at = [&](int64_t k) { return common ? T(row[k]) + common[k] : T(row[k]); };
      T highest = -INFINITY, strength = T(0), sum = T(0);
      for (int64_t k = lane; k < shape.cols; k += kLanes) {
        highest = at(k) > highest ? at(k) : highest;
        strength += counts[k];
      }
      highest = group_max<kLanes>(highest);
      strength = group_sum<kLanes>(strength);
      const T shift = highest == T(-INFINITY) ? T(0) : highest;
      for (int64_t k = lane; k < shape.cols; k += kLanes) {
        sum += std::exp(at(k) - shift);
        distance += static_cast<double>(counts[k] * (prior_constant(counts[k], strength) - at(k)));
      }
      sum = group_sum<kLanes>(sum);
      if (lane == 0) distance += static_cast<double>(strength * (std::log(sum) + shift));
      for (int64_t k = lane; grad && k < shape.cols; k += kLanes) {
        grad[r * shape.matrix() + c * shape.cols + k] += u * (strength * (std::exp(at(k) - shift) / sum) - counts[k]);
      }
    }
    distance = block_sum(distance, parts);
    if (threadIdx.x == 0) value[run] = static_cast<T>(static_cast<double>(u) * distance);
  }
}

// Columns of stored values that are normalised: a thread a column.                             value: [runs.most]
template <class T, class E>
__global__ void __launch_bounds__(kThreads)
    prior_of_columns_kernel(const E* confusion, Normalization kind, Prior<T> prior, const T* weight, T scale,
                            Index index, Shape shape, Runs runs, T* value, T* grad) {
  CROWDNAL_SHARED(double, parts, kPriorWarps);
  const bool softplus = kind == Normalization::kSoftplus;
  for (int64_t run = blockIdx.x; run < runs.most; run += gridDim.x) {
    const int64_t r = runs.annotator[run];
    if (r < 0) {
      if (threadIdx.x == 0) value[run] = T(0);
      continue;
    }
    const T u = prior_share(weight, scale, prior.labels_given, index, r, parts);
    double distance = 0;
    for (int64_t k = threadIdx.x; k < shape.cols; k += kThreads) {
      const E* stored = confusion + r * shape.matrix() + k;
      const auto log_f = [&](int64_t y) {
        const T x = T(stored[y * shape.cols]);
        return softplus ? log_softplus(x) : x;
      };
      T highest = -INFINITY, strength = T(0), sum = T(0);
      for (int64_t y = 0; y < shape.rows; ++y) {
        highest = log_f(y) > highest ? log_f(y) : highest;
        strength += prior.counts[y * shape.cols + k];
      }
      const bool plain = kind == Normalization::kNone;
      const T shift = plain || highest == T(-INFINITY) ? T(0) : highest;
      for (int64_t y = 0; !plain && y < shape.rows; ++y) sum += std::exp(log_f(y) - shift);
      const T rest = plain ? T(0) : std::log(sum);
      for (int64_t y = 0; y < shape.rows; ++y) {
        const T count = prior.counts[y * shape.cols + k], log_a = (log_f(y) - shift) - rest;
        distance += static_cast<double>(count * (prior_constant(count, strength) - log_a));
        if (!grad) continue;
        const T slope = softplus ? log_softplus_grad(T(stored[y * shape.cols])) : T(1);
        const T share = plain ? T(0) : strength * std::exp(log_a);
        grad[r * shape.matrix() + y * shape.cols + k] += u * slope * (share - count);
      }
    }
    distance = block_sum(distance, parts);
    if (threadIdx.x == 0) value[run] = static_cast<T>(static_cast<double>(u) * distance);
  }
}

// What a loss sums, and behind that what the prior adds.
template <class T>
struct WithPrior {
  Weighted<T> nll;
  int64_t nnz;
  double count;
  const T* value;
  __device__ double operator()(int64_t n) const {
    return n < nnz ? nll(n) / count : static_cast<double>(value[n - nnz]);
  }
};

// Adds it to the loss, summed anew from nll, and to the gradient of the matrices if that is not null. Without `kind` rows
// are distributions, with it columns are, as they are stored.
template <class T, class E>
void add_prior(Context& context, const E* confusion, std::optional<Normalization> kind, const Prior<T>& prior,
               const T* weight, const Index& index, const Shape& shape, bool mean, const T* nll, T* loss, T* grad) {
  const int64_t count = mean ? std::max<int64_t>(1, index.nnz) : 1;
  const T scale = T(1) / static_cast<T>(count);
  const Runs runs = find_runs(context, index, shape.num_annotators);
  T* value = context.template scratch<T>(runs.most);
  if (kind) {
    launch(context, prior_of_columns_kernel<T, E>, runs.most, kThreads, 0, confusion, *kind, prior, weight, scale,
           index, shape, runs, value, grad);
  } else {
    launch(context, prior_of_rows_kernel<T, E>, runs.most, kThreads, 0, confusion, prior, weight, scale, index, shape,
           runs, value, grad);
  }
  sum_all(context, WithPrior<T>{{nll, weight}, index.nnz, static_cast<double>(count), value}, index.nnz + runs.most, 1,
          nullptr, loss);
}

}  // namespace crowdnal::cuda
