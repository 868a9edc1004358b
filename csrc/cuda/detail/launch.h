// The seam between the kernels and what runs them: a GPU, or the emulator of the tests (tests/emulation/emulator.h).
// Kernels take shared memory through the macros, and start through `launch`; nothing else tells the two apart.
#pragma once

#include <cstdint>

#if defined(CROWDNAL_EMULATOR)

#include "emulator.h"

#else

#include <cuda_runtime.h>

#include <algorithm>
#include <cassert>
#include <stdexcept>
#include <string>

#define CROWDNAL_SHARED(T, name, size) __shared__ T name[size]
#define CROWDNAL_DYNAMIC_SHARED(T, name)                           \
  extern __shared__ __align__(16) unsigned char crowdnal_shared[]; \
  T* name = reinterpret_cast<T*>(crowdnal_shared)
#define CROWDNAL_UNROLL _Pragma("unroll")
#define CROWDNAL_ROLLED _Pragma("unroll 1")
// Code is unreachable after the trap: no registers are kept for a return from the report.
#define CROWDNAL_ASSERT(condition) \
  do {                             \
    if (!(condition)) {            \
      assert(condition);           \
      __trap();                    \
    }                              \
  } while (0)

namespace crowdnal::cuda {

inline void check(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(std::string("crowdnal: CUDA: ") + cudaGetErrorString(error));
}

// Where an op runs, and the memory that it works in: valid until the op's kernels are done.
class Context {
 public:
  explicit Context(cudaStream_t stream) : stream_(stream) {}
  virtual ~Context() = default;
  cudaStream_t stream() const { return stream_; }

  template <class T>
  T* scratch(int64_t count) {
    return static_cast<T*>(allocate(std::max<int64_t>(0, count) * static_cast<int64_t>(sizeof(T))));
  }
  template <class T>
  void zero(T* values, int64_t count) {
    if (count > 0) check(cudaMemsetAsync(values, 0, count * sizeof(T), stream_));
  }

 private:
  virtual void* allocate(int64_t bytes) = 0;
  cudaStream_t stream_;
};

// At most 2^31 - 1 blocks: kernels walk on by gridDim.x.
template <class... P, class... A>
void launch(Context& context, void (*kernel)(P...), int64_t blocks, int threads, int64_t shared_bytes, A... args) {
  if (blocks <= 0) return;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(blocks, INT32_MAX));
  kernel<<<grid, threads, shared_bytes, context.stream()>>>(static_cast<P>(args)...);
  check(cudaGetLastError());
}

}  // namespace crowdnal::cuda

#endif

namespace crowdnal::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace crowdnal::cuda
