// The softmax link with its gradients in one pass over the annotators, where a row of scores fits into one or two
// vectors.
#pragma once

#include "cpu/detail/tensors.h"

namespace crowdnal::cpu {

template <class T>
struct Prior;

// What annotation n adds to the loss: scale weight_n nll_n.
template <class T>
struct StepScale {
  const T* weight;  // [nnz] or null (1)
  T scale;
  CROWDNAL_INLINE T of(int64_t n) const { return weight ? scale * weight[n] : scale; }
};

// Sums over the annotations of an annotator, in blocks of `kSegmentBlock`.
template <class T>
struct BlockSums {
  std::vector<T> sum, total;  // of the block, and of those before it

  explicit BlockSums(int64_t size) : sum(size) {}

  // At a block's end; whether `sum` is the whole.
  CROWDNAL_INLINE bool join(bool first_block, bool last_block) {
    if (!first_block) {
      for (size_t e = 0; e < sum.size(); ++e) sum[e] = total[e] + sum[e];
    }
    if (!last_block) total = sum;
    return last_block;
  }
};

// Null where not wanted, but for nll. The rows have whole vectors, see `padded`.
template <class T>
struct StepOut {
  T* nll;        // [nnz]
  T* each;       // [nnz, padded(rows)]: W_r g_n, what the annotation adds to the gradient of its item's scores
  T* share;      // [nnz, padded(cols)]: what it adds to that of the shared term
  T* mixing;     // [nnz]: the gradient of the mixing
  T* confusion;  // [R, rows, cols]: see `MatricesOut`
};

// The next multiple of a vector.
template <class T>
inline int64_t padded(int64_t size) {
  return (size + kLanes<T> - 1) / kLanes<T> * kLanes<T>;
}

// For the annotations of the runs run..end-1, and the prior of these.
template <class T>
void step_small(const MixInput<T>& input, const StepScale<T>& scale, const Index& index, const Runs& runs,
                const Shape& shape, int64_t run, int64_t end, const StepOut<T>& out, Prior<T>& prior);

// out[i, c] = sum_{n of i} rows[n, c] for the items begin..end-1     rows: [nnz, padded(cols)], out: [B, cols]
template <class T>
void sum_padded(const T* rows, const Index& index, int64_t begin, int64_t end, int64_t cols, T* out);

}  // namespace crowdnal::cpu
