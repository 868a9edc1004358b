// mix, mix_items, mix_annotators: each other's adjoints, so gradients of any order are again these three.
#include <vector>

#include "cpu/kernels.h"
#include "ops.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

template <class T>
void mix_items(const T* grad, const T* confusion, T* out, const Index& index, const Shape& shape) {
  parallel_for(0, index.num_items, grain(shape.matrix() * (index.nnz / std::max<int64_t>(1, index.num_items) + 1)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   T* row = out + i * shape.rows;
                   std::fill_n(row, shape.rows, T(0));
                   for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) {
                     const T* w = confusion + index.annotator[n] * shape.matrix();
                     const T* g = grad + n * shape.cols;
                     for (int64_t c = 0; c < shape.rows; ++c, w += shape.cols) {
                       T sum = 0;
#pragma omp simd reduction(+ : sum)
                       for (int64_t k = 0; k < shape.cols; ++k) sum += w[k] * g[k];
                       row[c] += sum;
                     }
                   }
                 }
               });
}

template <class T>
void mix_annotators(const T* scores, const T* grad, T* out, const Index& index, const Shape& shape) {
  parallel_for(0, index.nnz, grain(shape.matrix()), [&](int64_t begin, int64_t end) {
    std::vector<T> partial;
    for_each_annotator(index, begin, end, [&](int64_t first, int64_t last) {
      T* total = out + index.annotator[index.order[first]] * shape.matrix();
      for (int64_t block = first; block < last; block += kBlock) {
        T* sum = total;
        if (block > first) {
          partial.assign(shape.matrix(), T(0));
          sum = partial.data();
        }
        for (int64_t p = block; p < std::min(last, block + kBlock); ++p) {
          const int64_t n = index.order[p];
          const T* z = scores + index.item[n] * shape.rows;
          const T* g = grad + n * shape.cols;
          for (int64_t c = 0; c < shape.rows; ++c) {
            T* row = sum + c * shape.cols;
            for (int64_t k = 0; k < shape.cols; ++k) row[k] += z[c] * g[k];
          }
        }
        if (block > first) {
          for (int64_t e = 0; e < shape.matrix(); ++e) total[e] += partial[e];
        }
      }
    });
  });
}

template <class T>
void sum_items(const T* values, T* out, T scale, const Index& index, int64_t width) {
  parallel_for(0, index.num_items, grain(width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* row = out + i * width;
      std::fill_n(row, width, T(0));
      for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) {
        for (int64_t d = 0; d < width; ++d) row[d] += scale * values[n * width + d];
      }
    }
  });
}

template <class T>
T weighted_sum(const T* values, const T* weight, int64_t count) {
  double total = 0;
  for (int64_t block = 0; block < count; block += kBlock) {
    double sum = 0;
    for (int64_t n = block; n < std::min(count, block + kBlock); ++n) {
      sum += weight ? static_cast<double>(weight[n]) * values[n] : static_cast<double>(values[n]);
    }
    total += sum;
  }
  return static_cast<T>(total);
}

#define CROWDNAL_INSTANTIATE(T)                                                         \
  template void mix_items<T>(const T*, const T*, T*, const Index&, const Shape&);      \
  template void mix_annotators<T>(const T*, const T*, T*, const Index&, const Shape&); \
  template void sum_items<T>(const T*, T*, T, const Index&, int64_t);                  \
  template T weighted_sum<T>(const T*, const T*, int64_t);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

Tensor mix_op(const Tensor& scores, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
              const Tensor& annotator, const Tensor& order) {
  const Tensor w = check_confusion(confusion);
  const Shape shape = shape_of(w);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1, false);
  const Index& view = index.view;
  const Tensor z = check_values(scores, "scores", w, {view.num_items, shape.rows});
  Tensor out = torch::stable::new_empty(w, {view.nnz, shape.cols});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    parallel_for(0, view.nnz, grain(shape.matrix()), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        mix_row<T>(pointer<T>(z) + view.item[n] * shape.rows, pointer<T>(w) + view.annotator[n] * shape.matrix(),
                   nullptr, output<T>(out) + n * shape.cols, shape.rows, shape.cols);
      }
    });
  });
  return out;
}

Tensor mix_items_op(const Tensor& grad, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
                    const Tensor& annotator, const Tensor& order) {
  const Tensor w = check_confusion(confusion);
  const Shape shape = shape_of(w);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1, false);
  const Tensor g = check_values(grad, "grad", w, {index.view.nnz, shape.cols});
  Tensor out = torch::stable::new_empty(w, {index.view.num_items, shape.rows});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    mix_items(pointer<T>(g), pointer<T>(w), output<T>(out), index.view, shape);
  });
  return out;
}

Tensor mix_annotators_op(const Tensor& scores, const Tensor& grad, const Tensor& indptr, const Tensor& item,
                         const Tensor& annotator, const Tensor& order, int64_t num_annotators) {
  STD_TORCH_CHECK(scores.dim() == 2 && grad.dim() == 2, "crowdnal: scores and grad must have 2 dimensions");
  const Shape shape{num_annotators, scores.size(1), grad.size(1)};
  const CheckedIndex index = check_index(indptr, item, annotator, order, num_annotators, indptr.size(0) - 1, true);
  const Tensor z = check_values(scores, "scores", scores, {index.view.num_items, shape.rows});
  const Tensor g = check_values(grad, "grad", scores, {index.view.nnz, shape.cols});
  Tensor out = torch::stable::new_zeros(scores, {num_annotators, shape.rows, shape.cols});
  dispatch(z, [&](auto zero) {
    using T = decltype(zero);
    mix_annotators(pointer<T>(z), pointer<T>(g), output<T>(out), index.view, shape);
  });
  return out;
}

}  // namespace crowdnal::cpu
