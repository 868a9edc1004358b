// Mixture link: nll_n = -log sum_k p_i[k] A_r[y_n, k], A_r = a normalised [labels, classes] matrix, in log space.
// The observed label is outermost: an annotation reads one row of its annotator's matrix, and the matrix is normalised
// once for all annotations of its annotator.
#include <cmath>
#include <limits>
#include <vector>

#include "common/math.h"
#include "cpu/kernels.h"
#include "cpu/simd.h"
#include "ops.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

namespace {

// A sum of softplus below this may have lost terms to underflow: its logarithm is then taken in log space.
constexpr double kTinySum = 1e-30;

// One annotator's matrix, read once: what its columns are divided by, and for softplus its values and slopes.
template <class T>
struct Columns {
  std::vector<T> log_sum, softplus, sigmoid, scratch;
};

template <class T>
CROWDNAL_CLONES void softmax_sums(const T* matrix, int64_t labels, int64_t classes, T* highest, T* log_sum) {
  for (int64_t k = 0; k < classes; ++k) highest[k] = matrix[k];
  for (int64_t y = 1; y < labels; ++y) {
    const T* row = matrix + y * classes;
    for (int64_t k = 0; k < classes; ++k) highest[k] = row[k] > highest[k] ? row[k] : highest[k];
  }
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    const T* row = matrix + y * classes;
    for (int64_t k = 0; k < classes; ++k) log_sum[k] += fast_exp(row[k] - highest[k]);
  }
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = fast_log(log_sum[k]) + highest[k];
}

// Returns the smallest sum; `log_sum` is only right where that is not tiny.
template <class T>
CROWDNAL_CLONES T softplus_sums(const T* __restrict matrix, int64_t labels, int64_t classes, T* __restrict softplus,
                                T* __restrict sigmoid, T* __restrict log_sum) {
  for (int64_t e = 0; e < labels * classes; ++e) {
    const T x = matrix[e], decay = fast_exp(x < 0 ? x : -x);
    softplus[e] = (x > 0 ? x : T(0)) + fast_log1p(decay);
    sigmoid[e] = (x < 0 ? decay : T(1)) / (T(1) + decay);
  }
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) log_sum[k] += softplus[y * classes + k];
  }
  T smallest = log_sum[0];
  for (int64_t k = 0; k < classes; ++k) smallest = log_sum[k] < smallest ? log_sum[k] : smallest;
  for (int64_t k = 0; k < classes; ++k) log_sum[k] = fast_log(log_sum[k]);
  return smallest;
}

// Fills `columns`; returns whether `softplus` and `sigmoid` hold what they say. For softplus without that, `softplus`
// holds its logarithm.
template <class T>
bool normalize(const T* matrix, int64_t labels, int64_t classes, Normalization kind, Columns<T>& columns) {
  const int64_t size = labels * classes;
  columns.log_sum.assign(classes, T(0));
  columns.scratch.resize(size);
  if (kind == Normalization::kNone) return false;
  if (kind == Normalization::kSoftmax) {
    softmax_sums(matrix, labels, classes, columns.scratch.data(), columns.log_sum.data());
    return false;
  }
  columns.softplus.resize(size);
  columns.sigmoid.resize(size);
  const T smallest = softplus_sums(matrix, labels, classes, columns.softplus.data(), columns.sigmoid.data(),
                                   columns.log_sum.data());
  if (smallest > T(kTinySum)) return true;
  for (int64_t e = 0; e < size; ++e) columns.softplus[e] = log_softplus(matrix[e]);
  softmax_sums(columns.softplus.data(), labels, classes, columns.scratch.data(), columns.log_sum.data());
  return false;
}

// log softplus of a row, from its softplus where that is not in the tail.
template <class T>
CROWDNAL_CLONES void log_softplus_row(const T* x, const T* softplus, int64_t classes, T* out) {
  for (int64_t k = 0; k < classes; ++k) {
    const T tail = x[k] - T(0.5) * fast_exp(x[k]), body = fast_log(softplus[k]);
    out[k] = x[k] < T(kSoftplusTail) ? tail : body;
  }
}

