// How annotations are indexed, as raw pointers: shared by every kernel on host and device.
#pragma once

#include <cstdint>

#include "common/math.h"

namespace crowdnal {

// An annotation, its item, its annotator and its label.
struct alignas(16) Planned {
  int32_t annotation, item, annotator, label;
};

// B items, R annotators, nnz annotations in item order (CSR).
struct Index {
  const int64_t* indptr;     // [B + 1]
  const int64_t* item;       // [nnz]
  const int64_t* annotator;  // [nnz]
  const int64_t* order;      // [nnz], stable: annotator[order] is ascending
  int64_t num_items;
  int64_t nnz;
  const Planned* plan = nullptr;  // [nnz]: annotations order[0], order[1], ..; or null
};

// A matrix per annotator: `confusion` is [R, rows, cols], contiguous.
struct Shape {
  int64_t num_annotators;
  int64_t rows;
  int64_t cols;
  CROWDNAL_HD int64_t matrix() const { return rows * cols; }
};

}  // namespace crowdnal
