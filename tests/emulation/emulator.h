// What the kernels in csrc/cuda use of CUDA, on the CPU: blocks one after another, the threads of a block as fibers.
// Order of blocks and threads: shuffled by a seed. Errors, as exceptions that name the line: barriers and warp operations
// that not all threads reach, shared memory out of bounds, read before it is written, or touched by two threads with no
// barrier between them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fibers.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define CROWDNAL_SHARED(T, name, size) static emulator::SharedArray<T> name(size)
#define CROWDNAL_DYNAMIC_SHARED(T, name) emulator::SharedArray<T>& name = emulator::dynamic_shared<T>()
#define CROWDNAL_ASSERT(condition) \
  if (!(condition)) emulator::fail("assertion failed: " #condition, std::source_location::current())

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
inline dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

using Site = std::source_location;
constexpr int kWarp = 32;

inline std::string name(const Site& site) {
  const std::string path = site.file_name();
  return path.substr(path.rfind('/') + 1) + ":" + std::to_string(site.line());
}
[[noreturn]] inline void fail(const std::string& what, const Site& site) {
  std::ostringstream out;
  out << what << " (" << name(site) << ", block " << blockIdx.x << ", thread " << threadIdx.x << ")";
  throw std::runtime_error(out.str());
}

struct Thread {
  enum State { kReady, kAtBarrier, kAtWarp, kDone } state = kReady;
  Site site;
  unsigned mask = 0;
  uint64_t value = 0;
  uint64_t all[kWarp] = {};  // what the lanes of the mask brought to the last warp operation
};

class Block {
 public:
  static Block& get() {
    static Block block;
    return block;
  }

  // All blocks of a launch.
  void launch(int64_t blocks, int threads, int64_t shared_bytes, uint64_t seed, const std::function<void()>& body) {
    if (threads % kWarp != 0 || threads > 1024) throw std::runtime_error("a block must be whole warps, 1,024 threads");
    if (shared_bytes > (48 << 10)) throw std::runtime_error("a block asks for more than 48 KB of shared memory");
    random_.seed(seed);
    gridDim = {static_cast<unsigned>(blocks)};
    blockDim = {static_cast<unsigned>(threads)};
    shared_bytes_ = shared_bytes;
    std::vector<int64_t> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (const int64_t b : order) {
      blockIdx = {static_cast<unsigned>(b)};
      run(threads, body);
    }
  }

  void barrier(const Site& site) {
    threads_[self_].state = Thread::kAtBarrier;
    threads_[self_].site = site;
    fibers_.wait();
  }

  // Waits for all lanes of the mask; returns what each brought.
  const uint64_t* exchange(unsigned mask, uint64_t value, const Site& site, bool orders_memory) {
    const int lane = self_ % kWarp, first = self_ - lane;
    if (!(mask >> lane & 1)) fail("a lane calls a warp operation whose mask leaves it out", site);
    Thread& me = threads_[self_];
    me.state = Thread::kAtWarp;
    me.site = site;
    me.mask = mask;
    me.value = value;
    bool all = true;
    for (int j = 0; j < kWarp; ++j) {
      const Thread& other = threads_[first + j];
      if (!(mask >> j & 1)) continue;
      const bool here = other.state == Thread::kAtWarp && other.mask == mask && same(other.site, site);
      if (other.state == Thread::kAtWarp && !here) fail("lanes of a warp wait at different warp operations", site);
      all = all && here;
    }
    if (!all) {
      fibers_.wait();
      return me.all;
    }
    uint64_t values[kWarp] = {};
    for (int j = 0; j < kWarp; ++j) values[j] = threads_[first + j].value;
    for (int j = 0; j < kWarp; ++j) {
      if (!(mask >> j & 1)) continue;
      std::copy_n(values, kWarp, threads_[first + j].all);
      threads_[first + j].state = Thread::kReady;
      if (first + j != self_) ready_.push_back(first + j);
    }
    if (orders_memory && mask == ~0u) ++warp_epoch_[first / kWarp];
    return me.all;
  }

  int self() const { return self_; }
  int64_t number() const { return number_; }
  int64_t shared_bytes() const { return shared_bytes_; }
  uint32_t epoch() const { return epoch_; }
  uint32_t warp_epoch(int thread) const { return warp_epoch_[thread / kWarp]; }

 private:
  static bool same(const Site& a, const Site& b) {
    return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
  }

  void run(int count, const std::function<void()>& body) {
    ++number_;
    epoch_ = 0;
    warp_epoch_.assign(count / kWarp, 0);
    threads_.assign(count, Thread{});
    ready_.resize(count);
    std::iota(ready_.begin(), ready_.end(), 0);
    fibers_.start(count, body);
    for (int alive = count; alive > 0;) {
      if (ready_.empty()) release(alive);
      const size_t pick = random_() % ready_.size();
      self_ = ready_[pick];
      ready_[pick] = ready_.back();
      ready_.pop_back();
      threadIdx = {static_cast<unsigned>(self_)};
      fibers_.resume(self_);
      if (fibers_.done(self_)) {
        threads_[self_].state = Thread::kDone;
        --alive;
      } else if (threads_[self_].state == Thread::kReady) {
        ready_.push_back(self_);
      }
    }
  }

  // Nobody can run: either all threads are at one barrier, or the kernel would hang.
  void release(int alive) {
    const Site site = std::find_if(threads_.begin(), threads_.end(), [](const Thread& t) {
                        return t.state != Thread::kDone;
                      })->site;
    bool together = alive == static_cast<int>(threads_.size());
    for (const Thread& t : threads_) together = together && t.state == Thread::kAtBarrier && same(t.site, site);
    if (!together) {
      std::ostringstream out;
      out << "divergent barrier: ";
      for (size_t t = 0; t < threads_.size(); ++t) {
        if (t > 0 && threads_[t].state == threads_[t - 1].state && same(threads_[t].site, threads_[t - 1].site)) continue;
        out << (t ? ", " : "") << "from thread " << t
            << (threads_[t].state == Thread::kDone ? " returned" : " at " + name(threads_[t].site));
      }
      throw std::runtime_error(out.str());
    }
    ++epoch_;
    for (size_t t = 0; t < threads_.size(); ++t) {
      threads_[t].state = Thread::kReady;
      ready_.push_back(static_cast<int>(t));
    }
  }

  Fibers fibers_;
  std::mt19937_64 random_;
  std::vector<Thread> threads_;
  std::vector<int> ready_;
  std::vector<uint32_t> warp_epoch_;
  uint32_t epoch_ = 0;
  int self_ = 0;
  int64_t number_ = 0, shared_bytes_ = 0;
};

// Who touched a cell of shared memory last, and when.
struct Access {
  int thread = -1;
  uint32_t epoch = 0, warp_epoch = 0;
  bool other_lane = false, other_warp = false;  // a second thread did the same at the same time

  bool before_now() const {  // whether a barrier lies between this and what the running thread does
    const Block& block = Block::get();
    if (thread < 0 || epoch != block.epoch()) return true;
    const int self = block.self();
    const bool one_warp = !other_warp && thread / kWarp == self / kWarp;
    return one_warp && (warp_epoch != block.warp_epoch(self) || (!other_lane && thread == self));
  }
  void add() {
    const Block& block = Block::get();
    const int self = block.self();
    const bool more = thread >= 0 && epoch == block.epoch() && !before_now();
    other_warp = more && (other_warp || thread / kWarp != self / kWarp);
    other_lane = more && (other_lane || thread != self);
    thread = self;
    epoch = block.epoch();
    warp_epoch = block.warp_epoch(self);
  }
};

template <class T>
class SharedArray {
 public:
  explicit SharedArray(int64_t size) : cells_(size) {}

  class Reference {
   public:
    Reference(SharedArray& array, int64_t i, const Site& site) : array_(array), i_(i), site_(site) {}
    operator T() const { return array_.read(i_, site_); }
    const Reference& operator=(const T& value) const { return array_.write(i_, value, site_), *this; }
    const Reference& operator=(const Reference& other) const { return *this = static_cast<T>(other); }
    const Reference& operator+=(const T& value) const { return *this = static_cast<T>(*this) + value; }

   private:
    SharedArray& array_;
    int64_t i_;
    Site site_;
  };

  // An index that remembers where it was written down.
  struct At {
    int64_t i;
    Site site;
    template <class I>
    At(I index, Site here = Site::current()) : i(index), site(here) {}
  };
  Reference operator[](At at) { return {*this, at.i, at.site}; }

  void resize(int64_t size) {
    cells_.resize(size);
  }

 private:
  struct Cell {
    T value;
    Access read, written;
  };

  Cell& cell(int64_t i, const Site& site) {
    if (number_ != Block::get().number()) {
      number_ = Block::get().number();
      std::fill(cells_.begin(), cells_.end(), Cell{});
    }
    if (i < 0 || i >= static_cast<int64_t>(cells_.size())) {
      fail("shared memory out of bounds: [" + std::to_string(i) + "] of " + std::to_string(cells_.size()), site);
    }
    return cells_[i];
  }
  T read(int64_t i, const Site& site) {
    Cell& c = cell(i, site);
    if (c.written.thread < 0) fail("shared memory is read before it is written", site);
    if (!c.written.before_now()) fail("shared memory is read with no barrier since another thread wrote it", site);
    c.read.add();
    return c.value;
  }
  void write(int64_t i, const T& value, const Site& site) {
    Cell& c = cell(i, site);
    if (!c.written.before_now()) fail("shared memory is written by two threads with no barrier between them", site);
    if (!c.read.before_now()) fail("shared memory is written with no barrier since another thread read it", site);
    c.written.add();
    c.value = value;
  }

  std::vector<Cell> cells_;
  int64_t number_ = -1;
};

template <class T>
SharedArray<T>& dynamic_shared() {
  static SharedArray<T> array(0);
  array.resize(Block::get().shared_bytes() / static_cast<int64_t>(sizeof(T)));
  return array;
}

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
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }

// The launch seam of csrc/cuda/launch.h

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
