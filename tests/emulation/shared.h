// Shared memory that knows who wrote and read each cell, and when.
#pragma once

#include <string>
#include <vector>

#include "block.h"

namespace emulator {

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

  void resize(int64_t size) { cells_.resize(size); }

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

}  // namespace emulator
