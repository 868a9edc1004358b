// Joint link: nll_i = -log sum_k prior_i[k] prod_{n of i} A_r[y_n, k]^w_n, in log space (Dawid & Skene 1979).
// The stored confusion has the observed label outermost, as in the mixture link.
#include <vector>

#include "cpu/evidence.h"
#include "cpu/kernels.h"
#include "cpu/normalization.h"
#include "ops.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

namespace {

// rows[n] = log A_r[y_n]; a matrix is normalised once for all annotations of its annotator.  rows: [nnz, classes]
template <class T>
void log_rows(const T* confusion, const int64_t* label, const Index& view, const Shape& shape, Normalization kind,
              T* rows) {
  parallel_for(0, view.nnz, grain(shape.matrix() * 8), [&](int64_t begin, int64_t end) {
    Normalized<T> normalized(shape.rows, shape.cols, kind);
    for_each_annotator(view, begin, end, [&](int64_t first, int64_t last) {
      normalized.read(confusion + view.annotator[view.order[first]] * shape.matrix(), last - first);
      for (int64_t p = first; p < last; ++p) {
        const int64_t n = view.order[p];
        normalized.log_row(label[n], nullptr, rows + n * shape.cols);
      }
    });
  });
}

bool annotated(const Index& view, int64_t i) { return view.indptr[i] < view.indptr[i + 1]; }

// The number that `mean` divides by.
int64_t num_annotated(const Index& view) {
  int64_t count = 0;
  for (int64_t i = 0; i < view.num_items; ++i) count += annotated(view, i);
  return std::max<int64_t>(1, count);
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> joint_link_op(const Tensor& log_prior, const Tensor& confusion,
                                                 OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                 const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                 int64_t normalization, bool mean) {
  const Tensor a = check_confusion(confusion);
  const Shape shape = shape_of(a);  // rows = observed labels, cols = classes
  const auto kind = static_cast<Normalization>(normalization);
  const bool stored = kind == Normalization::kNone;  // log A itself: read where it lies
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         !stored);
  const Index& view = index.view;
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  const Tensor prior = check_values(log_prior, "log_prior", a, {view.num_items, shape.cols});
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  Tensor loss = torch::stable::new_empty(a, {});
  Tensor nll = torch::stable::new_empty(a, {view.num_items});
  Tensor posterior = torch::stable::new_empty(a, {view.num_items, shape.cols});
  Tensor rows = torch::stable::new_empty(a, {stored ? 0 : view.nnz, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const int64_t* y = pointer<int64_t>(labels);
    if (!stored) log_rows(pointer<T>(a), y, view, shape, kind, output<T>(rows));
    const Evidence<T> evidence{stored ? pointer<T>(a) : pointer<T>(rows), pointer<T>(weight), stored ? y : nullptr,
                               shape.rows, shape.cols};
    const int64_t per_item = view.nnz / std::max<int64_t>(1, view.num_items) + 8;
    parallel_for(0, view.num_items, grain(shape.cols * per_item), [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; block += kLanes) {
        const int64_t count = std::min(kLanes, end - block);
        T *t[kLanes], log_sums[kLanes];
        for (int64_t j = 0; j < count; ++j) t[j] = output<T>(posterior) + (block + j) * shape.cols;
        sum_evidence(evidence, view, pointer<T>(prior), block, block + count, t[0]);
        softmax_rows(t, log_sums, count, shape.cols);
        for (int64_t j = 0; j < count; ++j) {
          output<T>(nll)[block + j] = annotated(view, block + j) ? -log_sums[j] : T(0);
        }
      }
    });
    const T total = weighted_sum(pointer<T>(nll), static_cast<const T*>(nullptr), view.num_items);
    *output<T>(loss) = mean ? total / static_cast<T>(num_annotated(view)) : total;
  });
  return {loss, nll, posterior};
}

std::tuple<Tensor, Tensor> joint_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll,
                                                  const Tensor& log_prior, const Tensor& confusion,
                                                  OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                  const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                  const Tensor& posterior, int64_t normalization, bool mean,
                                                  bool need_log_prior, bool need_confusion) {
  const Tensor a = check_confusion(confusion);
  const Shape shape = shape_of(a);
  const auto kind = static_cast<Normalization>(normalization);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         need_confusion);
  const Index& view = index.view;
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  const Tensor s = check_values(posterior, "posterior", a, {view.num_items, shape.cols});
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  if (grad_loss) grad_loss = check_values(*grad_loss, "grad_loss", a, {});
  if (grad_nll) grad_nll = check_values(*grad_nll, "grad_nll", a, {view.num_items});
  Tensor dlog_prior = torch::stable::new_empty(a, {view.num_items, shape.cols});
  Tensor dconfusion = torch::stable::new_zeros(
      a, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const T scale = grad_loss ? *pointer<T>(grad_loss) / static_cast<T>(mean ? num_annotated(view) : 1) : T(0);
    const T* upstream = pointer<T>(grad_nll);
    T* dt = output<T>(dlog_prior);
    parallel_for(0, view.num_items, grain(shape.cols), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const T u = annotated(view, i) ? scale + (upstream ? upstream[i] : T(0)) : T(0);
        for (int64_t k = i * shape.cols; k < (i + 1) * shape.cols; ++k) dt[k] = -u * pointer<T>(s)[k];
      }
    });
    if (!need_confusion) return;
    T* out = output<T>(dconfusion);
    const int64_t* y = pointer<int64_t>(labels);
    if (kind == Normalization::kNone) return counts(dt, pointer<T>(weight), y, view, shape, out);
    parallel_for(0, view.nnz, grain(shape.matrix() * 8), [&](int64_t begin, int64_t end) {
      Normalized<T> normalized(shape.rows, shape.cols, kind);
      std::vector<double> scratch;
      for_each_annotator(view, begin, end, [&](int64_t first, int64_t last) {
        const int64_t offset = view.annotator[view.order[first]] * shape.matrix();
        count_run(dt, pointer<T>(weight), y, view, first, last, shape.rows, shape.cols, out + offset, scratch);
        normalized.pull_back(pointer<T>(a) + offset, out + offset);
      });
    });
  });
  if (!need_log_prior) dlog_prior = torch::stable::new_empty(a, {0, shape.cols});
  return {dlog_prior, dconfusion};
}

}  // namespace crowdnal::cpu
