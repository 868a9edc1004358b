#include "cpu/detail/small_joint.h"

#include <algorithm>
#include <numeric>

#include "cpu/detail/runs.h"
#include "cpu/detail/small_normalization.h"

namespace crowdnal::cpu {
namespace {

// One run after the other.
template <class T, int N>
struct JointWalk {
  static constexpr int64_t L = kLanes<T>;
  const JointInput<T>& in;
  const Index& index;
  const Runs& runs;
  const Shape& shape;
  const JointMatrices<T>& all;
  Row<T, N> row;
  Matrices<T, N> matrices;
  std::vector<T> values, slopes;  // of one matrix, where they are not kept

  CROWDNAL_INLINE JointWalk(const JointInput<T>& in, const Index& index, const Runs& runs, const Shape& shape,
                            const JointMatrices<T>& all)
      : in(in), index(index), runs(runs), shape(shape), all(all), row(shape.cols), matrices(in.confusion, shape),
        values(all.normalized && !all.keep ? all.size : 0), slopes(all.softplus && !all.keep ? all.size : 0) {}

  CROWDNAL_INLINE Activated<T, N> activated(int64_t run) {
    T* inverse = all.inverse.get() + run * N * L;
    if (!all.keep) return {values.data(), all.softplus ? slopes.data() : nullptr, inverse};
    return {all.values.get() + run * all.size, all.softplus ? all.slopes.get() + run * all.size : nullptr, inverse};
  }
  CROWDNAL_INLINE bool activate(int64_t run, const Activated<T, N>& matrix) {
    return matrix.fill(matrices.of(index.annotator[index.order[runs[run]]]), shape.rows, row, all.softplus);
  }

  // Whether none of the run's sums is extreme.
  CROWDNAL_INLINE bool rows_of(int64_t run, T* rows) {
    const Activated<T, N> matrix = activated(run);
    if (!activate(run, matrix)) return false;
    Vec<T> log_norm[N];
    for (int64_t i = 0; i < N; ++i) log_norm[i] = -fast_log(load(matrix.inverse + i * L));
    const T* x = matrices.of(index.annotator[index.order[runs[run]]]);
    for (int64_t p = runs[run]; p < runs[run + 1]; ++p) {
      const int64_t n = index.order[p], y = in.label[n];
      for (int64_t i = 0; i < N; ++i) {
        const Vec<T> v = load(x + y * shape.cols + i * L), t = log_value<T>(v, in.kind) - log_norm[i];
        store(rows + (n * N + i) * L, i == N - 1 ? only<T>(t, row.last) : t);
      }
    }
    return true;
  }