// t = prior + log_row - log_sum; `t` may be `log_row`.
template <class T>
CROWDNAL_CLONES void log_joint(const T* prior, const T* log_row, const T* log_sum, int64_t classes, T* t) {
  for (int64_t k = 0; k < classes; ++k) t[k] = prior[k] + log_row[k] - log_sum[k];
}

// out = slope (G - A sum_y G), with `out` holding G, the gradient for log A.
template <class T>
CROWDNAL_CLONES void through_softplus(const Columns<T>& columns, int64_t labels, int64_t classes, T* __restrict column,
                                      T* __restrict out) {
  for (int64_t k = 0; k < classes; ++k) column[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) column[k] += out[y * classes + k];
  }
  for (int64_t k = 0; k < classes; ++k) column[k] *= fast_exp(-columns.log_sum[k]);
  for (int64_t y = 0; y < labels; ++y) {
    const T* softplus = columns.softplus.data() + y * classes;
    const T* sigmoid = columns.sigmoid.data() + y * classes;
    T* row = out + y * classes;
    for (int64_t k = 0; k < classes; ++k) {
      // slope = sigmoid / softplus, which goes to 1 where both underflow
      const T share = softplus[k] > T(kTinySum) ? sigmoid[k] * row[k] / softplus[k] : row[k];
      row[k] = share - sigmoid[k] * column[k];
    }
  }
}

// The same for softmax, where the slope is 1: `log_values` are the stored ones.
template <class T>
CROWDNAL_CLONES void through_softmax(const T* log_values, const T* log_sum, int64_t labels, int64_t classes,
                                     T* __restrict column, T* __restrict out) {
  for (int64_t k = 0; k < classes; ++k) column[k] = 0;
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) column[k] += out[y * classes + k];
  }
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) {
      out[y * classes + k] -= fast_exp(log_values[y * classes + k] - log_sum[k]) * column[k];
    }
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> mixture_link_op(const Tensor& log_probs, const Tensor& confusion,
                                                   OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                   const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                   int64_t normalization, bool mean) {
  const Tensor a = check_confusion(confusion);
  const Shape shape = shape_of(a);  // rows = observed labels, cols = classes
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         true);
  const Index& view = index.view;
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  const Tensor log_p = check_values(log_probs, "log_probs", a, {view.num_items, shape.cols});
  const auto kind = static_cast<Normalization>(normalization);
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  Tensor loss = torch::stable::new_empty(a, {});
  Tensor nll = torch::stable::new_empty(a, {view.nnz});
  Tensor posterior = torch::stable::new_empty(a, {view.nnz, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const int64_t* y = pointer<int64_t>(labels);
    parallel_for(0, view.nnz, grain(kind == Normalization::kNone ? shape.cols * 8 : shape.matrix() * 8),
                 [&](int64_t begin, int64_t end) {
      Columns<T> columns;
      int64_t waiting[kLanes], count = 0;  // annotations whose joint is there, not yet its posterior
      T *rows[kLanes], log_sums[kLanes];
      const auto finish = [&] {
        softmax_rows(rows, log_sums, count, shape.cols);
        for (int64_t j = 0; j < count; ++j) output<T>(nll)[waiting[j]] = -log_sums[j];
        count = 0;
      };
      for_each_annotator(view, begin, end, [&](int64_t first, int64_t last) {
        const T* matrix = pointer<T>(a) + view.annotator[view.order[first]] * shape.matrix();
        const bool ready = normalize(matrix, shape.rows, shape.cols, kind, columns);
        const bool whole = ready && last - first >= shape.rows;  // then the logarithm of all of it is less work
        const T* values = kind == Normalization::kSoftplus ? columns.softplus.data() : matrix;
        if (whole) log_softplus_row(matrix, columns.softplus.data(), shape.matrix(), columns.softplus.data());
        for (int64_t p = first; p < last; ++p) {
          const int64_t n = view.order[p], row = y[n] * shape.cols;
          T* t = output<T>(posterior) + n * shape.cols;
          const bool pending = ready && !whole;
          if (pending) log_softplus_row(matrix + row, columns.softplus.data() + row, shape.cols, t);
          log_joint(pointer<T>(log_p) + view.item[n] * shape.cols, pending ? t : values + row, columns.log_sum.data(),
                    shape.cols, t);
          waiting[count] = n;
          rows[count++] = t;
          if (count == kLanes) finish();
        }
      });
      if (count > 0) finish();
    });
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(weight), view.nnz);
    *output<T>(loss) = mean ? total / static_cast<T>(std::max<int64_t>(1, view.nnz)) : total;
  });
  return {loss, nll, posterior};
}

