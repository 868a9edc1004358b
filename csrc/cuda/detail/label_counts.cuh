// label_counts: rows added up by annotator and label, the adjoint of `label_log_likelihood`, and the gradients of
// confusions that are normalised.
#pragma once

#include "cuda/detail/normalization.cuh"
#include "cuda/detail/small_outer.cuh"

namespace crowdnal::cuda {

// Rows weight_n values[item_n]
template <class T>
GradRows<T> item_rows(const T* values, int64_t cols, const int64_t* item, const T* weight) {
  GradRows<T> rows{values, cols, nullptr, weight};
  rows.item = item;
  return rows;
}

// A thread owns a column of the matrices and adds to them where they lie.
template <class T>
__global__ void __launch_bounds__(kThreads) add_labelled_kernel(GradRows<T> rows, const int64_t* label, Index index,
                                                                Shape shape, Chunks chunks, T* out, T* slots) {
  const int64_t size = shape.rows * shape.cols, tiles = (shape.cols + kThreads - 1) / kThreads;
  rows.fix_scale();
  for (int64_t unit = blockIdx.x; unit < chunks.count * tiles; unit += gridDim.x) {
    const int64_t chunk = unit / tiles, k = unit % tiles * kThreads + threadIdx.x;
    const int64_t first = chunks.begin(chunk), last = chunks.end(chunk, index.nnz);
    if (k >= shape.cols) continue;
    bool in_slot = chunks.in_slot(chunk);
    for (int64_t y = 0; in_slot && y < shape.rows; ++y) slots[chunk * size + y * shape.cols + k] = T(0);
    for (int64_t p = first; p < last; ++p) {
      const int64_t n = index.order[p], r = index.annotator[n], y = label[n];
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators && 0 <= y && y < shape.rows);
      in_slot = in_slot && (p == first || continues(index, p));
      (in_slot ? slots + chunk * size : out + r * size)[y * shape.cols + k] += rows.find(n, index.num_items)[k];
    }
  }
}

// out[r, y, k] = sum_{n of r with label y} row n at k: every element is written, zero without annotations.
template <class T>
void add_labelled(Context& context, const GradRows<T>& rows, const int64_t* label, const Index& index,
                  const Shape& shape, T* out) {
  const int64_t size = shape.matrix(), tiles = ceil_div(shape.cols, kThreads);
  const Chunks chunks = cut(context, index, Chunks::of(index.nnz, tiles, size));
  T* slots = context.template scratch<T>(chunks.count * size);
  context.zero(out, shape.num_annotators * size);
  launch(context, add_labelled_kernel<T>, chunks.count * tiles, kThreads, 0, rows, label, index, shape, chunks, out,
         slots);
  add_slots(context, index, size, chunks, slots, out);
}

constexpr int kMatrixWays = 8, kMatrixThreads = kMatrixWays * kLanes, kMatrixWindow = kMatrixThreads;

