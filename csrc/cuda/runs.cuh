// Where each annotator who is present begins in `order`, and the run that each annotation is in: for what is kept once an
// annotator of the batch.
#pragma once

#include "cuda/chunks.cuh"

namespace crowdnal::cuda {

struct Runs {
  int64_t most;          // as many as there can be: min(nnz, R)
  const int64_t* begin;  // [most]; nnz behind the last run
  const int64_t* of;     // [nnz]
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

// counts[b] = how many runs begin in block b of kScan positions
static __global__ void __launch_bounds__(kScan) count_runs_kernel(Index index, int64_t* counts) {
  CROWDNAL_SHARED(int64_t, sums, kScan / kLanes);
  for (int64_t b = blockIdx.x; b * kScan < index.nnz; b += gridDim.x) {
    const int64_t p = b * kScan + threadIdx.x;
    int64_t total;
    scan_block(p < index.nnz && !continues(index, p), sums, &total);
    if (threadIdx.x == 0) counts[b] = total;
  }
}

// In place: counts[b] = sum of the counts before b. One block.
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
}

static __global__ void __launch_bounds__(kScan) fill_kernel(int64_t* values, int64_t size, int64_t value) {
  for (int64_t j = int64_t(blockIdx.x) * kScan + threadIdx.x; j < size; j += int64_t(gridDim.x) * kScan) values[j] = value;
}

static __global__ void __launch_bounds__(kScan)
    write_runs_kernel(Index index, const int64_t* before, int64_t* begin, int64_t* of) {
  CROWDNAL_SHARED(int64_t, sums, kScan / kLanes);
  for (int64_t b = blockIdx.x; b * kScan < index.nnz; b += gridDim.x) {
    const int64_t p = b * kScan + threadIdx.x;
    const bool begins = p < index.nnz && !continues(index, p);
    int64_t total;
    const int64_t run = before[b] + scan_block(begins, sums, &total) - (begins ? 0 : 1);
    if (begins) begin[run] = p;
    if (p < index.nnz) of[index.order[p]] = run;
  }
}

inline Runs find_runs(Context& context, const Index& index, int64_t num_annotators) {
  const int64_t most = std::min(index.nnz, num_annotators), blocks = ceil_div(index.nnz, kScan);
  int64_t *begin = context.scratch<int64_t>(most), *of = context.scratch<int64_t>(index.nnz);
  int64_t* counts = context.scratch<int64_t>(blocks);
  launch(context, count_runs_kernel, blocks, kScan, 0, index, counts);
  launch(context, scan_counts_kernel, blocks > 0, kScan, 0, counts, blocks);
  launch(context, fill_kernel, ceil_div(most, kScan), kScan, 0, begin, most, index.nnz);
  launch(context, write_runs_kernel, blocks, kScan, 0, index, counts, begin, of);
  return {most, begin, of};
}

}  // namespace crowdnal::cuda
