// A float that counts how often it is read.
#pragma once

#include <cstdint>

struct Counted {
  inline static int64_t reads = 0;
  float value;
  operator float() const { return ++reads, value; }
};
