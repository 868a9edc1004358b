// mix, mix_items, mix_annotators: each other's adjoints, so gradients of any order are again these three.
#include "cpu/mix.h"

#include "cpu/detail/runs.h"
#include "cpu/detail/small_step.h"

namespace crowdnal::cpu {
namespace {

// Large matrices are read once for a group of annotations of their annotator.
template <class T>
void mix_large(const MixInput<T>& input, const Index& index, const Runs& runs, const Shape& shape, T* out, T* nll) {
  const int64_t rows = shape.rows, cols = shape.cols;
  for_each_run(index, runs, tasks_per_thread(shape.matrix()), [&](int64_t, int64_t first, int64_t last) {
    const T* matrix = input.confusion + index.annotator[index.order[first]] * shape.matrix();
    for (int64_t begin = first; begin < last; begin += kGroup) {
      const int64_t count = std::min(kGroup, last - begin);
      const T* z[kGroup];
      T* h[kGroup];
      for (int64_t j = 0; j < count; ++j) {
        const int64_t n = index.order[begin + j], i = index.item[n];
        z[j] = input.scores + i * rows;
        h[j] = out + n * cols;
        if (input.shared && !input.mixing) {
          std::copy_n(input.shared + i * cols, cols, h[j]);
        } else {
          std::fill_n(h[j], cols, T(0));
        }
      }
      mix_group(z, matrix, h, count, rows, cols);
      for (int64_t j = 0; input.mixing && j < count; ++j) {
        const int64_t n = index.order[begin + j];
        const T* shared = input.shared + index.item[n] * cols;
        for (int64_t k = 0; k < cols; ++k) h[j][k] += input.mixing[n] * (shared[k] - h[j][k]);
      }
      for (int64_t j = 0; input.label && j < count; ++j) {
        const int64_t n = index.order[begin + j];
        const T target = h[j][input.label[n]];
        nll[n] = softmax_row(h[j], cols) - target;
      }
    }
  });
}

template <class T>
void unmix_large(const GradRows<T>& grad, const T* scores, const T* confusion, const Index& index, const Runs& runs,
                 const Shape& shape, bool need_items, T* matrices, T* each) {
  const int64_t rows = shape.rows, cols = shape.cols;
  const MatricesOut<T> place{matrices, index, runs, shape};
  for_each_run(index, runs, tasks_per_thread(shape.matrix()), [&](int64_t run, int64_t first, int64_t last) {
    const T* matrix = need_items ? confusion + index.annotator[index.order[first]] * shape.matrix() : nullptr;
    T* total = matrices ? place(run) : nullptr;
    std::vector<T> copies(kGroup * cols), partial;
    for (int64_t begin = first; begin < last; begin += kGroup) {
      const int64_t count = std::min(kGroup, last - begin), block = (begin - first) / kSegmentBlock;
      const T *z[kGroup], *g[kGroup];
      T* row[kGroup];
      for (int64_t j = 0; j < count; ++j) {
        const int64_t n = index.order[begin + j];
        z[j] = scores ? scores + index.item[n] * rows : nullptr;
        row[j] = each ? each + n * rows : nullptr;
        g[j] = grad.label ? copies.data() + j * cols : grad.values + n * cols;
        if (!grad.label) continue;
        std::fill_n(copies.data() + j * cols, cols, T(0));
        add_row(grad, n, copies.data() + j * cols, cols);
      }
      if (need_items) matrix_group(matrix, g, row, count, rows, cols);
      if (!matrices) continue;
      if (block > 0) partial.resize(shape.matrix());
      T* into = block > 0 ? partial.data() : total;
      outer_group(z, g, into, count, rows, cols, (begin - first) % kSegmentBlock == 0);
      if (block > 0 && (begin + count == last || (begin + count - first) % kSegmentBlock == 0)) {
        for (int64_t e = 0; e < shape.matrix(); ++e) total[e] += partial[e];
      }
    }
  });
  if (matrices) place.finish();
}

}  // namespace

static_assert(kSegmentBlock % kGroup == 0, "a group lies in one block");

template <class T>
void mix(const MixInput<T>& input, const Index& index, const Runs& runs, const Shape& shape, T* out, T* nll) {
  if (!is_small<T>(shape)) return mix_large(input, index, runs, shape, out, nll);
  parallel_for(0, index.nnz, tasks_per_thread(shape.matrix() + 8 * shape.cols),
               [&](int64_t begin, int64_t end) { mix_small(input, index, shape, begin, end, out, nll); });
}

template <class T>
void unmix(const GradRows<T>& grad, const T* scores, const T* confusion, const Index& index, const Runs& runs,
           const Shape& shape, T* items, T* matrices, T* each) {
  if (!is_small<T>(shape)) {
    unmix_large(grad, scores, confusion, index, runs, shape, items != nullptr, matrices, each);
    if (items) sum_items<T>({each}, index, shape.rows, items);
    return;
  }
  if (items) {
    const int64_t per_item = index.nnz / std::max<int64_t>(1, index.num_items) + 1;
    parallel_for(0, index.num_items, tasks_per_thread(shape.matrix() * per_item),
                 [&](int64_t begin, int64_t end) { items_small(grad, confusion, index, shape, begin, end, items); });
  }
  if (!matrices) return;
  const MatricesOut<T> place{matrices, index, runs, shape};
  for_each_run(index, runs, tasks_per_thread(shape.matrix()), [&](int64_t run, int64_t first, int64_t last) {
    outer_small(grad, scores, index, shape, first, last, place(run));
  });
  place.finish();
}

template <class T>
void sum_items(const GradRows<T>& values, const Index& index, int64_t width, T* out) {
  parallel_for(0, index.num_items, tasks_per_thread(width * 4), [&](int64_t begin, int64_t end) {
    sum_segments(values, index.nnz, index.indptr, begin, end, width, out);
  });
}

template <class T>
void sum_each(const T* rows, bool compact, const Index& index, int64_t width, T* out) {
  if (!compact) return sum_items<T>({rows}, index, width, out);
  parallel_for(0, index.num_items, tasks_per_thread(width * 4),
               [&](int64_t begin, int64_t end) { sum_padded(rows, index, begin, end, width, out); });
}

#define CROWDNAL_INSTANTIATE(T)                                                                                        \
  template void mix<T>(const MixInput<T>&, const Index&, const Runs&, const Shape&, T*, T*);                           \
  template void unmix<T>(const GradRows<T>&, const T*, const T*, const Index&, const Runs&, const Shape&, T*, T*, T*); \
  template void sum_items<T>(const GradRows<T>&, const Index&, int64_t, T*);                                           \
  template void sum_each<T>(const T*, bool, const Index&, int64_t, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

namespace {

Tensor mix_op(const Tensor& scores, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
              const Tensor& annotator, const Tensor& order) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, is_large(stored, shape));
  const Tensor w = widened(stored, index.view.annotator, index.view.nnz);
  const Tensor z = check_values(scores, "scores", w, {index.view.num_items, shape.rows});
  Tensor out = empty(w, {index.view.nnz, shape.cols});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    mix<T>({pointer<T>(z), pointer<T>(w), nullptr, nullptr, nullptr}, index.view, index.runs, shape, output<T>(out),
           nullptr);
  });
  return out;
}

