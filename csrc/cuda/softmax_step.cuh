// The softmax link and its gradients for an upstream of 1 in one pass over the annotators, for small matrices: that of
// an annotator lies in shared memory from the scores to the gradients, and a lane has an annotation.
#pragma once

#include "cuda/detail/chunks.cuh"
#include "cuda/softmax_link.cuh"

namespace crowdnal::cuda {

// Whether there is such a pass; crowdnal/functional/_autograd/softmax_link.py knows it too.
inline bool fits_step(const Shape& shape) { return shape.rows <= 32 && shape.cols <= 32; }

// Null where not wanted, but for nll. What is summed by items later lies in rows of whole sectors of memory. Where these
// have room nll travels behind W_r g_n, and reaches its place when that is summed: alone it would be half a sector.
template <class T>
struct StepOut {
  T* nll;        // [nnz]
  T* each;       // [nnz, each_width]: W_r g_n, what the annotation adds to the gradient of its item's scores
  T* share;      // [nnz, share_width]: what it adds to that of the shared term
  T* mixing;     // [nnz]
  T* confusion;  // [R, rows, cols]
  int each_width, share_width;
  bool together;  // nll and `each`
};

template <class T>
int whole_sectors(int64_t cols) {
  constexpr int kSector = 32 / sizeof(T);
  return static_cast<int>(ceil_div(cols, kSector)) * kSector;
}

// to[(own + j) stride + d] = table[row_of[own + j], d] for `count` rows of `width`, by a warp: several loads in flight.
template <class T, class Rows, class Array>
__device__ void gather_rows(const T* table, Rows& row_of, int own, int count, int width, int stride, Array& to) {
  constexpr int kAtOnce = 5;
  const int step = kLanes / width, rest = kLanes % width;
  int e = threadIdx.x % kLanes, j = e / width, d = e % width;
  while (e < count * width) {
    T got[kAtOnce];
    int place[kAtOnce];
    CROWDNAL_UNROLL
    for (int t = 0; t < kAtOnce; ++t, e += kLanes) {
      place[t] = j < count ? (own + j) * stride + d : -1;
      if (j < count) got[t] = table[row_of[own + j] * width + d];
      const bool wraps = d + rest >= width;
      j += wraps ? step + 1 : step;
      d += wraps ? rest - width : rest;
    }
    CROWDNAL_UNROLL
    for (int t = 0; t < kAtOnce; ++t) {
      if (place[t] >= 0) to[place[t]] = got[t];
    }
  }
}

// The way back, into rows of `width` whose end, behind `cols`, is zero.
template <class T, class Rows, class Array>
__device__ void scatter_rows(Array& from, Rows& row_of, int own, int count, int cols, int stride, int width, T* table) {
  for (int e = threadIdx.x % kLanes; e < count * width; e += kLanes) {
    const int j = e / width, d = e % width;
    table[row_of[own + j] * width + d] = d < cols ? T(from[(own + j) * stride + d]) : T(0);
  }
}

// Warps of a block, and blocks of a processor: what registers allow.
template <class T, int M>
constexpr int kStepWarps = M <= 16 ? 4 : 8 / sizeof(T);
template <class T, int M>
constexpr int kStepBlocks = (M <= 8 ? 28 : (M <= 16 ? 20 : 24)) / sizeof(T);

// A warp a chunk; matrices of up to M rows and columns, of whose gradient a lane has kDown x kAcross elements.
template <class T, class E, int M, int kDown, int kAcross>
__global__ void __launch_bounds__(kStepWarps<T, M>* kLanes, kStepBlocks<T, M>)
    softmax_step_kernel(MixInput<T, E> in, const T* weight, T scale, Index index, Shape shape, Chunks chunks,
                        StepOut<T> out, T* slots) {
  constexpr int kWarps = kStepWarps<T, M>, kQuads = M / 4, kStride = M + 1;  // one more: rows lie in different banks
  CROWDNAL_SHARED(Quad<T>, matrix, kWarps * M * kQuads);
  CROWDNAL_SHARED(T, left, kWarps * kLanes * kStride);   // the scores, then what goes into `each`
  CROWDNAL_SHARED(T, right, kWarps * kLanes * kStride);  // shared terms, gradients, then what goes into `share`
  CROWDNAL_SHARED(int64_t, number, kWarps* kLanes);
  CROWDNAL_SHARED(int64_t, item, kWarps* kLanes);
  const Epilogue<T>& then = in.then;
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes, own = warp * kLanes, w0 = warp * M * kQuads;
  const int rows = static_cast<int>(shape.rows), cols = static_cast<int>(shape.cols), size = rows * cols;
  const int across = (cols + kAcross - 1) / kAcross, a0 = lane / across * kDown, b0 = lane % across * kAcross;
  const int mine = (own + lane) * kStride;
  for (int64_t chunk = int64_t(blockIdx.x) * kWarps + warp; chunk < chunks.count;
       chunk += int64_t(gridDim.x) * kWarps) {
    const int64_t first = chunks.begin(chunk), last = chunks.end(chunk, index.nnz);
    int64_t owner = owner_at(index, first);
    T* to = nullptr;
    if (out.confusion) to = chunks.in_slot(chunk) ? slots + chunk * size : out.confusion + owner * size;
    bool loaded = false;
    BlockSum<T> sums[kDown * kAcross];
    const auto write = [&] {
      for (int t = 0; t < kDown * kAcross; ++t) {
        const int a = a0 + t / kAcross, b = b0 + t % kAcross;
        if (a < rows && b < cols) to[a * cols + b] = sums[t].total;
        sums[t] = {};
      }
    };
    for (int64_t p = first; p < last; p += kLanes) {
      const int count = last - p < kLanes ? static_cast<int>(last - p) : kLanes;
      const Ordered at = ordered(index, lane < count ? p + lane : last - 1);
      const int y = at.label_in(then.label);
      CROWDNAL_ASSERT(0 <= at.item && at.item < index.num_items && 0 <= y && y < cols);
      CROWDNAL_ASSERT(0 <= at.annotator && at.annotator < shape.num_annotators);
      const int64_t before = __shfl_up_sync(kAll, at.annotator, 1);
      const unsigned starts = __ballot_sync(kAll, lane < count && at.annotator != (lane == 0 ? owner : before));
      const T u = weight ? scale * weight[at.n] : scale, mixing = then.mixing ? then.mixing[at.n] : T(0);
      __syncwarp();  // the batch before is written
      number[own + lane] = at.n;
      item[own + lane] = at.item;
      __syncwarp();
      gather_rows(in.scores, item, own, count, rows, kStride, left);
      if (then.shared) gather_rows(then.shared, item, own, count, cols, kStride, right);
      for (int j = 0; j < count;) {
        if (starts >> j & 1) {
          if (out.confusion) write();
          owner = __shfl_sync(kAll, at.annotator, j);
          if (out.confusion) to = out.confusion + owner * size;
          loaded = false;
        }
        for (int e = lane; !loaded && e < rows * kQuads; e += kLanes) {
          const E* row = in.confusion + owner * size + e / kQuads * cols;
          Quad<T> quad{};
          for (int v = 0; v < 4; ++v) {
            if (const int k = e % kQuads * 4 + v; k < cols) quad.values[v] = T(row[k]);
          }
          matrix[w0 + e] = quad;
        }
        loaded = true;
        __syncwarp();
        const unsigned later = starts & ~((2u << j) - 1);
        const int stop = later ? __ffs(later) - 1 : count;
        const bool active = j <= lane && lane < stop;
        T h[M] = {};
        if (active) {
          for (int c = 0; c < rows; ++c) {
            const T z = left[mine + c];
            CROWDNAL_UNROLL
            for (int q = 0; q < kQuads; ++q) {
              if (q * 4 >= cols) continue;
              const Quad<T> w = matrix[w0 + c * kQuads + q];
              for (int v = 0; v < 4; ++v) h[q * 4 + v] += z * w.values[v];
            }
          }
          T highest = -INFINITY, target = T(0), sum = T(0), along = T(0);
          CROWDNAL_UNROLL
          for (int k = 0; k < M; ++k) {
            if (k >= cols) continue;
            if (then.mixing) {
              const T gap = right[mine + k] - h[k];
              right[mine + k] = gap;
              h[k] += mixing * gap;
            } else if (then.shared) {
              h[k] += right[mine + k];
            }
            highest = h[k] > highest ? h[k] : highest;
            target = k == y ? h[k] : target;
          }
          const T shift = highest == T(-INFINITY) ? T(0) : highest;
          CROWDNAL_UNROLL
          for (int k = 0; k < M; ++k) {
            h[k] = k < cols ? std::exp(h[k] - shift) : T(0);
            sum += h[k];
          }
          const T nll = shift + std::log(sum) - target;
          if (out.together) {
            left[mine + rows] = nll;
          } else {
            out.nll[at.n] = nll;
          }
          const T inverse = sum > T(0) ? T(1) / sum : T(1);
          CROWDNAL_UNROLL
          for (int k = 0; k < M; ++k) {
            h[k] = h[k] * inverse - (k == y ? T(1) : T(0));
            if (then.mixing && k < cols) along += h[k] * right[mine + k];
            if (out.confusion && k < cols) right[mine + k] = u * (T(1) - mixing) * h[k];
          }
          if (out.mixing) out.mixing[at.n] = u * along;
        }
        if (out.confusion) {
          __syncwarp();
          for (int i = j; i < stop; ++i) {
            T z[kDown], g[kAcross];
            for (int t = 0; t < kDown; ++t) z[t] = left[(own + i) * kStride + (a0 + t < rows ? a0 + t : 0)];
            for (int t = 0; t < kAcross; ++t) g[t] = right[(own + i) * kStride + (b0 + t < cols ? b0 + t : 0)];
            for (int t = 0; t < kDown * kAcross; ++t) sums[t].add(z[t / kAcross] * g[t % kAcross]);
          }
          for (int t = 0; t < kDown * kAcross; ++t) sums[t].close();
          __syncwarp();
        }
        for (int c = 0; active && out.each && c < rows; ++c) {
          T part[4] = {};
          CROWDNAL_UNROLL
          for (int q = 0; q < kQuads; ++q) {
            if (q * 4 >= cols) continue;
            const Quad<T> w = matrix[w0 + c * kQuads + q];
            for (int v = 0; v < 4; ++v) part[v] += w.values[v] * h[q * 4 + v];
          }
          left[mine + c] = u * (T(1) - mixing) * ((part[0] + part[1]) + (part[2] + part[3]));
        }
        CROWDNAL_UNROLL
        for (int k = 0; k < M; ++k) {
          if (active && out.share && k < cols) right[mine + k] = (then.mixing ? u * mixing : u) * h[k];
        }
        j = stop;
        __syncwarp();  // the matrix is read, the rows are there
      }
      if (out.each) {
        scatter_rows(left, number, own, count, rows + out.together, kStride, out.each_width, out.each);
      }
      if (out.share) scatter_rows(right, number, own, count, cols, kStride, out.share_width, out.share);
    }
    if (out.confusion) write();
  }
}

// out[i, d] = sum_{n of i} rows[n, d], four columns a thread; if it is there, behind[n] = rows[n, cols].
// rows: [nnz, width], out: [B, cols]
template <class T>
__global__ void __launch_bounds__(kThreads)
    sum_sectors_kernel(const T* rows, int width, Index index, int cols, T* out, T* behind) {
  const int units = ((behind ? cols + 1 : cols) + 3) / 4;
  for (int64_t e = int64_t(blockIdx.x) * kThreads + threadIdx.x; e < index.num_items * units;
       e += int64_t(gridDim.x) * kThreads) {
    const int64_t i = e / units, last = index.indptr[i + 1];
    const int d = static_cast<int>(e % units) * 4;
    CROWDNAL_ASSERT(0 <= index.indptr[i] && index.indptr[i] <= last && last <= index.nnz);
    BlockSum<T> sums[4];
    for (int64_t n = index.indptr[i]; n < last;) {
      const int64_t stop = n + kTermBlock < last ? n + kTermBlock : last;
      for (; n < stop; ++n) {
        T got[4];
        load<4>(rows + n * width + d, got);
        for (int v = 0; v < 4; ++v) {
          sums[v].add(got[v]);
          if (behind && d + v == cols) behind[n] = got[v];
        }
      }
      for (int v = 0; v < 4; ++v) sums[v].close();
    }
    for (int v = 0; v < 4; ++v) {
      if (d + v < cols) out[i * cols + d + v] = sums[v].total;
    }
  }
}

template <class T>
void sum_sectors(Context& context, const T* rows, int width, const Index& index, int64_t cols, T* out,
                 T* behind = nullptr) {
  launch(context, sum_sectors_kernel<T>, ceil_div(index.num_items * ceil_div(cols + (behind != nullptr), 4), kThreads),
         kThreads, 0, rows, width, index, static_cast<int>(cols), out, behind);
}

// As `softmax_link` without probs, and its gradients for a loss that is the end.
template <class T, class E>
void softmax_step(Context& context, const MixInput<T, E>& input, const T* weight, const Index& index,
                  const Shape& shape, bool mean, T* loss, T* nll, const SoftmaxLinkGrads<T>& grads) {
  const int64_t size = shape.matrix(), most = std::max(shape.rows, shape.cols);
  const int64_t count = mean ? std::max<int64_t>(1, index.nnz) : 1;
  // Short chunks where they hold many annotators, each of whom is work of its own.
  const int64_t least = index.nnz < kLanes * shape.num_annotators ? 8 : kLanes;
  const Chunks chunks = cut(context, index, Chunks::of(index.nnz, 1, size, least));
  StepOut<T> out{
      nll,  nullptr, nullptr, grads.mixing, grads.confusion, whole_sectors<T>(shape.rows), whole_sectors<T>(shape.cols),
      false};
  out.together = grads.scores && out.each_width > shape.rows;
  if (grads.scores) out.each = context.template scratch<T>(index.nnz * out.each_width);
  if (grads.shared) out.share = context.template scratch<T>(index.nnz * out.share_width);
  T* slots = grads.confusion ? context.template scratch<T>(chunks.count * size) : nullptr;
  if (grads.confusion) context.zero(grads.confusion, shape.num_annotators * size);
  const auto start = [&](auto kernel, int warps) {
    launch(context, kernel, ceil_div(chunks.count, warps), warps * kLanes, 0, input, weight,
           T(1) / static_cast<T>(count), index, shape, chunks, out, slots);
  };
  if (most <= 8) {
    start(softmax_step_kernel<T, E, 8, 2, 1>, kStepWarps<T, 8>);
  } else if (most <= 16 && ceil_div(shape.rows, 2) * ceil_div(shape.cols, 2) <= kLanes) {
    start(softmax_step_kernel<T, E, 16, 2, 2>, kStepWarps<T, 16>);
  } else if (most <= 16) {
    start(softmax_step_kernel<T, E, 16, 4, 2>, kStepWarps<T, 16>);
  } else {
    start(softmax_step_kernel<T, E, 32, 8, 4>, kStepWarps<T, 32>);
  }
  if (grads.confusion) add_slots(context, index, size, chunks, slots, grads.confusion);
  if (grads.scores)
    sum_sectors(context, out.each, out.each_width, index, shape.rows, grads.scores, out.together ? nll : nullptr);
  if (grads.shared) sum_sectors(context, out.share, out.share_width, index, shape.cols, grads.shared);
  weighted_sum(context, nll, weight, index.nnz, count, loss);
}

}  // namespace crowdnal::cuda
