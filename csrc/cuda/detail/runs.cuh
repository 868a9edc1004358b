// The annotators who are present, numbered in their order: a run each, for what is kept once per annotator.
#pragma once

#include "cuda/detail/chunks.cuh"

namespace crowdnal::cuda {

struct Runs {
  int64_t most;              // as many as there can be: min(nnz, R)
  const int64_t* annotator;  // [most]; -1 behind the last run
  const int64_t* of;         // [R], the run of an annotator; only for those present
};

constexpr int kScan = 256;

// Sum of `mine` over the threads before this one; `total`: over all of the block.
template <class Array>
__device__ int64_t scan_block(int64_t mine, Array& sums, int64_t* total) {
  const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
  int64_t upto = mine;
  for (int d = 1; d < kLanes; d *= 2) {
    const int64_t below = __shfl_up_sync(kAll, upto, d);
    if (lane >= d) upto += below;
  }
  if (lane == kLanes - 1) sums[warp] = upto;
  __syncthreads();
  int64_t before = 0, all = 0;
  for (int w = 0; w < kScan / kLanes; ++w) {
    const int64_t sum = sums[w];
    before += w < warp ? sum : 0;
    all += sum;
  }
  __syncthreads();  // the next scan writes again
  *total = all;
  return before + upto - mine;
}

// found[x] = the annotator whose run begins at place x, or -1; counts[b] = how many do in block b of kScan places. The
// places are the annotators, who are sought in `order`, or if there are fewer of those its positions.
static __global__ void __launch_bounds__(kScan)
    count_runs_kernel(Index index, int64_t most, bool by_annotator, int64_t* found, int64_t* counts) {
  CROWDNAL_SHARED(int64_t, sums, kScan / kLanes);
  for (int64_t b = blockIdx.x; b * kScan < most; b += gridDim.x) {
    const int64_t x = b * kScan + threadIdx.x;
    int64_t r = -1;
    if (x < most && by_annotator) {
      const int64_t p = first_position(index, x);
      if (p < index.nnz && owner_at(index, p) == x) r = x;
    } else if (x < most && !continues(index, x)) {
      r = owner_at(index, x);
    }
    int64_t total;
    scan_block(r >= 0, sums, &total);
    if (x < most) found[x] = r;
    if (threadIdx.x == 0) counts[b] = total;
  }
}

// In place: counts[b] = sum of the counts before b, for b <= size. One block.
static __global__ void __launch_bounds__(kScan) scan_counts_kernel(int64_t* counts, int64_t size) {
  CROWDNAL_SHARED(int64_t, sums, kScan / kLanes);
  int64_t before = 0;
  for (int64_t first = 0; first < size; first += kScan) {
    const int64_t b = first + threadIdx.x;
    int64_t total;
    const int64_t here = scan_block(b < size ? counts[b] : 0, sums, &total);
    if (b < size) counts[b] = before + here;
    before += total;
  }
  if (threadIdx.x == 0) counts[size] = before;
}

static __global__ void __launch_bounds__(kScan)
    write_runs_kernel(const int64_t* found, const int64_t* before, int64_t most, int64_t num_annotators,
                      int64_t* annotator, int64_t* of) {
  CROWDNAL_SHARED(int64_t, sums, kScan / kLanes);
  const int64_t blocks = (most + kScan - 1) / kScan, count = before[blocks];
  for (int64_t b = blockIdx.x; b < blocks; b += gridDim.x) {
    const int64_t x = b * kScan + threadIdx.x, r = x < most ? found[x] : -1;
    int64_t total;
    const int64_t run = before[b] + scan_block(r >= 0, sums, &total);
    CROWDNAL_ASSERT(r < num_annotators);
    if (r >= 0) {
      annotator[run] = r;
      of[r] = run;
    }
    if (count <= x && x < most) annotator[x] = -1;
  }
}

inline Runs find_runs(Context& context, const Index& index, int64_t num_annotators) {
  const int64_t most = std::min(index.nnz, num_annotators), blocks = ceil_div(most, kScan);
  int64_t *annotator = context.scratch<int64_t>(most), *of = context.scratch<int64_t>(num_annotators);
  int64_t *found = context.scratch<int64_t>(most), *counts = context.scratch<int64_t>(blocks + 1);
  launch(context, count_runs_kernel, blocks, kScan, 0, index, most, num_annotators <= index.nnz, found, counts);
  launch(context, scan_counts_kernel, blocks > 0, kScan, 0, counts, blocks);
  launch(context, write_runs_kernel, blocks, kScan, 0, found, counts, most, num_annotators, annotator, of);
  return {most, annotator, of};
}

}  // namespace crowdnal::cuda