Tensor mix_items_op(const Tensor& grad, const Tensor& confusion, const Tensor& indptr, const Tensor& item,
                    const Tensor& annotator, const Tensor& order) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);
  const bool large = is_large(stored, shape);
  const CheckedIndex index = check_index(indptr, item, annotator, order, shape.num_annotators, large);
  const Tensor w = widened(stored, index.view.annotator, index.view.nnz);
  const Tensor g = check_values(grad, "grad", w, {index.view.nnz, shape.cols});
  Tensor out = empty(w, {index.view.num_items, shape.rows}), each = empty(w, {large ? index.view.nnz : 0, shape.rows});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    unmix<T>({pointer<T>(g)}, nullptr, pointer<T>(w), index.view, index.runs, shape, output<T>(out), nullptr,
             output<T>(each));
  });
  return out;
}

Tensor mix_annotators_op(const Tensor& scores, const Tensor& grad, const Tensor& indptr, const Tensor& item,
                         const Tensor& annotator, const Tensor& order, int64_t num_annotators) {
  STD_TORCH_CHECK(scores.dim() == 2 && grad.dim() == 2, "crowdnal: scores and grad must have 2 dimensions");
  check_floating(scores, "scores");
  const Shape shape = check_sizes(num_annotators, scores.size(1), grad.size(1), "the classes");
  const CheckedIndex index = check_index(indptr, item, annotator, order, num_annotators, true);
  const Tensor z = check_values(scores, "scores", scores, {index.view.num_items, shape.rows});
  const Tensor g = check_values(grad, "grad", scores, {index.view.nnz, shape.cols});
  Tensor out = empty(scores, {num_annotators, shape.rows, shape.cols});
  dispatch(z, [&](auto zero) {
    using T = decltype(zero);
    unmix<T>({pointer<T>(g)}, pointer<T>(z), nullptr, index.view, index.runs, shape, nullptr, output<T>(out), nullptr);
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) {
  m.impl("mix", TORCH_BOX(&mix_op));
  m.impl("mix_items", TORCH_BOX(&mix_items_op));
  m.impl("mix_annotators", TORCH_BOX(&mix_annotators_op));
}

}  // namespace crowdnal::cpu
