// Sets the order of threads and blocks, and the most blocks of a launch, of the ops that follow.
#include <pybind11/pybind11.h>

#include "cuda/detail/device.h"

PYBIND11_MODULE(crowdnal_emulated, module) {
  module.def("configure", [](uint64_t seed, int64_t most_blocks) {
    crowdnal::cuda::next_seed = seed;
    crowdnal::cuda::next_most_blocks = most_blocks;
  });
}
