// label_counts: rows added up by annotator and label, the adjoint of `label_log_likelihood`, and the gradients of
// confusions that are normalised.
#pragma once

#include <type_traits>

#include "cuda/detail/normalization.cuh"

namespace crowdnal::cuda {

// Rows weight_n values[item_n]
template <class T>
GradRows<T> item_rows(const T* values, int64_t cols, const int64_t* item, const T* weight) {
  GradRows<T> rows{values, cols, nullptr, weight};
  rows.item = item;
  return rows;
}

constexpr int64_t kCountBytes = (48 << 10) - kThreads * 32;  // of shared memory that a block may have for its sums

// A warp per chunk. Groups of G lanes take the annotations by turns and add their rows, a lane per column, where the
// labels say, each group in a matrix of its own in shared memory: [warps, kLanes / G, rows, cols].
template <class T, int G>
__global__ void __launch_bounds__(kThreads, 8)
    count_kernel(GradRows<T> rows, const int64_t* label, Index index, Shape shape, Chunks chunks, T* out, T* slots) {
  constexpr int kWarps = kThreads / kLanes, kGroups = kLanes / G, kAtOnce = 4;
  CROWDNAL_DYNAMIC_SHARED(double, sums);
  CROWDNAL_SHARED(GradRow<T>, found, kThreads);
  CROWDNAL_SHARED(int, labels, kThreads);
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, own = warp * kLanes, group = lane / G;
  const int cols = static_cast<int>(shape.cols), size = static_cast<int>(shape.rows) * cols;
  const int at = warp * kGroups * size;
  rows.fix_scale();
  for (int e = lane; e < kGroups * size; e += kLanes) sums[at + e] = 0;
  for (int64_t chunk = int64_t(blockIdx.x) * kWarps + warp; chunk < chunks.count;
       chunk += int64_t(gridDim.x) * kWarps) {
    const int64_t first = chunks.begin(chunk), last = chunks.end(chunk, index.nnz);
    int64_t owner = owner_at(index, first);
    T* to = chunks.in_slot(chunk) ? slots + chunk * size : out + owner * size;
    const auto write = [&] {
      __syncwarp();  // all groups have added
      for (int e = lane; e < size; e += kLanes) {
        double sum = 0;
        for (int g = 0; g < kGroups; ++g) {
          sum += sums[at + g * size + e];
          sums[at + g * size + e] = 0;
        }
        to[e] = static_cast<T>(sum);
      }
    };
    for (int64_t p = first; p < last; p += kLanes) {
      const int count = last - p < kLanes ? static_cast<int>(last - p) : kLanes;
      const bool mine = lane < count;
      const Ordered found_at = ordered(index, mine ? p + lane : last - 1);
      const int64_t r = found_at.annotator, y = found_at.label_in(label);
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators && 0 <= y && y < shape.rows);
      const int64_t before = __shfl_up_sync(kAll, r, 1);
      const unsigned starts = __ballot_sync(kAll, mine && r != (lane == 0 ? owner : before));
      __syncwarp();  // those before are added
      if (mine) {
        found[threadIdx.x] = rows.find(found_at, index.num_items);
        labels[threadIdx.x] = static_cast<int>(y);
      }
      __syncwarp();
      for (int j = 0; j < count;) {
        if (starts >> j & 1) {
          write();
          __syncwarp();  // all is zero again
          owner = __shfl_sync(kAll, r, j);
          to = out + owner * size;
        }
        const unsigned later = starts & ~((2u << j) - 1);
        const int stop = later ? __ffs(later) - 1 : count;
        for (int m = j + group; m < stop; m += kGroups * kAtOnce) {
          for (int k = lane % G; k < cols; k += G) {
            T got[kAtOnce];
            CROWDNAL_UNROLL
            for (int t = 0; t < kAtOnce; ++t) {
              const int a = m + t * kGroups;
              got[t] = a < stop ? GradRow<T>(found[own + a])[k] : T(0);
            }
            CROWDNAL_UNROLL
            for (int t = 0; t < kAtOnce; ++t) {
              const int a = m + t * kGroups;
              if (a < stop) sums[at + group * size + labels[own + a] * cols + k] += static_cast<double>(got[t]);
            }
          }
        }
        j = stop;
      }
    }
    write();
    __syncwarp();  // all is zero again
  }
}

// Whether a block holds such matrices; if so, and they have elements, every one is written, zero without annotations.
template <class T>
bool count_in_shared(Context& context, const GradRows<T>& rows, const int64_t* label, const Index& index,
                     const Shape& shape, T* out) {
  const int64_t size = shape.matrix();
  const auto bytes = [&](int lanes) { return kThreads / lanes * size * static_cast<int64_t>(sizeof(double)); };
  const auto fits = [&](int lanes) { return shape.cols <= lanes && bytes(lanes) <= kCountBytes; };
  if (bytes(kLanes) > kCountBytes) return false;
  const Chunks chunks = cut(context, index, Chunks::of(index.nnz, 1, size));
  T* slots = context.template scratch<T>(chunks.count * size);
  context.zero(out, shape.num_annotators * size);
  const auto start = [&](auto lanes) {
    launch(context, count_kernel<T, decltype(lanes)::value>, group_blocks<kLanes>(chunks.count), kThreads, bytes(lanes),
           rows, label, index, shape, chunks, out, slots);
  };
  if (fits(4)) {
    start(std::integral_constant<int, 4>{});
  } else if (fits(8)) {
    start(std::integral_constant<int, 8>{});
  } else if (fits(16)) {
    start(std::integral_constant<int, 16>{});
  } else {
    start(std::integral_constant<int, kLanes>{});
  }
  add_slots(context, index, size, chunks, slots, out);
  return true;
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
      const Ordered at = ordered(index, p);
      const int64_t r = at.annotator, y = at.label_in(label);
      CROWDNAL_ASSERT(0 <= r && r < shape.num_annotators && 0 <= y && y < shape.rows);
      in_slot = in_slot && (p == first || continues(index, p));
      (in_slot ? slots + chunk * size : out + r * size)[y * shape.cols + k] += rows.find(at, index.num_items)[k];
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
          const Ordered at = ordered(index, window + threadIdx.x);
          const int y = at.label_in(label);
          CROWDNAL_ASSERT(0 <= y && y < shape.rows);
          found[threadIdx.x] = rows.find(at, index.num_items);
          labels[threadIdx.x] = y;
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
  constexpr int64_t kSmall = 256;  // elements of a matrix
  // Neither most annotators absent, nor many annotations a label.
  const bool whole = shape.matrix() > kSmall && index.nnz >= shape.num_annotators &&
                     index.nnz <= shape.num_annotators * shape.rows;
  if (!whole && !count_in_shared(context, rows, label, index, shape, out)) {
    add_labelled(context, rows, label, index, shape, out);
  }
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
