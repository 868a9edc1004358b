// Sets the order of threads and blocks, and the most blocks of a launch, of the ops that follow.
#include "cuda/device.h"

extern "C" __attribute__((visibility("default"))) void configure(uint64_t seed, int64_t most_blocks) {
  crowdnal::cuda::next_seed = seed;
  crowdnal::cuda::next_most_blocks = most_blocks;
}