  CROWDNAL_INLINE void gradient(int64_t run, const T* dt, BlockSums<T>& grads, T* out) {
    const int64_t first = runs[run], last = runs[run + 1];
    T* G = grads.sum.data();
    for (int64_t block = first; block < last; block += kSegmentBlock) {
      const int64_t end = std::min(last, block + kSegmentBlock);
      for (int64_t e = 0; e < all.size; e += L) store(G + e, Vec<T>{});
      for (int64_t p = block; p < end; ++p) {
        const int64_t n = index.order[p];
        T* to = G + in.label[n] * N * L;
        Vec<T> g[N];
        row.read(dt, index.item[n], index.num_items, g);
        for (int64_t i = 0; i < N; ++i) {
          store(to + i * L, load(to + i * L) + (in.weight ? in.weight[n] * g[i] : g[i]));
        }
      }
      grads.join(block == first, end == last);
    }
    if (!all.normalized) return write_rows(grads.sum.data(), shape.rows, row, out);
    const Activated<T, N> matrix = activated(run);
    if (!all.keep) activate(run, matrix);
    matrix.gradient(grads.sum.data(), shape.rows, row, all.softplus, out);
  }
};

template <class T>
void exact_rows(const JointInput<T>& in, const Index& index, const Shape& shape, int64_t first, int64_t last,
                int64_t width, T* rows) {
  const T* x = in.confusion + index.annotator[index.order[first]] * shape.matrix();
  std::vector<T> norm(shape.cols), none(shape.cols), apart;
  log_norms<T>(x, shape.rows, shape.cols, in.kind, norm.data(), nullptr, nullptr, &apart);
  for (int64_t p = first; p < last; ++p) {
    const int64_t n = index.order[p];
    T* to = rows + n * width;
    log_joint(none.data(), x + in.label[n] * shape.cols, norm.data(), apart, shape.cols, in.kind, to);
    std::fill(to + shape.cols, to + width, T(0));
  }
}

template <class T>
void exact_gradient(const JointInput<T>& in, const Index& index, const Shape& shape, int64_t first, int64_t last,
                    const T* dt, T* out) {
  const int64_t count = last - first, classes = shape.cols;
  const T* x = in.confusion + index.annotator[index.order[first]] * shape.matrix();
  std::vector<T> norm(classes), rows(count * classes);
  std::vector<int64_t> label(count), order(count);
  std::iota(order.begin(), order.end(), int64_t(0));
  for (int64_t j = 0; j < count; ++j) {
    const int64_t n = index.order[first + j];
    const T w = in.weight ? in.weight[n] : T(1);
    label[j] = in.label[n];
    for (int64_t k = 0; k < classes; ++k) rows[j * classes + k] = w * dt[index.item[n] * classes + k];
  }
  log_norms<T>(x, shape.rows, classes, in.kind, norm.data(), nullptr, nullptr, nullptr);
  through_normalization<T>(x, norm.data(), {rows.data()}, label.data(), order.data(), 0, count, shape.rows, classes,
                           in.kind, nullptr, out);
}

template <class T, int N>
CROWDNAL_INLINE void rows_of(const JointInput<T>& in, const Index& index, const Runs& runs, const Shape& shape,
                             int64_t run, int64_t end, JointMatrices<T>& all, T* rows) {
  JointWalk<T, N> walk(in, index, runs, shape, all);
  for (; run < end; ++run) {
    all.extreme[run] = !walk.rows_of(run, rows);
    if (all.extreme[run]) exact_rows(in, index, shape, runs[run], runs[run + 1], all.width, rows);
  }
}

template <class T, int N>
CROWDNAL_INLINE void gradients_of(const JointInput<T>& in, const Index& index, const Runs& runs, const Shape& shape,
                                  int64_t run, int64_t end, const JointMatrices<T>& all, const T* dt, T* out) {
  JointWalk<T, N> walk(in, index, runs, shape, all);
  BlockSums<T> grads(all.size);
  const MatricesOut<T> place{out, index, runs, shape};
  for (; run < end; ++run) {
    if (all.extreme[run]) {
      exact_gradient(in, index, shape, runs[run], runs[run + 1], dt, place(run));
    } else {
      walk.gradient(run, dt, grads, place(run));
    }
  }
}

}  // namespace

template <class T>
CROWDNAL_CLONES void joint_rows_small(const JointInput<T>& in, const Index& index, const Runs& runs, const Shape& shape,
                                      int64_t run, int64_t end, JointMatrices<T>& all, T* rows) {
  if (shape.cols <= kLanes<T>) return rows_of<T, 1>(in, index, runs, shape, run, end, all, rows);
  rows_of<T, 2>(in, index, runs, shape, run, end, all, rows);
}

template <class T>
CROWDNAL_CLONES void joint_gradient_small(const JointInput<T>& in, const Index& index, const Runs& runs,
                                          const Shape& shape, int64_t run, int64_t end, const JointMatrices<T>& all,
                                          const T* dt, T* out) {
  if (shape.cols <= kLanes<T>) return gradients_of<T, 1>(in, index, runs, shape, run, end, all, dt, out);
  gradients_of<T, 2>(in, index, runs, shape, run, end, all, dt, out);
}

#define CROWDNAL_INSTANTIATE(T)                                                                                      \
  template void joint_rows_small<T>(const JointInput<T>&, const Index&, const Runs&, const Shape&, int64_t, int64_t, \
                                    JointMatrices<T>&, T*);                                                          \
  template void joint_gradient_small<T>(const JointInput<T>&, const Index&, const Runs&, const Shape&, int64_t,      \
                                        int64_t, const JointMatrices<T>&, const T*, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
