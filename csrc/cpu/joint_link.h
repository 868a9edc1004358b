// What the ops of the joint link share.
#pragma once

#include "cpu/detail/normalization.h"
#include "cpu/label_log_likelihood.h"

namespace crowdnal::cpu {

// What the loss is divided by.
int64_t joint_denominator(const Index& view, bool mean);

// rows[n] = log A_r[y_n] [nnz, classes]; a matrix is normalised once for all annotations of its annotator, and
// log_norm [runs, classes] kept for the backward.
template <class T>
void log_rows(const T* confusion, const int64_t* label, const CheckedIndex& index, const Shape& shape,
              Normalization kind, T* log_norm, T* rows);

// dt[i] = -(scale + upstream_i) posterior_i, 0 without annotations     upstream: [B] or null; dt may be `posterior`
template <class T>
void joint_upstream(const T* posterior, const Index& view, int64_t classes, T scale, const T* upstream, T* dt);

// The gradient of the confusion from dt [B, classes], that of the log joints. log_norm: see `log_rows`, or null; rows:
// [nnz, classes] to work in where matrices are normalised.
template <class T>
void joint_confusion(const T* confusion, const T* log_norm, const T* dt, const T* weight, const int64_t* label,
                     const CheckedIndex& index, const Shape& shape, Normalization kind, T* rows, T* out);

}  // namespace crowdnal::cpu
