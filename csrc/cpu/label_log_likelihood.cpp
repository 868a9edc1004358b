// label_log_likelihood and label_counts: each other's adjoints, the sufficient statistics of the joint link.
#include "cpu/label_log_likelihood.h"

namespace crowdnal::cpu {
namespace {

// Copies of what describes the work, not references: a store of vectors may change anything that is in memory, and
// whatever it might have changed is read again for every annotation.
template <class T, int N>
CROWDNAL_INLINE void sum_terms_of(const LabelTerms<T> terms, const Index index, int64_t classes, int64_t begin,
                                  int64_t end, T* out) {
  const Row<T, N> row(classes);
  for (int64_t i = begin; i < end; ++i) {
    Vec<T> t[N] = {};
    add_terms(terms, index, row, i, t);
    row.write(t, out, i, end);
  }
}

// Items begin..end-1.                                                                     out: [B, classes]
template <class T>
CROWDNAL_CLONES void sum_terms(const LabelTerms<T>& terms, const Index& index, int64_t classes, int64_t begin,
                               int64_t end, T* out) {
  if (classes <= kLanes<T>) return sum_terms_of<T, 1>(terms, index, classes, begin, end, out);
  if (classes <= 2 * kLanes<T>) return sum_terms_of<T, 2>(terms, index, classes, begin, end, out);
  for (int64_t i = begin; i < end; ++i) {
    T* t = out + i * classes;
    for (int64_t k = 0; k < classes; ++k) t[k] = 0;
    add_terms(terms, index, classes, i, t);
  }
}

template <class T, int N>
CROWDNAL_INLINE void posteriors_of(const LabelTerms<T> terms, const Index index, const Prior<T> prior, int64_t classes,
                                   int64_t begin, int64_t end, T* posterior, T* nll) {
  constexpr int64_t L = kLanes<T>;
  const Row<T, N> row(classes);
  T block[L * N * L] = {}, log_sum[L];
  for (int64_t first = begin; first < end; first += L) {
    const int64_t count = std::min(L, end - first);
    posterior_block(terms, index, prior, row, first, count, block, log_sum);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t i = first + j;
      Vec<T> done[N];
      for (int64_t v = 0; v < N; ++v) done[v] = load(block + (j * N + v) * L);
      row.write(done, posterior, i, end);
      nll[i] = index.indptr[i] < index.indptr[i + 1] ? -log_sum[j] : T(0);
    }
  }
}

// Positions begin..end-1 of `order` (null: the annotations as they lie); `one`: all of the annotator whose matrix `out`
// is.
template <class T, class Out>
CROWDNAL_CLONES void add_counts(const T* values, const LabelTerms<T>& at, const Index& index, const int64_t* order,
                                bool one, int64_t begin, int64_t end, int64_t classes, int64_t stride, Out* out) {
  for (int64_t p = begin; p < end; ++p) {
    const int64_t n = order ? order[p] : p;
    const Out w = at.factor(n);
    const T* v = values + index.item[n] * classes;
    Out* __restrict row = out + (one ? at.label[n] : at.row(index, n)) * stride;
    for (int64_t k = 0; k < classes; ++k) row[k] += w * v[k];
  }
}

template <class T, int N>
CROWDNAL_INLINE void fill_table_of(const T* values, const LabelTerms<T> at, const Index index, int64_t begin,
                                   int64_t end, int64_t classes, const CountTable<T> table) {
  const Row<T, N> row(classes);
  for (int64_t n = begin; n < end; ++n) {
    Vec<T> v[N];
    row.read(values, index.item[n], index.num_items, v);
    table.template add<N>(at.row(index, n), at.factor(n), v);
  }
}

// Annotations begin..end-1 into a table.
template <class T>
CROWDNAL_CLONES void fill_table(const T* values, const LabelTerms<T>& at, const Index& index, int64_t begin,
                                int64_t end, int64_t classes, const CountTable<T>& table) {
  if (classes <= kLanes<T>) return fill_table_of<T, 1>(values, at, index, begin, end, classes, table);
  if (classes <= 2 * kLanes<T>) return fill_table_of<T, 2>(values, at, index, begin, end, classes, table);
  for (int64_t n = begin; n < end; ++n) {
    table.add(at.row(index, n), at.factor(n), values + index.item[n] * classes, classes);
  }
}

}  // namespace

template <class T>
CROWDNAL_CLONES void posteriors(const LabelTerms<T>& terms, const Index& index, const Prior<T>& prior, int64_t classes,
                                int64_t begin, int64_t end, T* posterior, T* nll) {
  if (classes <= kLanes<T>) {
    return posteriors_of<T, 1>(terms, index, prior, classes, begin, end, posterior, nll);
  }
  if (classes <= 2 * kLanes<T>) {
    return posteriors_of<T, 2>(terms, index, prior, classes, begin, end, posterior, nll);
  }
  for (int64_t i = begin; i < end; ++i) {
    const T log_sum = posterior_row(terms, index, prior, classes, i, posterior + i * classes);
    nll[i] = index.indptr[i] < index.indptr[i + 1] ? -log_sum : T(0);
  }
}