// The same, and through the normalization, where matrices are large: each is written once. A block owns kLanes columns
// of an annotator's, a thread every kMatrixWays-th of their elements.
template <class T, class E>
__global__ void __launch_bounds__(kMatrixThreads)
    labelled_matrix_kernel(GradRows<T> rows, const int64_t* label, const E* confusion, const T* log_norm,
                           const int64_t* run, const int64_t* starts, Index index, Shape shape, Normalization kind,
                           T* out) {
  CROWDNAL_SHARED(T, shared, kMatrixThreads);
  CROWDNAL_SHARED(GradRow<T>, found, kMatrixWindow);
  CROWDNAL_SHARED(int, labels, kMatrixWindow);
  const int way = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const int64_t size = shape.rows * shape.cols, tiles = (shape.cols + kLanes - 1) / kLanes;
  rows.fix_scale();
  for (int64_t unit = blockIdx.x; unit < shape.num_annotators * tiles; unit += gridDim.x) {
    const int64_t r = unit / tiles, k = unit % tiles * kLanes + lane, first = starts[r], last = starts[r + 1];
    const bool mine = k < shape.cols, normalised = kind != Normalization::kNone && first < last;
    const auto visit = [&](const auto& body) {  // the annotations, in their order
      for (int64_t window = first; window < last; window += kMatrixWindow) {
        const int count = last - window < kMatrixWindow ? static_cast<int>(last - window) : kMatrixWindow;
        __syncthreads();  // those before are done
        if (static_cast<int>(threadIdx.x) < count) {
          const int64_t n = index.order[window + threadIdx.x];
          CROWDNAL_ASSERT(0 <= label[n] && label[n] < shape.rows);
          found[threadIdx.x] = rows.find(n, index.num_items);
          labels[threadIdx.x] = static_cast<int>(label[n]);
        }
        __syncthreads();
        body(count);
      }
    };
    T column = T(0);
    Norm<T> norm{T(0), T(0)};
    if (normalised) {
      BlockSum<T> sum;
      visit([&](int count) {
        for (int j = way; mine && j < count; j += kMatrixWays) sum.add(GradRow<T>(found[j])[k]);
        sum.close();
      });
      column = join_ways<kMatrixWays>(sum.total, shared, [](T a, T b) { return a + b; });
      if (mine) {
        const T stored = log_norm[run[r] * shape.cols + k];
        norm = norm_of(confusion + r * size + k, shape.rows, shape.cols, kind, stored);
      }
    }
    const E* x = confusion + r * size + k;
    T* to = out + r * size + k;
    for (int64_t y = way; mine && y < shape.rows; y += kMatrixWays * kAhead) {
      T v[kAhead];
      CROWDNAL_UNROLL
      for (int t = 0; t < kAhead; ++t) {
        v[t] = normalised && y + t * kMatrixWays < shape.rows ? T(x[(y + t * kMatrixWays) * shape.cols]) : T(0);
      }
      CROWDNAL_UNROLL
      for (int t = 0; t < kAhead; ++t) {
        if (normalised) v[t] = -std::exp(norm(log_slope(v[t], kind))) * column;
        if (y + t * kMatrixWays < shape.rows) to[(y + t * kMatrixWays) * shape.cols] = v[t];
      }
    }
    visit([&](int count) {
      for (int j = 0; mine && j < count; ++j) {
        const int y = labels[j];
        if (y % kMatrixWays != way) continue;
        const T slope = normalised ? log_value_grad(T(x[y * shape.cols]), kind) : T(1);
        to[y * shape.cols] += slope * GradRow<T>(found[j])[k];
      }
    });
  }
}

// Gradient for the stored confusion [R, labels, classes], from the rows that are the gradients for the annotations' rows
// of log A. log_norm: that of `with_normalized`, or null to make it again. With kNone also the counts of anything.
template <class T, class E>
void confusion_gradient(Context& context, const GradRows<T>& rows, const int64_t* label, const E* confusion,
                        const T* log_norm, const Index& index, const Shape& shape, Normalization kind, T* out) {
  if (shape.num_annotators * shape.matrix() == 0) return;
  const bool compact = small_outer(context, OneHot<T>{label}, rows, index, shape, out);
  // Neither most annotators absent, nor many annotations a label.
  const bool whole = !compact && index.nnz >= shape.num_annotators && index.nnz <= shape.num_annotators * shape.rows;
  if (!compact && !whole) add_labelled(context, rows, label, index, shape, out);
  Runs runs{};
  if (kind != Normalization::kNone) {
    runs = find_runs(context, index, shape.num_annotators);
    if (!log_norm) {
      T* own = context.template scratch<T>(runs.most * shape.cols);
      normalize(context, confusion, shape, runs, kind, own, static_cast<T*>(nullptr));
      log_norm = own;
    }
  }
  if (whole) {
    launch(context, labelled_matrix_kernel<T, E>, shape.num_annotators * ceil_div(shape.cols, kLanes), kMatrixThreads,
           0, rows, label, confusion, log_norm, runs.of, find_starts(context, index, shape.num_annotators), index,
           shape, kind, out);
  } else if (kind != Normalization::kNone) {
    launch(context, normalization_grad_kernel<T, E>, runs.most * ceil_div(shape.cols, kLanes), kColumnThreads, 0,
           confusion, log_norm, shape, runs, kind, out);
  }
}

template <class T>
void label_counts(Context& context, const GradRows<T>& rows, const int64_t* label, const Index& index,
                  const Shape& shape, T* out) {
  confusion_gradient(context, rows, label, static_cast<const T*>(nullptr), static_cast<const T*>(nullptr), index, shape,
                     Normalization::kNone, out);
}

}  // namespace crowdnal::cuda
