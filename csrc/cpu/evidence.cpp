// evidence and counts: each other's adjoints, the sufficient statistics of the joint link.
#include "cpu/evidence.h"

#include "cpu/by_cols.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "ops.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

namespace {

constexpr int64_t kMaxTables = 32;
constexpr int64_t kAnnotationsPerCell = 8;  // a table that is not reused this often is not worth its clearing

template <int64_t K, class T>
CROWDNAL_INLINE void sum_evidence_of(const Evidence<T>& e, const Index& index, const T* start, int64_t begin,
                                     int64_t end, T* out) {
  for (int64_t i = begin; i < end; ++i) {
    T held[K > 0 ? K : 1];
    T* __restrict sum = K > 0 ? held : out + (i - begin) * e.classes;
    const int64_t classes = K > 0 ? K : e.classes;
    for (int64_t k = 0; k < classes; ++k) sum[k] = start ? start[i * classes + k] : T(0);
    for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) {
      const T w = e.weight ? e.weight[n] : T(1);
      if (w == 0) continue;
      const T* row = e.table + (e.label ? index.annotator[n] * e.labels + e.label[n] : n) * classes;
      for (int64_t k = 0; k < classes; ++k) sum[k] += w * row[k];
    }
    if constexpr (K > 0) {
      for (int64_t k = 0; k < K; ++k) out[(i - begin) * K + k] = held[k];
    }
  }
}

// table[key(n)] += weight[n] values[item_n] over positions begin..end-1 of `order` (null: of the annotations
// themselves); `base` null: all rows belong to one annotator.
template <int64_t K, class T, class U>
CROWDNAL_INLINE void add_counts_of(const T* values, const T* weight, const int64_t* label, const Index& index,
                                   const int64_t* order, bool one_annotator, int64_t begin, int64_t end, int64_t labels,
                                   int64_t cols, U* __restrict table) {
  const int64_t classes = K > 0 ? K : cols;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t n = order ? order[p] : p;
    const U w = weight ? weight[n] : T(1);
    const T* v = values + index.item[n] * classes;
    U* __restrict row = table + ((one_annotator ? 0 : index.annotator[n] * labels) + label[n]) * classes;
    for (int64_t k = 0; k < classes; ++k) row[k] += w * v[k];
  }
}

template <class T, class U>
CROWDNAL_CLONES void add_counts(const T* values, const T* weight, const int64_t* label, const Index& index,
                                const int64_t* order, bool one_annotator, int64_t begin, int64_t end, int64_t labels,
                                int64_t cols, U* table) {
#define BODY(K) add_counts_of<K>(values, weight, label, index, order, one_annotator, begin, end, labels, cols, table)
  CROWDNAL_BY_COLS(cols, BODY)
#undef BODY
}

}  // namespace

template <class T>
CROWDNAL_CLONES void sum_evidence(const Evidence<T>& evidence, const Index& index, const T* start, int64_t begin,
                                  int64_t end, T* out) {
#define BODY(K) sum_evidence_of<K>(evidence, index, start, begin, end, out)
  CROWDNAL_BY_COLS(evidence.classes, BODY)
#undef BODY
}

template <class T>
void count_run(const T* values, const T* weight, const int64_t* label, const Index& index, int64_t first, int64_t last,
               int64_t labels, int64_t classes, T* out, std::vector<double>& scratch) {
  if (last - first <= kBlock) {  // only the rows that occur are touched
    add_counts(values, weight, label, index, index.order, true, first, last, labels, classes, out);
    return;
  }
  scratch.assign(labels * classes, 0.0);
  add_counts(values, weight, label, index, index.order, true, first, last, labels, classes, scratch.data());
  for (int64_t e = 0; e < labels * classes; ++e) out[e] += static_cast<T>(scratch[e]);
}

int64_t count_tables(int64_t nnz, const Shape& shape) {
  const int64_t cells = std::max<int64_t>(1, shape.num_annotators * shape.matrix());
  return std::min(kMaxTables, nnz / (kAnnotationsPerCell * cells));
}

