// Rows of an observed-label-major confusion [R, labels, classes], summed by item, and the adjoint of that. The inline
// functions are only for use in functions with CROWDNAL_CLONES.
#pragma once

#include <cstdint>

#include "common/index.h"
#include "cpu/detail/runs.h"
#include "cpu/detail/lanes.h"

namespace crowdnal::cpu {

// What every annotation adds to its item: weight_n times a row of `table`; nothing for a weight of 0, whatever the row.
template <class T>
struct LabelTerms {
  const T* table;  // [rows, classes]: rows (annotator, label), or one per annotation where `label` is null
  int64_t rows, labels;
  const T* weight;       // [nnz] or null (1)
  const int64_t* label;  // [nnz] or null
  bool compact = false;  // rows of whole vectors, see `padded`

  CROWDNAL_INLINE T factor(int64_t n) const { return weight ? weight[n] : T(1); }
  CROWDNAL_INLINE int64_t row(const Index& index, int64_t n) const {
    return label ? index.annotator[n] * labels + label[n] : n;
  }
  template <int N>
  CROWDNAL_INLINE void read(const Index& index, const Row<T, N>& of, int64_t n, Vec<T>* v) const {
    if (!compact) return of.read(table, row(index, n), rows, v);
    for (int64_t j = 0; j < N; ++j) v[j] = load(table + (row(index, n) * N + j) * kLanes<T>);
  }
};

// t += what the annotations of item i add, for rows of one or two vectors.
template <class T, int N>
CROWDNAL_INLINE void add_terms(const LabelTerms<T>& terms, const Index& index, const Row<T, N>& row, int64_t i,
                               Vec<T>* t) {
  const int64_t first = index.indptr[i], last = index.indptr[i + 1];
  Vec<T> before[N] = {};
  for (int64_t block = first; block < last; block += kSegmentBlock) {
    for (int64_t j = 0; block > first && j < N; ++j) {
      before[j] = before[j] + t[j];
      t[j] = Vec<T>{};
    }
    for (int64_t n = block; n < std::min(last, block + kSegmentBlock); ++n) {
      const T w = terms.factor(n);
      if (w == 0) continue;
      Vec<T> x[N];
      terms.read(index, row, n, x);
      for (int64_t j = 0; j < N; ++j) t[j] = t[j] + w * x[j];
    }
  }
  for (int64_t j = 0; last - first > kSegmentBlock && j < N; ++j) t[j] = t[j] + before[j];
}

// The same for rows of any length and annotations first..last-1.
template <class T, class Out>
CROWDNAL_INLINE void add_terms(const LabelTerms<T>& terms, const Index& index, int64_t classes, int64_t first,
                               int64_t last, Out* __restrict t) {
  for (int64_t n = first; n < last; ++n) {
    const Out w = terms.factor(n);
    if (w == 0) continue;
    const T* x = terms.table + terms.row(index, n) * classes;
    for (int64_t k = 0; k < classes; ++k) t[k] += w * x[k];
  }
}
template <class T>
CROWDNAL_INLINE void add_terms(const LabelTerms<T>& terms, const Index& index, int64_t classes, int64_t i, T* t) {
  const int64_t first = index.indptr[i], last = index.indptr[i + 1];
  if (last - first <= kSegmentBlock) return add_terms(terms, index, classes, first, last, t);
  std::vector<double> sums(t, t + classes);
  add_terms(terms, index, classes, first, last, sums.data());
  for (int64_t k = 0; k < classes; ++k) t[k] = static_cast<T>(sums[k]);
}

// Log priors [B, classes], or one row for all items.
template <class T>
struct Prior {
  const T* rows;
  bool shared;
  CROWDNAL_INLINE int64_t row(int64_t i) const { return shared ? 0 : i; }
};

// For `count` <= kLanes items from `first` on, in rows of N vectors: softmax(prior + terms), and the logarithm of
// what that was divided by.
template <class T, int N>
CROWDNAL_INLINE void posterior_block(const LabelTerms<T>& terms, const Index& index, const Prior<T>& prior,
                                     const Row<T, N>& row, int64_t first, int64_t count, T* block, T* log_sum) {
  T sums[kLanes<T>];
  for (int64_t j = 0; j < count; ++j) {
    Vec<T> t[N];
    row.read(prior.rows, prior.row(first + j), prior.shared ? 1 : index.num_items, t);
    add_terms(terms, index, row, first + j, t);
    for (int64_t v = 0; v < N; ++v) store(block + (j * N + v) * kLanes<T>, t[v]);
  }
  softmax_rows<T, N>(block, nullptr, row, sums, log_sum);
}

// The same for item i and a row of any length; returns the logarithm.
template <class T>
CROWDNAL_INLINE T posterior_row(const LabelTerms<T>& terms, const Index& index, const Prior<T>& prior, int64_t classes,
                                int64_t i, T* out) {
  for (int64_t k = 0; k < classes; ++k) out[k] = prior.rows[prior.row(i) * classes + k];
  add_terms(terms, index, classes, i, out);
  return softmax_row(out, classes);
}

// Items begin..end-1: posterior = softmax(prior + terms), nll = -log of its normaliser, 0 without annotations.
template <class T>
void posteriors(const LabelTerms<T>& terms, const Index& index, const Prior<T>& prior, int64_t classes, int64_t begin,
                int64_t end, T* posterior, T* nll);

// Expected counts [R, labels, classes] summed in double precision, rows padded to whole vectors.
template <class T>
struct CountTable {
  double* sums;
  int64_t stride;

