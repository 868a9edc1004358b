// Mixture link: nll_n = -log sum_k p_i[k] A_r[y_n, k], A_r = a normalised [labels, classes] matrix, in log space.
// The observed label is outermost: an annotation reads one row of its annotator's matrix.
#include <cmath>
#include <limits>
#include <vector>

#include "common/math.h"
#include "cpu/kernels.h"
#include "ops.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

// log sum_y exp(activation(matrix[y, k])) for every class k: what a column is divided by.
template <class T>
void log_normalizer(const T* matrix, int64_t labels, int64_t classes, Normalization kind, std::vector<T>& out) {
  out.assign(classes, T(0));
  if (kind == Normalization::kNone) return;
  std::vector<T> highest(classes, -std::numeric_limits<T>::infinity());
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) {
      highest[k] = std::max(highest[k], activation(matrix[y * classes + k], kind));
    }
  }
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) out[k] += std::exp(activation(matrix[y * classes + k], kind) - highest[k]);
  }
  for (int64_t k = 0; k < classes; ++k) out[k] = std::log(out[k]) + highest[k];
}

std::tuple<Tensor, Tensor, Tensor> mixture_link_op(const Tensor& log_probs, const Tensor& confusion,
                                                   OptionalTensor weight, const Tensor& indptr, const Tensor& item,
                                                   const Tensor& annotator, const Tensor& order, const Tensor& label,
                                                   int64_t normalization, bool mean) {
  const Tensor a = check_confusion(confusion);
  const Shape shape = shape_of(a);  // rows = observed labels, cols = classes
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1, true);
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
      std::vector<T> normalizer;
      for_each_annotator(view, begin, end, [&](int64_t first, int64_t last) {
        const T* matrix = pointer<T>(a) + view.annotator[view.order[first]] * shape.matrix();
        log_normalizer(matrix, shape.rows, shape.cols, kind, normalizer);
        for (int64_t p = first; p < last; ++p) {
          const int64_t n = view.order[p];
          const T* row = matrix + y[n] * shape.cols;
          const T* prior = pointer<T>(log_p) + view.item[n] * shape.cols;
          T* t = output<T>(posterior) + n * shape.cols;
          T highest = -std::numeric_limits<T>::infinity();
          for (int64_t k = 0; k < shape.cols; ++k) {
            t[k] = prior[k] + activation(row[k], kind) - normalizer[k];
            highest = std::max(highest, t[k]);
          }
          T sum = 0;
          const T shift = std::isinf(highest) ? T(0) : highest;
          for (int64_t k = 0; k < shape.cols; ++k) sum += (t[k] = std::exp(t[k] - shift));
          const T inverse = sum > 0 ? T(1) / sum : T(0);
          for (int64_t k = 0; k < shape.cols; ++k) t[k] *= inverse;
          output<T>(nll)[n] = -(std::log(sum) + shift);
        }
      });
    });
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(weight), view.nnz);
    *output<T>(loss) = mean ? total / static_cast<T>(std::max<int64_t>(1, view.nnz)) : total;
  });
  return {loss, nll, posterior};
}

// One annotator's gradient: G[y, k] = -sum u_n posterior_n[k] over its annotations with label y, through the
// normalisation: activation'(x) (G - A sum_y G). `out` is zeroed.
template <class T>
void matrix_gradient(const T* matrix, const T* posterior, const T* upstream, const int64_t* label, const Index& view,
                     int64_t first, int64_t last, const Shape& shape, Normalization kind, T* out,
                     std::vector<T>& normalizer, std::vector<T>& column) {
  const int64_t classes = shape.cols;
  for (int64_t p = first; p < last; ++p) {
    const int64_t n = view.order[p];
    T* row = out + label[n] * classes;
    for (int64_t k = 0; k < classes; ++k) row[k] -= upstream[n] * posterior[n * classes + k];
  }
  if (kind == Normalization::kNone) return;
  log_normalizer(matrix, shape.rows, classes, kind, normalizer);
  column.assign(classes, T(0));
  for (int64_t e = 0; e < shape.matrix(); ++e) column[e % classes] += out[e];
  for (int64_t e = 0; e < shape.matrix(); ++e) {
    const int64_t k = e % classes;
    const T probability = std::exp(activation(matrix[e], kind) - normalizer[k]);
    out[e] = activation_grad(matrix[e], kind) * (out[e] - probability * column[k]);
  }
}

std::tuple<Tensor, Tensor> mixture_link_backward_op(OptionalTensor grad_loss, OptionalTensor grad_nll,
                                                    const Tensor& log_probs, const Tensor& confusion,
                                                    OptionalTensor weight, const Tensor& indptr, const Tensor& item, const Tensor& annotator,
                                                    const Tensor& order, const Tensor& label, const Tensor& posterior,
                                                    int64_t normalization, bool mean, bool need_log_probs,
                                                    bool need_confusion) {
  const Tensor a = check_confusion(confusion);
  const Shape shape = shape_of(a);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1, need_confusion);
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
    const T scale = grad_loss ? *pointer<T>(grad_loss) / static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1) : T(0);
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
      std::vector<T> normalizer, column;
      for_each_annotator(view, begin, end, [&](int64_t first, int64_t last) {
        const int64_t offset = view.annotator[view.order[first]] * shape.matrix();
        matrix_gradient(pointer<T>(a) + offset, pointer<T>(r), u.data(), pointer<int64_t>(labels), view, first, last,
                        shape, kind, output<T>(dconfusion) + offset, normalizer, column);
      });
    });
  });
  return {dlog_probs, dconfusion};
}

}  // namespace crowdnal::cpu
