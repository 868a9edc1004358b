// The threads of a block: who may run, and what brings those together who wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fibers.h"

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
      // one that waits for lanes without this one goes on when they come
      const bool crossed = other.state == Thread::kAtWarp && !here && (other.mask >> lane & 1);
      if (crossed) fail("lanes of a warp wait at different warp operations", site);
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
        if (t > 0 && threads_[t].state == threads_[t - 1].state && same(threads_[t].site, threads_[t - 1].site))
          continue;
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

}  // namespace emulator
