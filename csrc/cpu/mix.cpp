// mix, mix_items, mix_annotators: each other's adjoints, so gradients of any order are again these three.
#include <vector>

#include "cpu/kernels.h"
#include "ops.h"

namespace crowdnal::cpu {

using torch::stable::parallel_for;

template <class T>
void mix_items(const T* grad, const T* confusion, T* out, const Index& index, const Shape& shape) {
  const int64_t rows = shape.rows, cols = shape.cols;
  if (!by_annotator(shape)) {
    const int64_t per_item = index.nnz / std::max<int64_t>(1, index.num_items) + 1;
    parallel_for(0, index.num_items, grain(shape.matrix() * per_item), [&](int64_t begin, int64_t end) {
      std::fill(out + begin * rows, out + end * rows, T(0));
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) {
          add_matrix_row(confusion + index.annotator[n] * shape.matrix(), grad + n * cols, out + i * rows, rows, cols);
        }
      }
    });
    return;
  }
  std::vector<T> each(index.nnz * rows);
  parallel_for(0, index.nnz, grain(shape.matrix()), [&](int64_t begin, int64_t end) {
    for_each_group(index, begin, end, [&](const int64_t* n, int64_t count) {
      const T* g[kGroup];
      T* row[kGroup];
      for (int64_t j = 0; j < count; ++j) {
        g[j] = grad + n[j] * cols;
        row[j] = each.data() + n[j] * rows;
      }
      add_matrix_group(confusion + index.annotator[n[0]] * shape.matrix(), g, row, count, rows, cols);
    });
  });
  sum_items(each.data(), out, index, rows);
}

// Adds annotations first..last-1 of `order`, all of one annotator.
template <class T>
void add_outers(const T* scores, const T* grad, T* out, const Index& index, const Shape& shape, int64_t first,
                int64_t last) {
  const int64_t rows = shape.rows, cols = shape.cols;
  for_each_group(index, first, last, [&](const int64_t* n, int64_t count) {
    const T *z[kGroup], *g[kGroup];
    for (int64_t j = 0; j < count; ++j) {
      z[j] = scores + index.item[n[j]] * rows;
      g[j] = grad + n[j] * cols;
      if (!by_annotator(shape)) add_outer(z[j], g[j], out, rows, cols);
    }
    if (by_annotator(shape)) add_outer_group(z, g, out, count, rows, cols);
  });
}

template <class T>
void mix_annotators(const T* scores, const T* grad, T* out, const Index& index, const Shape& shape) {
  parallel_for(0, index.nnz, grain(shape.matrix()), [&](int64_t begin, int64_t end) {
    std::vector<T> partial;
    for_each_annotator(index, begin, end, [&](int64_t first, int64_t last) {
      T* total = out + index.annotator[index.order[first]] * shape.matrix();
      add_outers(scores, grad, total, index, shape, first, std::min(last, first + kBlock));
      for (int64_t block = first + kBlock; block < last; block += kBlock) {
        partial.assign(shape.matrix(), T(0));
        add_outers(scores, grad, partial.data(), index, shape, block, std::min(last, block + kBlock));
        for (int64_t e = 0; e < shape.matrix(); ++e) total[e] += partial[e];
      }
    });
  });
}

template <class T>
void sum_items(const T* values, T* out, const Index& index, int64_t width) {
  parallel_for(0, index.num_items, grain(width * 4), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      T* row = out + i * width;
      std::fill_n(row, width, T(0));
      for (int64_t n = index.indptr[i]; n < index.indptr[i + 1]; ++n) {
        for (int64_t d = 0; d < width; ++d) row[d] += values[n * width + d];
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
  template void sum_items<T>(const T*, T*, const Index&, int64_t);                     \
  template T weighted_sum<T>(const T*, const T*, int64_t);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

Tensor mix_op(const Tensor& scores, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
              const Tensor& annotator, const Tensor& order) {
  const Tensor w = check_confusion(confusion);
  const Shape shape = shape_of(w);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         by_annotator(shape));
  const Index& view = index.view;
  const Tensor z = check_values(scores, "scores", w, {view.num_items, shape.rows});
  Tensor out = torch::stable::new_empty(w, {view.nnz, shape.cols});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    mix(pointer<T>(z), pointer<T>(w), static_cast<const T*>(nullptr), output<T>(out), view, shape,
        [](const int64_t*, T* const*, int64_t) {});
  });
  return out;
}

Tensor mix_items_op(const Tensor& grad, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
                    const Tensor& annotator, const Tensor& order) {
  const Tensor w = check_confusion(confusion);
  const Shape shape = shape_of(w);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, indptr.size(0) - 1,
                                         by_annotator(shape));
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
