// Sets the order of threads and blocks, the most blocks of a launch, and the most bytes of an output, of the ops that
// follow.
#include <pybind11/pybind11.h>

#include "cuda/detail/device.h"

PYBIND11_MODULE(crowdnal_emulated, module) {
  module.def("configure", [](uint64_t seed, int64_t most_blocks) {
    crowdnal::cuda::next_seed = seed;
    crowdnal::cuda::next_most_blocks = most_blocks;
  });
  module.def("limit", [](int64_t most_bytes) { crowdnal::cuda::next_most_bytes = most_bytes; });
}
