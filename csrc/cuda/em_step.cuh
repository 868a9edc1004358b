// One pass of EM over the annotations: each item's posterior, and what the next M-step needs of it.
#pragma once

#include "cuda/joint_link.cuh"

namespace crowdnal::cuda {

// item[n]: the item that annotation n belongs to
static __global__ void __launch_bounds__(kThreads)
    find_items_kernel(const int64_t* indptr, int64_t num_items, int64_t nnz, int64_t* item) {
  for (int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x; n < nnz; n += int64_t(gridDim.x) * kThreads) {
    int64_t low = 0, high = num_items;  // indptr[low] <= n < indptr[high]
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (indptr[middle] <= n ? low : high) = middle;
    }
    item[n] = low;
  }
}

// The start of EM: the items' shares of the votes, uniform without any.
template <class T>
__global__ void __launch_bounds__(kThreads)
    shares_kernel(const T* weight, const int64_t* label, Index index, int64_t classes, T* posterior) {
  const int64_t size = index.num_items * classes;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < size; e += int64_t(gridDim.x) * kThreads) {
    const Divided at(e, classes);
    const int64_t i = at.quotient;
    T votes = T(0), total = T(0);
    for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) {
      CROWDNAL_ASSERT(0 <= label[n] && label[n] < classes);
      const T w = weight ? weight[n] : T(1);
      votes += label[n] == at.rest ? w : T(0);
      total += w;
    }
    posterior[e] = total > T(0) ? votes / total : T(1) / static_cast<T>(classes);
  }
}

// posterior[i, k] if item i has an annotation of positive weight, else 0
template <class T>
struct Informed {
  const T* posterior;
  int64_t classes;
  const int64_t* indptr;
  const T* weight;
  __device__ double operator()(int64_t i, int64_t k) const {
    T total = T(0);
    for (int64_t n = indptr[i]; n < indptr[i + 1] && !(total > T(0)); ++n) total += weight ? weight[n] : T(1);
    return total > T(0) ? static_cast<double>(posterior[i * classes + k]) : 0.0;
  }
};

struct Partials {
  const double* values;
  int64_t cols;
  __device__ double operator()(int64_t part, int64_t k) const { return values[part * cols + k]; }
};

// out[part, k] = sum of values(i, k) over the part's `per` rows: a block per part and kLanes columns
template <class Values, class Out>
__global__ void __launch_bounds__(256)
    column_sums_kernel(Values values, int64_t count, int64_t cols, int64_t per, Out* out) {
  constexpr int kRows = 256 / kLanes;
  CROWDNAL_SHARED(double, sums, 256);
  const int lane = threadIdx.x % kLanes, way = threadIdx.x / kLanes;
  const int64_t tiles = (cols + kLanes - 1) / kLanes, parts = count > 0 ? (count + per - 1) / per : 1;
  for (int64_t unit = blockIdx.x; unit < parts * tiles; unit += gridDim.x) {
    const int64_t part = unit / tiles, k = unit % tiles * kLanes + lane, first = part * per;
    const int64_t last = first + per < count ? first + per : count;
    double sum = 0;
    for (int64_t i = first + way; k < cols && i < last; i += kRows) sum += values(i, k);
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (way == 0 && k < cols) {
      for (int w = 1; w < kRows; ++w) sum += sums[w * kLanes + lane];
      out[part * cols + k] = static_cast<Out>(sum);
    }
    __syncthreads();
  }
}

template <class T, class Values>
void column_sums(Context& context, const Values& values, int64_t count, int64_t cols, T* out) {
  const int64_t per = std::max<int64_t>(512, ceil_div(count, 1024)), parts = std::max<int64_t>(1, ceil_div(count, per));
  const int64_t tiles = ceil_div(cols, kLanes);
  double* sums = context.template scratch<double>(parts * cols);
  launch(context, column_sums_kernel<Values, double>, parts * tiles, 256, 0, values, count, cols, per, sums);
  launch(context, column_sums_kernel<Partials, T>, tiles, 256, 0, Partials{sums, cols}, parts, cols, parts, out);
}

// `item` [nnz] is written here; `order` must be there. log_prior null: the start.
// posterior [N, classes], counts [R, labels, classes], totals [classes], loss []
template <class T, class E>
void em_step(Context& context, const T* log_prior, bool shared, const E* log_confusion, const T* weight,
             const int64_t* label, const Index& index, int64_t* item, const Shape& shape, T* loss, T* posterior,
             T* counts, T* totals) {
  const int64_t classes = shape.cols, size = index.num_items * classes;
  launch(context, find_items_kernel, ceil_div(index.nnz, kThreads), kThreads, 0, index.indptr, index.num_items,
         index.nnz, item);
  if (log_prior) {
    joint_link(context, log_prior, shared, log_confusion, weight, label, index, shape, Normalization::kNone, false,
               loss, context.template scratch<T>(index.num_items), posterior, static_cast<T*>(nullptr));
  } else {
    context.zero(loss, 1);
    launch(context, shares_kernel<T>, ceil_div(size, kThreads), kThreads, 0, weight, label, index, classes, posterior);
  }
  label_counts(context, item_rows<T>(posterior, classes, item, weight), label, index, shape, counts);
  column_sums(context, Informed<T>{posterior, classes, index.indptr, weight}, index.num_items, classes, totals);
}

}  // namespace crowdnal::cuda
