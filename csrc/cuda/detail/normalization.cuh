// Confusions stored with the observed label outermost, [labels, classes] per annotator: A[y, k] = f(x[y, k]) divided by
// its sum over y, f = exp or softplus; or log A itself is stored (kNone).
#pragma once

#include "common/math.h"
#include "cuda/detail/runs.cuh"

namespace crowdnal::cuda {

template <class T>
__device__ T value(T x, Normalization kind) {
  return kind == Normalization::kSoftplus ? softplus(x) : std::exp(x);
}
template <class T>
__device__ T log_value(T x, Normalization kind) {
  return kind == Normalization::kSoftplus ? log_softplus(x) : x;
}
template <class T>
__device__ T log_value_grad(T x, Normalization kind) {
  return kind == Normalization::kSoftplus ? log_softplus_grad(x) : T(1);
}
// log f'(x): the gradient of log A is f' / f, and that times A is f' divided by the sum.
template <class T>
__device__ T log_slope(T x, Normalization kind) {
  return kind == Normalization::kSoftplus ? log_sigmoid(x) : x;
}

// What a column is divided by: log A = log f - shift - rest, and log_norm = shift + rest.
template <class T>
struct Norm {
  T shift, rest;
  __device__ T operator()(T log_f) const { return (log_f - shift) - rest; }
};

// One number loses what distinguishes the labels where it is large: there (seldom) both are made again from the
// column x.                                                              x: every `classes`-th of labels * classes
constexpr double kFar = 32.0;
template <class T, class E>
__device__ Norm<T> norm_of(const E* x, int64_t labels, int64_t classes, Normalization kind, T log_norm) {
  if (!(log_norm > T(kFar) || log_norm < T(-kFar))) return {T(0), log_norm};
  T highest = -INFINITY, sum = T(0);
  for (int64_t y = 0; y < labels; ++y) {
    const T v = log_value(T(x[y * classes]), kind);
    highest = v > highest ? v : highest;
  }
  const T shift = highest == T(-INFINITY) ? T(0) : highest;
  for (int64_t y = 0; y < labels; ++y) sum += std::exp(log_value(T(x[y * classes]), kind) - shift);
  return {shift, std::log(sum)};
}

// Threads of a block: kLanes columns, kWays labels at a time.
constexpr int kWays = 4;
constexpr int kColumnThreads = kWays * kLanes;

// Sum or maximum over the ways; every thread gets that of its column. Ends with a barrier.
template <int kWaysOfBlock, class T, class Array, class Join>
__device__ T join_ways(T value, Array& shared, const Join& join) {
  shared[threadIdx.x] = value;
  __syncthreads();
  T out = shared[threadIdx.x % kLanes];
  for (int w = 1; w < kWaysOfBlock; ++w) out = join(out, shared[w * kLanes + threadIdx.x % kLanes]);
  __syncthreads();
  return out;
}

// log_norm[run, k] = log sum_y f(x[y, k]); 0 behind the last run.                          log_norm: [runs.most, classes]
// log_a: log A of those present [R, labels, classes], if it is wanted.
template <class T, class E>
__global__ void __launch_bounds__(kColumnThreads)
    log_norms_kernel(const E* confusion, Shape shape, Runs runs, Normalization kind, T* log_norm, T* log_a) {
  CROWDNAL_SHARED(T, shared, kColumnThreads);
  const int way = threadIdx.x / kLanes;
  const int64_t labels = shape.rows, classes = shape.cols, tiles = (classes + kLanes - 1) / kLanes;
  for (int64_t unit = blockIdx.x; unit < runs.most * tiles; unit += gridDim.x) {
    const int64_t run = unit / tiles, k = unit % tiles * kLanes + threadIdx.x % kLanes, r = runs.annotator[run];
    if (r < 0) {
      if (way == 0 && k < classes) log_norm[run * classes + k] = T(0);
      continue;
    }
    const E* x = confusion + r * labels * classes + k;
    // body(kAhead numbers of this thread's, -infinity behind the last), one piece after the other
    const auto visit = [&](const auto& body) {
      for (int64_t y = way; k < classes && y < labels; y += kWays * kAhead) {
        T v[kAhead];
        CROWDNAL_UNROLL
        for (int t = 0; t < kAhead; ++t) v[t] = y + t * kWays < labels ? T(x[(y + t * kWays) * classes]) : T(-INFINITY);
        body(v);
      }
    };
    BlockSum<T> sum;
    visit([&](const T(&v)[kAhead]) {
      CROWDNAL_UNROLL
      for (int t = 0; t < kAhead; ++t) sum.add(value(v[t], kind));
      sum.close();
    });
    T all = std::log(join_ways<kWays>(sum.total, shared, [](T a, T b) { return a + b; }));
    Norm<T> norm{T(0), all};
    const bool apart = k < classes && !(all <= T(kFar) && all >= T(-kFar));  // what was added is too large or too small
    if (__ballot_sync(kAll, apart)) {    // the same in all warps, which have the same columns
      T own = -INFINITY, scaled = T(0);  // maximum, and sum of exponentials of the distances to it
      visit([&](T(&v)[kAhead]) {
        T most = own, part = T(0);
        CROWDNAL_UNROLL
        for (int t = 0; t < kAhead; ++t) {
          v[t] = log_value(v[t], kind);
          most = v[t] > most ? v[t] : most;
        }
        const T shift = most == T(-INFINITY) ? T(0) : most;
        CROWDNAL_UNROLL
        for (int t = 0; t < kAhead; ++t) part += std::exp(v[t] - shift);
        scaled = scaled * std::exp(own - shift) + part;
        own = most;
      });
      const T highest = join_ways<kWays>(own, shared, [](T a, T b) { return b > a ? b : a; });
      const T shift = highest == T(-INFINITY) ? T(0) : highest;
      const T total = join_ways<kWays>(scaled * std::exp(own - shift), shared, [](T a, T b) { return a + b; });
      if (apart) {
        const T rest = std::log(total);
        all = shift + rest;
        norm = all > T(kFar) || all < T(-kFar) ? Norm<T>{shift, rest} : Norm<T>{T(0), all};
      }
    }
    if (way == 0 && k < classes) log_norm[run * classes + k] = all;
    for (int64_t y = way; log_a && k < classes && y < labels; y += kWays) {
      log_a[(r * labels + y) * classes + k] = norm(log_value(T(x[y * classes]), kind));
    }
  }
}

// In place, for the annotators who are present: the gradient for log A becomes that for x, slope (G - A sum_y G) with
// slope = d log f / dx.                                                                      grad: [R, labels, classes]
template <class T, class E>
__global__ void __launch_bounds__(kColumnThreads)
    normalization_grad_kernel(const E* confusion, const T* log_norm, Shape shape, Runs runs, Normalization kind,
                              T* grad) {
  CROWDNAL_SHARED(T, shared, kColumnThreads);
  const int64_t labels = shape.rows, classes = shape.cols, tiles = (classes + kLanes - 1) / kLanes;
  for (int64_t unit = blockIdx.x; unit < runs.most * tiles; unit += gridDim.x) {
    const int64_t run = unit / tiles, k = unit % tiles * kLanes + threadIdx.x % kLanes, r = runs.annotator[run];
    if (r < 0) continue;
    const int64_t first = r * labels * classes + k;
    BlockSum<T> sum;
    int in_block = 0;
    for (int64_t y = threadIdx.x / kLanes; k < classes && y < labels; y += kWays) {
      sum.add(grad[first + y * classes]);
      if (++in_block % kTermBlock == 0) sum.close();
    }
    sum.close();
    const T column = join_ways<kWays>(sum.total, shared, [](T a, T b) { return a + b; });
    if (k >= classes) continue;
    const Norm<T> norm = norm_of(confusion + first, labels, classes, kind, log_norm[run * classes + k]);
    for (int64_t y = threadIdx.x / kLanes; y < labels; y += kWays) {
      const T x = confusion[first + y * classes];
      const T share = std::exp(norm(log_value(x, kind)));
      grad[first + y * classes] = log_value_grad(x, kind) * (grad[first + y * classes] - share * column);
    }
  }
}

// What the rows of log A are made from; `log_norm` is not read for kNone.
template <class T, class E>
struct LogConfusion {
  const E* confusion;  // [R, labels, classes]
  int64_t num_annotators, labels, classes;
  Normalization kind;
  const int64_t* annotator;  // [nnz]
  const int64_t* label;      // [nnz]
  const int64_t* run;        // [R]
  const T* log_norm;         // [runs, classes]