template <class T>
void counts(const T* values, const T* weight, const int64_t* label, const Index& index, const Shape& shape, T* out) {
  const int64_t tables = count_tables(index.nnz, shape), cells = shape.num_annotators * shape.matrix();
  if (tables == 0) {
    parallel_for(0, index.nnz, grain(shape.cols * 4), [&](int64_t begin, int64_t end) {
      std::vector<double> scratch;
      for_each_annotator(index, begin, end, [&](int64_t first, int64_t last) {
        T* matrix = out + index.annotator[index.order[first]] * shape.matrix();
        count_run(values, weight, label, index, first, last, shape.rows, shape.cols, matrix, scratch);
      });
    });
    return;
  }
  // Many annotations for each cell: through them as they lie in memory.
  std::vector<double> sums(tables * cells, 0.0);
  parallel_for(0, tables, grain(index.nnz / tables * shape.cols), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      add_counts(values, weight, label, index, static_cast<const int64_t*>(nullptr), false, index.nnz * t / tables,
                 index.nnz * (t + 1) / tables, shape.rows, shape.cols, sums.data() + t * cells);
    }
  });
  parallel_for(0, cells, grain(tables), [&](int64_t begin, int64_t end) {
    for (int64_t e = begin; e < end; ++e) {
      double total = 0;
      for (int64_t t = 0; t < tables; ++t) total += sums[t * cells + e];
      out[e] = static_cast<T>(total);
    }
  });
}

#define CROWDNAL_INSTANTIATE(T)                                                                                      \
  template void sum_evidence<T>(const Evidence<T>&, const Index&, const T*, int64_t, int64_t, T*);                   \
  template void count_run<T>(const T*, const T*, const int64_t*, const Index&, int64_t, int64_t, int64_t, int64_t,   \
                             T*, std::vector<double>&);                                                              \
  template void counts<T>(const T*, const T*, const int64_t*, const Index&, const Shape&, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

Tensor evidence_op(const Tensor& log_confusion, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                   const Tensor& annotator, const Tensor& order, const Tensor& label) {
  const Tensor a = check_confusion(log_confusion);
  const Shape shape = shape_of(a);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         false);
  const Index& view = index.view;
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  Tensor out = torch::stable::new_empty(a, {view.num_items, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const Evidence<T> evidence{pointer<T>(a), pointer<T>(weight), pointer<int64_t>(labels), shape.rows, shape.cols};
    const int64_t per_item = view.nnz / std::max<int64_t>(1, view.num_items) + 1;
    parallel_for(0, view.num_items, grain(shape.cols * per_item), [&](int64_t begin, int64_t end) {
      sum_evidence(evidence, view, static_cast<const T*>(nullptr), begin, end, output<T>(out) + begin * shape.cols);
    });
  });
  return out;
}

Tensor counts_op(const Tensor& values, OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                 const Tensor& annotator, const Tensor& order, const Tensor& label, int64_t num_annotators,
                 int64_t num_labels) {
  STD_TORCH_CHECK(values.dim() == 2, "crowdnal: values must have 2 dimensions");
  STD_TORCH_CHECK(num_annotators >= 0 && num_labels >= 0,
                  "crowdnal: num_annotators and num_labels must not be negative");
  const Shape shape{num_annotators, num_labels, values.size(1)};
  const CheckedIndex index = check_index(indptr, item, annotator, order, num_annotators, indptr.size(0) - 1,
                                         count_tables(annotator.size(0), shape) == 0);
  const Index& view = index.view;
  const Tensor v = check_values(values, "values", values, {view.num_items, shape.cols});
  const Tensor labels = check_labels(label, view.nnz, num_labels);
  if (weight) weight = check_values(*weight, "weight", v, {view.nnz});
  Tensor out = torch::stable::new_zeros(v, {num_annotators, num_labels, shape.cols});
  dispatch(v, [&](auto zero) {
    using T = decltype(zero);
    counts(pointer<T>(v), pointer<T>(weight), pointer<int64_t>(labels), view, shape, output<T>(out));
  });
  return out;
}

}  // namespace crowdnal::cpu
