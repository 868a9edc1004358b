// One pass of EM over the annotations: each item's posterior, and what it adds to the counts of the next M-step while
// its annotations are at hand. Reads them in the order of the items alone, so that nothing has to be sorted.
#include <atomic>

#include "cpu/label_log_likelihood.h"

namespace crowdnal::cpu {
namespace {

template <class T>
struct Step {
  LabelTerms<T> terms;
  Prior<T> prior;  // no rows: the start, where the posterior is the votes' shares
  Index index;
  Shape shape;
  T* posterior;  // [N, classes]

  // Whether items first..last-1 have an annotator or a label that is out of range.
  CROWDNAL_INLINE bool any_outside(int64_t first, int64_t last) const {
    const uint64_t annotators = shape.num_annotators, labels = shape.rows;
    const int64_t begin = index.indptr[first], end = index.indptr[last];
    uint64_t bad = 0;
    for (int64_t n = begin; n < end; ++n) bad |= static_cast<uint64_t>(index.annotator[n]) >= annotators;
    for (int64_t n = begin; n < end; ++n) bad |= static_cast<uint64_t>(terms.label[n]) >= labels;
    return bad != 0;
  }

  // votes: [classes] to count in
  template <class Sum>
  CROWDNAL_INLINE void shares(int64_t i, Sum* votes, T* out) const {
    Sum total = 0;
    for (int64_t k = 0; k < shape.cols; ++k) votes[k] = 0;
    for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) {
      votes[terms.label[n]] += terms.factor(n);
      total += terms.factor(n);
    }
    for (int64_t k = 0; k < shape.cols; ++k) out[k] = total > 0 ? votes[k] / total : T(1) / shape.cols;
  }
  CROWDNAL_INLINE void shares(int64_t i, T* out) const {
    if (index.indptr[i + 1] - index.indptr[i] <= kSegmentBlock) return shares(i, out, out);
    std::vector<double> votes(shape.cols);
    shares(i, votes.data(), out);
  }

  CROWDNAL_INLINE bool annotated(int64_t i) const { return index.indptr[i] < index.indptr[i + 1]; }

  // What an item counts for the totals: 1 if it has an annotation of positive weight.
  CROWDNAL_INLINE T informed(int64_t i) const {
    if (!terms.weight) return T(annotated(i));
    T total = 0;
    for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) total += terms.weight[n];
    return T(total > 0);
  }

  int64_t total_row() const { return terms.rows; }  // of the table: behind those of the counts
};

// Returns whether all indices of items begin..end-1 were in range; `loss` is their nll. Step and table are copies: see
// terms.cpp.
template <class T, int N>
CROWDNAL_INLINE bool step_of(const Step<T> step, int64_t begin, int64_t end, const CountTable<T> table, double* loss) {
  constexpr int64_t L = kLanes<T>;
  const Row<T, N> row(step.shape.cols);
  T block[L * N * L] = {}, log_sum[L] = {};
  for (int64_t first = begin; first < end; first += L) {
    const int64_t count = std::min(L, end - first);
    if (step.any_outside(first, first + count)) return false;
    if (step.prior.rows) {
      posterior_block(step.terms, step.index, step.prior, row, first, count, block, log_sum);
    } else {
      for (int64_t j = 0; j < count; ++j) step.shares(first + j, block + j * N * L);
    }
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = first + j;
      Vec<T> v[N];
      for (int64_t n = 0; n < N; ++n) v[n] = load(block + (j * N + n) * L);
      row.write(v, step.posterior, i, end);
      for (int64_t n = step.index.indptr[i]; n < step.index.indptr[i + 1]; ++n) {
        table.template add<N>(step.terms.row(step.index, n), step.terms.factor(n), v);
      }
      table.template add<N>(step.total_row(), step.informed(i), v);
      if (step.prior.rows && step.annotated(i)) *loss -= log_sum[j];
    }
  }
  return true;
}

template <class T>
CROWDNAL_INLINE bool step_large(const Step<T>& step, int64_t begin, int64_t end, const CountTable<T>& table,
                                double* loss) {
  const int64_t classes = step.shape.cols;
  for (int64_t i = begin; i < end; ++i) {
    if (step.any_outside(i, i + 1)) return false;
    T* row = step.posterior + i * classes;
    if (step.prior.rows) {
      const T log_sum = posterior_row(step.terms, step.index, step.prior, classes, i, row);
      if (step.annotated(i)) *loss -= log_sum;
    } else {
      step.shares(i, row);
    }
    for (int64_t n = step.index.indptr[i]; n < step.index.indptr[i + 1]; ++n) {
      table.add(step.terms.row(step.index, n), step.terms.factor(n), row, classes);
    }
    table.add(step.total_row(), step.informed(i), row, classes);
  }
  return true;
}