  static int64_t stride_for(int64_t classes) {
    return classes <= 2 * kLanes<T> ? (classes <= kLanes<T> ? 1 : 2) * kLanes<T> : classes;
  }

  // row += w v
  template <int N>
  CROWDNAL_INLINE void add(int64_t row, T w, const Vec<T>* v) const {
    constexpr int64_t D = kLanes<double>;
    double* to = sums + row * stride;
    for (int64_t j = 0; j < N; ++j) {
      for (int64_t h = 0; h < kLanes<T> / D; ++h) {
        typedef T Part __attribute__((vector_size(sizeof(T) * kLanes<double>)));
        Part part;
        std::memcpy(&part, reinterpret_cast<const char*>(v + j) + h * sizeof(part), sizeof(part));
        double* at = to + j * kLanes<T> + h * D;
        store(at, load(at) + static_cast<double>(w) * __builtin_convertvector(part, Vec<double>));
      }
    }
  }
  CROWDNAL_INLINE void add(int64_t row, T w, const T* v, int64_t classes) const {
    double* __restrict to = sums + row * stride;
    for (int64_t k = 0; k < classes; ++k) to[k] += static_cast<double>(w) * v[k];
  }
};

// Zeroed, each row of whole vectors in cache lines of its own.
class Sums {
 public:
  explicit Sums(int64_t size) : memory_(size + kLine, 0.0) {}
  double* data() {
    const auto address = reinterpret_cast<uintptr_t>(memory_.data());
    return memory_.data() + (-address % (kLine * sizeof(double))) / sizeof(double);
  }

 private:
  static constexpr int64_t kLine = 8;
  std::vector<double> memory_;
};

// How many tables the annotations are worth that are summed as they lie in memory, `each` annotations a cell at least.
// Depends on nothing but sizes, so that sums do not depend on the threads.
inline int64_t count_tables(int64_t nnz, const Shape& shape, int64_t each) {
  const int64_t cells = std::max<int64_t>(1, shape.num_annotators * shape.matrix());
  return std::min<int64_t>(32, nnz / (each * cells));
}

// out = the sum of rows first..last-1 of `count` tables of `rows` rows, which lie behind each other
// out: [last - first, classes]
template <class T>
void sum_tables(const CountTable<T>& tables, int64_t count, int64_t rows, int64_t first, int64_t last, int64_t classes,
                T* out);

// out[r, y, k] = sum_{n of r with label y} weight_n values[item_n, k]                    out: [R, labels, classes]
// `runs` is read where `count_tables` of kReuse is 0.
template <class T>
void label_counts(const T* values, const T* weight, const int64_t* label, const Index& index, const Runs& runs,
                  const Shape& shape, T* out);
constexpr int64_t kReuse = 8;

}  // namespace crowdnal::cpu
