// Sums of rows of an observed-label-major confusion [R, labels, classes] by item, and their adjoint.
#pragma once

#include <cstdint>
#include <vector>

#include "common/index.h"

namespace crowdnal::cpu {

// What every annotation adds to its item: weight[n] times a row of `table`.
template <class T>
struct Evidence {
  const T* table;          // [R, labels, classes], or [nnz, classes] where `label` is null
  const T* weight;         // [nnz], or null: 1
  const int64_t* label;    // [nnz], or null
  int64_t labels, classes;
};

// out[i - begin, k] = (start[i, k] or 0) + sum_{n of i} weight[n] row_n[k] for items begin..end-1. A weight of 0 adds
// nothing, whatever its row.
template <class T>
void sum_evidence(const Evidence<T>& evidence, const Index& index, const T* start, int64_t begin, int64_t end, T* out);

// What the annotations of one annotator, positions first..last-1 of `order`, add to its matrix [labels, classes].
template <class T>
void count_run(const T* values, const T* weight, const int64_t* label, const Index& index, int64_t first, int64_t last,
               int64_t labels, int64_t classes, T* out, std::vector<double>& scratch);

// How many tables [R, labels, classes] `counts` sums the annotations into, in their own order; 0 if it goes by
// annotator. Depends on nothing but sizes, so that sums do not depend on the threads.
int64_t count_tables(int64_t nnz, const Shape& shape);

// out[r, y, k] = sum_{n of r with label y} weight[n] values[item_n, k]                out: [R, labels, classes], zeroed
template <class T>
void counts(const T* values, const T* weight, const int64_t* label, const Index& index, const Shape& shape, T* out);

}  // namespace crowdnal::cpu