template <class T>
CROWDNAL_CLONES bool run_step(const Step<T>& step, int64_t begin, int64_t end, const CountTable<T>& table,
                              double* loss) {
  if (step.shape.cols <= kLanes<T>) return step_of<T, 1>(step, begin, end, table, loss);
  if (step.shape.cols <= 2 * kLanes<T>) return step_of<T, 2>(step, begin, end, table, loss);
  return step_large(step, begin, end, table, loss);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> em_step_op(OptionalTensor log_prior, const Tensor& log_confusion,
                                                      OptionalTensor weight, const Tensor& indptr,
                                                      const Tensor& annotator, OptionalTensor order,
                                                      const Tensor& label) {
  const Tensor stored = check_confusion(log_confusion);
  const Shape shape = shape_of(stored);
  const int64_t nnz = length(annotator, "annotator"), num_items = count_items(indptr);
  const Tensor starts = check_long(indptr, "indptr", num_items + 1), who = check_long(annotator, "annotator", nnz),
               labels = check_long(label, "label", nnz);
  const Index index{pointer<int64_t>(starts), nullptr, pointer<int64_t>(who), nullptr, num_items, nnz};
  bool good = index.indptr[0] == 0 && index.indptr[num_items] == nnz;
  for (int64_t i = 0; i < num_items; ++i) good &= index.indptr[i] <= index.indptr[i + 1];
  STD_TORCH_CHECK(good, "crowdnal: indptr must run from 0 to ", nnz, " and must not decrease");
  if (is_half(stored)) check_range(index.annotator, nnz, "annotator", shape.num_annotators);
  const Tensor a = widened(stored, index.annotator, nnz);
  if (order) {  // not needed here, but wrong is wrong on every device
    const Tensor sorted = check_long(*order, "order", nnz);
    check_range(index.annotator, nnz, "annotator", shape.num_annotators);
    check_order(pointer<int64_t>(sorted), index.annotator, nnz, shape.num_annotators);
  }
  const bool shared = log_prior && log_prior->dim() == 2 && log_prior->size(0) == 1;
  if (log_prior) log_prior = check_values(*log_prior, "log_prior", a, {shared ? 1 : num_items, shape.cols});
  STD_TORCH_CHECK(log_prior || shape.rows == shape.cols, "crowdnal: without log_prior the labels must be the classes");
  if (weight) weight = check_values(*weight, "weight", a, {nnz});
  Tensor loss = empty(a, {}), posterior = empty(a, {num_items, shape.cols});
  Tensor counted = empty(a, {shape.num_annotators, shape.rows, shape.cols}), totals = empty(a, {shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = shape.num_annotators * shape.rows, stride = CountTable<T>::stride_for(shape.cols);
    const Step<T> step{{pointer<T>(a), rows, shape.rows, pointer<T>(weight), pointer<int64_t>(labels)},
                       {pointer<T>(log_prior), shared},
                       index,
                       shape,
                       output<T>(posterior)};
    const int64_t tables = std::max<int64_t>(1, count_tables(nnz, shape, 1));
    Sums sums(tables * (rows + 1) * stride);
    std::vector<double> losses(tables, 0.0);
    std::atomic<bool> outside{false};
    const int64_t cost = (nnz + 8 * num_items) / tables * shape.cols;
    parallel_for(0, tables, tasks_per_thread(cost), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const CountTable<T> table{sums.data() + t * (rows + 1) * stride, stride};
        if (!run_step(step, num_items * t / tables, num_items * (t + 1) / tables, table, &losses[t])) outside = true;
      }
    });
    STD_TORCH_CHECK(!outside, "crowdnal: an annotator or a label is out of range [0, ", shape.num_annotators,
                    ") or [0, ", shape.rows, ")");
    const CountTable<T> all{sums.data(), stride};
    sum_tables(all, tables, rows + 1, 0, rows, shape.cols, output<T>(counted));
    sum_tables(all, tables, rows + 1, rows, rows + 1, shape.cols, output<T>(totals));
    double total = 0;
    for (const double each : losses) total += each;
    *output<T>(loss) = static_cast<T>(total);
  });
  return {loss, posterior, counted, totals};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) { m.impl("em_step", TORCH_BOX(&em_step_op)); }

}  // namespace crowdnal::cpu