// One annotator's gradient: G[y, k] = -sum u_n posterior_n[k] over its annotations with label y, through the
// normalisation. `out` is zeroed.
template <class T>
void matrix_gradient(const T* matrix, const T* posterior, const T* upstream, const int64_t* label, const Index& view,
                     int64_t first, int64_t last, const Shape& shape, Normalization kind, T* out,
                     Columns<T>& columns) {
  const int64_t classes = shape.cols;
  for (int64_t p = first; p < last; ++p) {
    const int64_t n = view.order[p];
    T* row = out + label[n] * classes;
    for (int64_t k = 0; k < classes; ++k) row[k] -= upstream[n] * posterior[n * classes + k];
  }
  if (kind == Normalization::kNone) return;
  const bool ready = normalize(matrix, shape.rows, classes, kind, columns);
  T* column = columns.scratch.data();
  if (ready) {
    through_softplus(columns, shape.rows, classes, column, out);
    return;
  }
  const bool is_softplus = kind == Normalization::kSoftplus;  // then with the logarithms of tiny values
  through_softmax(is_softplus ? columns.softplus.data() : matrix, columns.log_sum.data(), shape.rows, classes, column,
                  out);
  for (int64_t e = 0; is_softplus && e < shape.matrix(); ++e) out[e] *= log_softplus_grad(matrix[e]);
}

std::tuple<Tensor, Tensor> mixture_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll,
                                                    const Tensor& log_probs, const Tensor& confusion,
                                                    OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                    const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                    const Tensor& posterior,
                                                    int64_t normalization, bool mean, bool need_log_probs,
                                                    bool need_confusion) {
  const Tensor a = check_confusion(confusion);
  const Shape shape = shape_of(a);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         need_confusion);
  const Index& view = index.view;
  const Tensor labels = check_labels(label, view.nnz, shape.rows);
  const Tensor r = check_values(posterior, "posterior", a, {view.nnz, shape.cols});
  const auto kind = static_cast<Normalization>(normalization);
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  if (grad_loss) grad_loss = check_values(*grad_loss, "grad_loss", a, {});
  if (grad_nll) grad_nll = check_values(*grad_nll, "grad_nll", a, {view.nnz});
  Tensor dlog_probs = torch::stable::new_empty(a, {need_log_probs ? view.num_items : 0, shape.cols});
  Tensor dconfusion = torch::stable::new_zeros(
      a, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1);
    const T scale = grad_loss ? *pointer<T>(grad_loss) / count : T(0);
    const T* weights = pointer<T>(weight);
    const T* upstream = pointer<T>(grad_nll);
    std::vector<T> u(view.nnz);
    for (int64_t n = 0; n < view.nnz; ++n) {
      u[n] = (weights ? scale * weights[n] : scale) + (upstream ? upstream[n] : T(0));
    }
    if (need_log_probs) {
      parallel_for(0, view.num_items, grain(shape.cols * 4), [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          T* row = output<T>(dlog_probs) + i * shape.cols;
          std::fill_n(row, shape.cols, T(0));
          for (int64_t n = view.indptr[i]; n < view.indptr[i + 1]; ++n) {
            const T* posterior_row = pointer<T>(r) + n * shape.cols;
            for (int64_t k = 0; k < shape.cols; ++k) row[k] -= u[n] * posterior_row[k];
          }
        }
      });
    }
    if (!need_confusion) return;
    parallel_for(0, view.nnz, grain(shape.matrix() * 8), [&](int64_t begin, int64_t end) {
      Columns<T> columns;
      for_each_annotator(view, begin, end, [&](int64_t first, int64_t last) {
        const int64_t offset = view.annotator[view.order[first]] * shape.matrix();
        matrix_gradient(pointer<T>(a) + offset, pointer<T>(r), u.data(), pointer<int64_t>(labels), view, first, last,
                        shape, kind, output<T>(dconfusion) + offset, columns);
      });
    });
  });
  return {dlog_probs, dconfusion};
}

}  // namespace crowdnal::cpu
