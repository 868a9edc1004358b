// How one annotator's stored matrix [labels, classes] becomes log A, and the gradient back through that.
#pragma once

#include <cstdint>
#include <vector>

#include "common/math.h"

namespace crowdnal::cpu {

// Reads a matrix once for all annotations of its annotator.
template <class T>
class Normalized {
 public:
  Normalized(int64_t labels, int64_t classes, Normalization kind);

  // `rows`: how many rows will be asked for.
  void read(const T* matrix, int64_t rows);

  // out = offset + log A[label]; no offset where it is null.
  void log_row(int64_t label, const T* offset, T* out) const;

  // `grad` holds the gradient for log A of `matrix` and becomes that for `matrix` itself.
  void pull_back(const T* matrix, T* grad);

 private:
  bool normalize(const T* matrix);

  const int64_t labels_, classes_;
  const Normalization kind_;
  const T* matrix_ = nullptr;   // the last one read
  const T* values_ = nullptr;   // its unnormalised log A, unless rows are `pending_`
  bool pending_ = false;        // log_row takes the logarithm of softplus itself
  std::vector<T> log_sum_, softplus_, sigmoid_, scratch_;
};

}  // namespace crowdnal::cpu
