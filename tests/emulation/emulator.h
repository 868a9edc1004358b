// What the kernels in csrc/cuda use of CUDA, on the CPU: blocks one after another, the threads of a block as fibers.
// Order of blocks and threads: shuffled by a seed. Errors, as exceptions that name the line: barriers and warp operations
// that not all threads reach, shared memory out of bounds, read before it is written, or touched by two threads with no
// barrier between them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "shared.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define CROWDNAL_SHARED(T, name, size) static emulator::SharedArray<T> name(size)
#define CROWDNAL_DYNAMIC_SHARED(T, name) emulator::SharedArray<T>& name = emulator::dynamic_shared<T>()
#define CROWDNAL_UNROLL
#define CROWDNAL_ROLLED
#define CROWDNAL_ASSERT(condition) \
  if (!(condition)) emulator::fail("assertion failed: " #condition, std::source_location::current())

namespace emulator {

template <class T>
T exchange(unsigned mask, T value, int source, const Site& site) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t* all = Block::get().exchange(mask, bits, site, false);
  if (!(mask >> source & 1)) fail("a shuffle reads a lane that its mask leaves out", site);
  std::memcpy(&value, all + source, sizeof(T));
  return value;
}

inline int lane() { return Block::get().self() % kWarp; }

}  // namespace emulator

// The CUDA builtins

inline void __syncthreads(emulator::Site site = emulator::Site::current()) { emulator::Block::get().barrier(site); }
inline void __syncwarp(unsigned mask = ~0u, emulator::Site site = emulator::Site::current()) {
  emulator::Block::get().exchange(mask, 0, site, true);
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, emulator::Site site = emulator::Site::current()) {
  return emulator::exchange(mask, value, (emulator::lane() & ~(width - 1)) | (source & (width - 1)), site);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int change, int width = 32, emulator::Site site = emulator::Site::current()) {
  const int lane = emulator::lane(), source = lane ^ change;
  return emulator::exchange(mask, value, source / width > lane / width ? lane : source, site);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int delta, int width = 32, emulator::Site site = emulator::Site::current()) {
  const int lane = emulator::lane(), source = lane + delta;
  return emulator::exchange(mask, value, source / width != lane / width ? lane : source, site);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int delta, int width = 32, emulator::Site site = emulator::Site::current()) {
  const int lane = emulator::lane(), source = lane - delta;
  return emulator::exchange(mask, value, source < (lane & ~(width - 1)) ? lane : source, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, emulator::Site site = emulator::Site::current()) {
  const uint64_t* all = emulator::Block::get().exchange(mask, predicate != 0, site, false);
  unsigned out = 0;
  for (int j = 0; j < emulator::kWarp; ++j) out |= (mask >> j & 1 && all[j] ? 1u : 0u) << j;
  return out;
}
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// The launch seam of csrc/cuda/detail/launch.h

namespace crowdnal::cuda {

struct Context {
  uint64_t seed = 0;
  int64_t most_blocks = INT32_MAX;  // fewer make kernels walk on to further work
  int launches = 0;
  std::vector<std::unique_ptr<char[]>> memory;

  template <class T>
  T* scratch(int64_t count) {
    const size_t bytes = std::max<int64_t>(0, count) * sizeof(T);
    memory.push_back(std::make_unique<char[]>(bytes));
    std::memset(memory.back().get(), 0xff, bytes);
    return reinterpret_cast<T*>(memory.back().get());
  }
  template <class T>
  void zero(T* values, int64_t count) {
    std::fill_n(values, count, T(0));
  }
};

template <class... P, class... A>
void launch(Context& context, void (*kernel)(P...), int64_t blocks, int threads, int64_t shared_bytes, A... args) {
  if (blocks <= 0) return;
  blocks = std::min(blocks, context.most_blocks);
  emulator::Block::get().launch(blocks, threads, shared_bytes, context.seed + 1000003 * context.launches++,
                                [&] { kernel(static_cast<P>(args)...); });
}

}  // namespace crowdnal::cuda
