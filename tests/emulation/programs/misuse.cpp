// Small kernels that use the emulated CUDA rightly or wrongly: `misuse NAME` prints what came out, or the error.
#include <cstdio>
#include <functional>
#include <map>
#include <string>

#include "cuda/detail/launch.h"

using crowdnal::cuda::Context;
using crowdnal::cuda::launch;

__global__ void reverse(int* out) {
  CROWDNAL_SHARED(int, x, 64);
  x[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = x[63 - threadIdx.x];
}
__global__ void reverse_dynamic(int* out) {
  CROWDNAL_DYNAMIC_SHARED(int, x);
  x[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = x[63 - threadIdx.x];
}
__global__ void reverse_lanes(int* out) {
  CROWDNAL_SHARED(int, x, 64);
  const int first = threadIdx.x / 32 * 32, lane = threadIdx.x % 32;
  x[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = x[first + 31 - lane];
}
__global__ void shuffles(int* out) {
  const int t = threadIdx.x;
  int v = __shfl_xor_sync(~0u, t, 1);          // t ^ 1
  v = 100 * v + __shfl_sync(~0u, t, 2, 8);     // third of each eight
  v = 100 * v + __shfl_down_sync(~0u, t, 30);  // own beyond the warp
  v = 100 * v + __shfl_up_sync(~0u, t, 3, 4);  // first of each four reaches the fourth, the others none
  out[t] = v;
}
__global__ void ballot(int* out) { out[threadIdx.x] = __popc(__ballot_sync(~0u, threadIdx.x % 5 == 0)); }
// Every second group of four adds up what its lanes have, while the others wait for the whole warp.
__global__ void groups(int* out) {
  const int group = threadIdx.x % 32 / 4;
  const unsigned mask = 0xfu << 4 * group;
  int v = threadIdx.x;
  if (group % 2) {
    v += __shfl_xor_sync(mask, v, 1);
    v += __shfl_xor_sync(mask, v, 2);
  }
  out[threadIdx.x] = 100 * v + __popc(__ballot_sync(~0u, v % 2));
}

__global__ void no_barrier(int* out) {
  CROWDNAL_SHARED(int, x, 64);
  x[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = x[63 - threadIdx.x];
}
__global__ void warp_barrier_between_warps(int* out) {
  CROWDNAL_SHARED(int, x, 64);
  x[threadIdx.x] = threadIdx.x;
  __syncwarp();
  out[threadIdx.x] = x[63 - threadIdx.x];
}
__global__ void overwrite(int* out) {
  CROWDNAL_SHARED(int, x, 64);
  x[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = x[63 - threadIdx.x];
  x[threadIdx.x] = 0;
}
__global__ void two_writers(int*) {
  CROWDNAL_SHARED(int, x, 64);
  x[threadIdx.x / 2] = threadIdx.x;
}
__global__ void beyond(int*) {
  CROWDNAL_SHARED(int, x, 64);
  x[threadIdx.x + 1] = 0;
}
__global__ void beyond_dynamic(int*) {
  CROWDNAL_DYNAMIC_SHARED(int, x);
  x[threadIdx.x + 1] = 0;
}
__global__ void unwritten(int* out) {
  CROWDNAL_SHARED(int, x, 64);
  out[threadIdx.x] = x[threadIdx.x];
}
__global__ void divergent(int*) {
  if (threadIdx.x < 40) __syncthreads();
}
__global__ void two_barriers(int*) {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}
__global__ void lane_missing(int* out) {
  if (threadIdx.x % 32 != 7) out[threadIdx.x] = __shfl_xor_sync(~0u, int(threadIdx.x), 1);
}
__global__ void lane_outside(int* out) { out[threadIdx.x] = __shfl_xor_sync(0xffffu, int(threadIdx.x), 1); }
__global__ void crossed(int* out) {
  if (threadIdx.x % 2) {
    out[threadIdx.x] = __shfl_xor_sync(~0u, int(threadIdx.x), 2);
  } else {
    out[threadIdx.x] = __shfl_xor_sync(~0u, int(threadIdx.x), 4);
  }
}
__global__ void refused(int*) { CROWDNAL_ASSERT(threadIdx.x < 63); }

int main(int, char** argv) {
  const std::map<std::string, void (*)(int*)> kernels{{"reverse", reverse},
                                                      {"reverse_dynamic", reverse_dynamic},
                                                      {"reverse_lanes", reverse_lanes},
                                                      {"shuffles", shuffles},
                                                      {"ballot", ballot},
                                                      {"groups", groups},
                                                      {"no_barrier", no_barrier},
                                                      {"crossed", crossed},
                                                      {"warp_barrier_between_warps", warp_barrier_between_warps},
                                                      {"overwrite", overwrite},
                                                      {"two_writers", two_writers},
                                                      {"beyond", beyond},
                                                      {"beyond_dynamic", beyond_dynamic},
                                                      {"unwritten", unwritten},
                                                      {"divergent", divergent},
                                                      {"two_barriers", two_barriers},
                                                      {"lane_missing", lane_missing},
                                                      {"lane_outside", lane_outside},
                                                      {"refused", refused}};
  for (int seed = 0; seed < 3; ++seed) {
    Context context;
    context.seed = seed;
    int out[64] = {};
    try {
      launch(context, kernels.at(argv[1]), 2, 64, 64 * sizeof(int), out);
      for (int v : out) std::printf("%d ", v);
      std::printf("\n");
    } catch (const std::exception& error) {
      std::printf("%s\n", error.what());
    }
  }
}