template <class T>
void sum_tables(const CountTable<T>& tables, int64_t count, int64_t rows, int64_t first, int64_t last, int64_t classes,
                T* out) {
  parallel_for(first, last, tasks_per_thread(count * classes), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t k = 0; k < classes; ++k) {
        double total = 0;
        for (int64_t t = 0; t < count; ++t) total += tables.sums[(t * rows + r) * tables.stride + k];
        out[(r - first) * classes + k] = static_cast<T>(total);
      }
    }
  });
}

template <class T>
void label_counts(const T* values, const T* weight, const int64_t* label, const Index& index, const Runs& runs,
                  const Shape& shape, T* out) {
  const LabelTerms<T> at{nullptr, 0, shape.rows, weight, label};
  const int64_t count = count_tables(index.nnz, shape, kReuse), classes = shape.cols;
  if (count > 0) {
    const int64_t stride = CountTable<T>::stride_for(classes), rows = shape.num_annotators * shape.rows;
    Sums sums(count * rows * stride);
    parallel_for(0, count, tasks_per_thread(index.nnz / count * classes), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        fill_table<T>(values, at, index, index.nnz * t / count, index.nnz * (t + 1) / count, classes,
                      {sums.data() + t * rows * stride, stride});
      }
    });
    return sum_tables<T>({sums.data(), stride}, count, rows, 0, rows, classes, out);
  }
  const MatricesOut<T> place{out, index, runs, shape};
  for_each_run(index, runs, tasks_per_thread(classes * 4), [&](int64_t run, int64_t first, int64_t last) {
    T* matrix = place(run);
    if (last - first <= kSegmentBlock) {
      std::fill_n(matrix, shape.matrix(), T(0));
      add_counts(values, at, index, index.order, true, first, last, classes, classes, matrix);
      return;
    }
    std::vector<double> sums(shape.matrix(), 0.0);
    add_counts(values, at, index, index.order, true, first, last, classes, classes, sums.data());
    for (int64_t e = 0; e < shape.matrix(); ++e) matrix[e] = static_cast<T>(sums[e]);
  });
  place.finish();
}

#define CROWDNAL_INSTANTIATE(T)                                                                                        \
  template void posteriors<T>(const LabelTerms<T>&, const Index&, const Prior<T>&, int64_t, int64_t, int64_t, T*, T*); \
  template void sum_tables<T>(const CountTable<T>&, int64_t, int64_t, int64_t, int64_t, int64_t, T*);                  \
  template void label_counts<T>(const T*, const T*, const int64_t*, const Index&, const Runs&, const Shape&, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

namespace {

Tensor label_log_likelihood_op(const Tensor& log_confusion, OptionalTensor weight, const Tensor& indptr,
                               const Tensor& item, const Tensor& annotator, const Tensor& order, OptionalTensor plan,
                               const Tensor& label) {
  const Tensor stored = check_confusion(log_confusion);
  const Shape shape = shape_of(stored);
  const CheckedIndex index = check_index(indptr, item, annotator, order, plan, shape.num_annotators, false);
  const Index& view = index.view;
  const Tensor a = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, index, shape.rows);
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  Tensor out = empty(a, {view.num_items, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const LabelTerms<T> terms{pointer<T>(a), shape.num_annotators * shape.rows, shape.rows, pointer<T>(weight),
                              pointer<int64_t>(labels)};
    const int64_t per_item = view.nnz / std::max<int64_t>(1, view.num_items) + 1;
    parallel_for(0, view.num_items, tasks_per_thread(shape.cols * per_item),
                 [&](int64_t begin, int64_t end) { sum_terms(terms, view, shape.cols, begin, end, output<T>(out)); });
  });
  return out;
}

Tensor label_counts_op(const Tensor& values, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                       const Tensor& annotator, const Tensor& order, OptionalTensor plan, const Tensor& label,
                       int64_t num_annotators, int64_t num_labels) {
  STD_TORCH_CHECK(values.dim() == 2, "crowdnal: values must have 2 dimensions");
  check_floating(values, "values");
  const Shape shape = check_sizes(num_annotators, num_labels, values.size(1), "num_labels");
  const CheckedIndex index = check_index(indptr, item, annotator, order, plan, num_annotators,
                                         count_tables(length(annotator, "annotator"), shape, kReuse) == 0);
  const Index& view = index.view;
  const Tensor v = check_values(values, "values", values, {view.num_items, shape.cols});
  const Tensor labels = check_labels(label, index, num_labels);
  if (weight) weight = check_values(*weight, "weight", v, {view.nnz});
  Tensor out = empty(v, {num_annotators, num_labels, shape.cols});
  dispatch(v, [&](auto zero) {
    using T = decltype(zero);
    label_counts(pointer<T>(v), pointer<T>(weight), pointer<int64_t>(labels), view, index.runs, shape, output<T>(out));
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) {
  m.impl("label_log_likelihood", TORCH_BOX(&label_log_likelihood_op));
  m.impl("label_counts", TORCH_BOX(&label_counts_op));
}

}  // namespace crowdnal::cpu
