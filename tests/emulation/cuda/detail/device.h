// In place of csrc/cuda/detail/device.h: launchers run their kernels on the emulator, on tensors of the CPU.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstring>

#include "arguments.h"
#include "cuda/detail/launch.h"

namespace crowdnal::cuda {

// How the next ops run; see configure.cpp.
inline uint64_t next_seed = 0;
inline int64_t next_most_blocks = INT32_MAX;
inline int64_t next_most_bytes = INT64_MAX;

class Device : public Context {
 public:
  explicit Device(const Tensor&) {
    seed = next_seed;
    most_blocks = next_most_blocks;
  }

  bool has(const Tensor& tensor) const { return !tensor.is_cuda(); }

  // Filled with NaN: what a kernel forgets shows.
  Tensor make(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) const {
    AtenTensorHandle handle;
    TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle));
    Tensor out(handle);
    const ScalarType type = out.scalar_type();
    int64_t bytes = type == ScalarType::Double ? 8 : type == ScalarType::Float ? 4 : 0;  // others are refused later
    if (type == ScalarType::Half || type == ScalarType::BFloat16) bytes = 2;
    for (int64_t d = 0; d < dims; ++d) bytes *= sizes[d];
    if (bytes > next_most_bytes) refuse_memory(dims, sizes);
    if (bytes > 0) std::memset(out.mutable_data_ptr(), 0xff, bytes);
    return out;
  }
};

}  // namespace crowdnal::cuda

#define CUDA CPU  // the dispatch key under which the launchers register