  int64_t alignment_bits() const { return cuda::alignment_bits(classes, confusion, log_norm); }
  template <int V>
  __device__ void load(int64_t n, int64_t k, T* to) const {
    const int64_t r = annotator[n], y = label[n];
    CROWDNAL_ASSERT(0 <= r && r < num_annotators && 0 <= y && y < labels);
    cuda::load<V>(confusion + (r * labels + y) * classes + k, to);
    if (kind == Normalization::kNone) return;
    T norm[V];
    cuda::load<V>(log_norm + run[r] * classes + k, norm);
    for (int v = 0; v < V; ++v) {
      const E* column = confusion + r * labels * classes + k + v;
      to[v] = norm_of(column, labels, classes, kind, norm[v])(log_value(to[v], kind));
    }
  }
};

// log_norm [runs.most, classes], and log_a, if it is wanted.
template <class T, class E>
void normalize(Context& context, const E* confusion, const Shape& shape, const Runs& runs, Normalization kind,
               T* log_norm, T* log_a) {
  launch(context, log_norms_kernel<T, E>, runs.most * ceil_div(shape.cols, kLanes), kColumnThreads, 0, confusion, shape,
         runs, kind, log_norm, log_a);
}

// Rows of log_norm.
inline int64_t most_runs(const Index& index, const Shape& shape, Normalization kind) {
  return kind == Normalization::kNone ? 0 : std::min(index.nnz, shape.num_annotators);
}

// body(rows of log A), the matrices of the batch normalised into log_norm [min(nnz, R), classes], except for kNone.
template <class T, class E, class Body>
void with_normalized(Context& context, const E* confusion, const int64_t* label, const Index& index, const Shape& shape,
                     Normalization kind, T* log_norm, const Body& body) {
  LogConfusion<T, E> rows{confusion, shape.num_annotators, shape.rows, shape.cols,
                          kind,      index.annotator,      label,      nullptr,
                          log_norm};
  if (kind == Normalization::kNone) return body(rows);
  const Runs runs = find_runs(context, index, shape.num_annotators);
  T* log_a = nullptr;  // where a row is read more than once
  if (shape.num_annotators * shape.rows <= index.nnz) {
    log_a = context.template scratch<T>(shape.num_annotators * shape.matrix());
  }
  normalize(context, confusion, shape, runs, kind, log_norm, log_a);
  rows.run = runs.of;
  if (!log_a) return body(rows);
  body(LogConfusion<T, T>{log_a, shape.num_annotators, shape.rows, shape.cols, Normalization::kNone, index.annotator,
                          label, nullptr, log_norm});
}

}  // namespace crowdnal::cuda
