// The joint link with its gradients, where a row fits into one or two vectors: a matrix is activated once for both.
#pragma once

#include <memory>
#include <vector>

#include "cpu/detail/normalization.h"
#include "cpu/detail/small_step.h"

namespace crowdnal::cpu {

template <class T>
struct JointInput {
  const T* confusion;    // [R, labels, classes]
  const T* weight;       // [nnz] or null (1)
  const int64_t* label;  // [nnz]
  Normalization kind;
};

// What is known of the matrices of all runs, between their rows and their gradients. Values that would not stay in the
// cache are made twice.
template <class T>
struct JointMatrices {
  static constexpr int64_t kKept = 1 << 20;
  int64_t width, size;  // of a row, of a matrix, in whole vectors
  bool normalized, keep, softplus;
  std::unique_ptr<T[]> values, slopes, inverse;  // [runs, size], [runs, size], [runs, width], see `Activated`
  std::vector<char> extreme;                     // [runs]: all in log space

  JointMatrices(int64_t runs, const Shape& shape, Normalization kind)
      : width(padded<T>(shape.cols)), size(shape.rows * width), normalized(kind != Normalization::kNone),
        keep(normalized && runs * size <= kKept), softplus(kind == Normalization::kSoftplus),
        values(new T[keep ? runs * size : 0]), slopes(new T[keep && softplus ? runs * size : 0]),
        inverse(new T[normalized ? runs * width : 0]), extreme(runs) {}
};

// rows[n] = log A_r[y_n] for the annotations of the runs run..end-1                  rows: [nnz, padded(classes)]
template <class T>
void joint_rows_small(const JointInput<T>& in, const Index& index, const Runs& runs, const Shape& shape, int64_t run,
                      int64_t end, JointMatrices<T>& matrices, T* rows);

// The gradients of the matrices of those runs from dt [B, classes], that of the log joints.      out: see `MatricesOut`
template <class T>
void joint_gradient_small(const JointInput<T>& in, const Index& index, const Runs& runs, const Shape& shape,
                          int64_t run, int64_t end, const JointMatrices<T>& matrices, const T* dt, T* out);

}  // namespace crowdnal::cpu
