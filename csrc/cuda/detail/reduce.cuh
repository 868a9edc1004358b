// Sums of many numbers: parts of a fixed size, in double precision, added in their order.
#pragma once

#include "cuda/detail/rows.cuh"

namespace crowdnal::cuda {

constexpr int kSumThreads = 256;

// out[part] = sum of values(n) over the part's `per` numbers, divided by `divisor` and, if it is given, by max(1, *by).
template <class Values, class Out>
__global__ void __launch_bounds__(kSumThreads)
    sum_kernel(Values values, int64_t count, int64_t per, double divisor, const double* by, Out* out) {
  constexpr int kWarps = kSumThreads / kLanes;
  CROWDNAL_SHARED(double, sums, kWarps);
  const int64_t parts = count > 0 ? (count + per - 1) / per : 1;
  for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    const int64_t first = part * per, last = first + per < count ? first + per : count;
    double sum = 0;
    for (int64_t n = first + threadIdx.x; n < last; n += kSumThreads) sum += values(n);
    sum = group_sum<kLanes>(sum);
    if (threadIdx.x % kLanes == 0) sums[threadIdx.x / kLanes] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < kWarps; ++w) sum += sums[w];
      out[part] = static_cast<Out>(sum / divisor / (by && *by > 1 ? *by : 1.0));
    }
    __syncthreads();
  }
}

template <class T>
struct Weighted {
  const T* values;
  const T* weight;  // or null (1)
  __device__ double operator()(int64_t n) const {
    return static_cast<double>(weight ? weight[n] * values[n] : values[n]);
  }
};

// 1 for an item with annotations.
struct Annotated {
  const int64_t* indptr;
  __device__ double operator()(int64_t i) const { return indptr[i] < indptr[i + 1] ? 1.0 : 0.0; }
};

// *out = sum of values(n) / divisor / max(1, *by); 0 for none.
template <class Values, class Out>
void sum_all(Context& context, const Values& values, int64_t count, int64_t divisor, const double* by, Out* out) {
  const int64_t per = std::max<int64_t>(8192, ceil_div(count, 1024)), parts = ceil_div(count, per);
  const double whole = static_cast<double>(divisor);
  if (parts <= 1) {
    launch(context, sum_kernel<Values, Out>, 1, kSumThreads, 0, values, count, per, whole, by, out);
    return;
  }
  double* sums = context.template scratch<double>(parts);
  launch(context, sum_kernel<Values, double>, parts, kSumThreads, 0, values, count, per, 1.0,
         static_cast<const double*>(nullptr), sums);
  launch(context, sum_kernel<Weighted<double>, Out>, 1, kSumThreads, 0, Weighted<double>{sums, nullptr}, parts, parts,
         whole, by, out);
}

template <class T>
void sum_values(Context& context, const T* values, const T* weight, int64_t count, int64_t divisor, const double* by,
                T* out) {
  sum_all(context, Weighted<T>{values, weight}, count, divisor, by, out);
}

// *out = sum_n weight[n] values[n] / divisor
template <class T>
void weighted_sum(Context& context, const T* values, const T* weight, int64_t count, int64_t divisor, T* out) {
  sum_values(context, values, weight, count, divisor, static_cast<const double*>(nullptr), out);
}

// How many items have annotations, on the device.
inline const double* count_annotated(Context& context, const Index& index) {
  double* out = context.scratch<double>(1);
  sum_all(context, Annotated{index.indptr}, index.num_items, 1, nullptr, out);
  return out;
}

}  // namespace crowdnal::cuda
