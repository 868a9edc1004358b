// The softmax link and its gradients for an upstream of 1 in one pass: a matrix is at hand for its annotator's
// annotations from their scores to the gradients.
#include "cpu/detail/prior.h"
#include "cpu/detail/runs.h"
#include "cpu/detail/small_step.h"
#include "cpu/detail/spare.h"
#include "cpu/mix.h"
#include "cpu/softmax_link.h"

namespace crowdnal::cpu {
namespace {

// Up to kGroup annotations share a pass over a large matrix: their scores, softmax, products and outer products.
template <class T>
struct LargeStep {
  const MixInput<T>& in;
  const StepScale<T>& scale;
  const Index& index;
  const Shape& shape;
  const StepOut<T>& out;  // rows not padded
  Prior<T>& prior;
  std::vector<T> apart, partial, h, rows;

  LargeStep(const MixInput<T>& in, const StepScale<T>& scale, const Index& index, const Shape& shape,
            const StepOut<T>& out, Prior<T>& prior)
      : in(in), scale(scale), index(index), shape(shape), out(out), prior(prior),
        apart(in.mixing ? kGroup * shape.cols : 0), h(kGroup * shape.cols), rows(kLanes<T> * prior.width) {}

  // Annotations order[first..last-1], all of one annotator, run number `number`; total: its gradient, or null.
  void run(int64_t number, int64_t first, int64_t last, T* total) {
    const int64_t annotator = index.annotator[index.order[first]];
    const T* matrix = in.confusion + annotator * shape.matrix();
    for (int64_t begin = first; begin < last; begin += kGroup) {
      const int64_t count = std::min(kGroup, last - begin), block = (begin - first) / kSegmentBlock;
      const T *z[kGroup], *g[kGroup];
      T *to[kGroup], *each[kGroup];
      for (int64_t j = 0; j < count; ++j) {
        const int64_t n = index.order[begin + j], i = index.item[n];
        z[j] = in.scores + i * shape.rows;
        g[j] = to[j] = h.data() + j * shape.cols;
        each[j] = out.each ? out.each + n * shape.rows : nullptr;
        if (in.shared && !in.mixing) {
          std::copy_n(in.shared + i * shape.cols, shape.cols, to[j]);
        } else {
          std::fill_n(to[j], shape.cols, T(0));
        }
      }
      mix_group(z, matrix, to, count, shape.rows, shape.cols);
      for (int64_t j = 0; j < count; ++j) residual(index.order[begin + j], to[j], apart.data() + j * shape.cols);
      if (out.each) matrix_group(matrix, g, each, count, shape.rows, shape.cols);
      if (!total) continue;
      if (block > 0) partial.resize(shape.matrix());
      T* into = block > 0 ? partial.data() : total;
      outer_group(z, g, into, count, shape.rows, shape.cols, (begin - first) % kSegmentBlock == 0);
      if (block > 0 && (begin + count == last || (begin + count - first) % kSegmentBlock == 0)) {
        for (int64_t e = 0; e < shape.matrix(); ++e) total[e] += partial[e];
      }
    }
    if (!prior) return;
    const T u = prior.share(scale, index.order, first, last, annotator);
    prior.value[number] = prior_of_large<T>(prior, matrix, u, total, rows.data());
  }

 private:
  // From the scores h of annotation n to its gradient for them; `apart`: room for shared - scores.
  void residual(int64_t n, T* __restrict h, T* __restrict apart) {
    const int64_t cols = shape.cols, label = in.label[n];
    const T mixing = in.mixing ? in.mixing[n] : T(0), u = scale.of(n);
    if (in.mixing) {
      const T* shared = in.shared + index.item[n] * cols;
      for (int64_t k = 0; k < cols; ++k) {
        apart[k] = shared[k] - h[k];
        h[k] += mixing * apart[k];
      }
    }
    const T target = h[label];
    out.nll[n] = softmax_row(h, cols) - target;
    h[label] -= T(1);
    T along = 0;
    for (int64_t k = 0; out.mixing && k < cols; ++k) along += h[k] * apart[k];
    if (out.mixing) out.mixing[n] = u * along;
    const T share = in.mixing ? u * mixing : u, rest = in.mixing ? u * (T(1) - mixing) : u;
    for (int64_t k = 0; out.share && k < cols; ++k) out.share[n * cols + k] = share * h[k];
    for (int64_t k = 0; k < cols; ++k) h[k] *= rest;
  }
};

constexpr int64_t kKeptRows = 1 << 20;  // numbers that stay with a thread from step to step, at most

template <class T>
void step(const MixInput<T>& in, const StepScale<T>& scale, const Index& index, const Runs& runs, const Shape& shape,
          const StepOut<T>& out, Prior<T>& prior) {
  const MatricesOut<T> place{out.confusion, index, runs, shape};
  if (is_small<T>(shape)) {
    for_each_share(index, runs, tasks_per_thread(3 * shape.matrix() + 8 * shape.cols),
                   [&](int64_t run, int64_t end) { step_small(in, scale, index, runs, shape, run, end, out, prior); });
  } else {
    for_each_share(index, runs, tasks_per_thread(3 * shape.matrix()), [&](int64_t run, int64_t end) {
      LargeStep<T> step(in, scale, index, shape, out, prior);
      for (; run < end; ++run) step.run(run, runs[run], runs[run + 1], out.confusion ? place(run) : nullptr);
    });
  }
  if (out.confusion) place.finish();
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> softmax_link_step_op(
    const Tensor& scores, const Tensor& confusion, OptionalTensor shared, OptionalTensor mixing, OptionalTensor weight,
    const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order, OptionalTensor plan,
    const Tensor& label, OptionalTensor prior, OptionalTensor common, OptionalTensor labels_given, bool mean,
    bool need_scores, bool need_confusion, bool need_shared, bool need_mixing) {
  const SoftmaxArguments a = check_softmax(scores, confusion, shared, mixing, weight, indptr, item, annotator, order,
                                           plan, label, true);
  const Shape& shape = a.shape;
  const Index& view = a.index.view;
  const Tensor& w = a.matrices;
  STD_TORCH_CHECK(shared || !need_shared, "crowdnal: need_shared needs shared");
  STD_TORCH_CHECK(mixing || !need_mixing, "crowdnal: need_mixing needs mixing");
  const PriorArguments given = check_prior(prior, common, labels_given, w, shape);
  Tensor loss = empty(w, {}), nll = empty(w, {view.nnz});
  Tensor dscores = empty(w, {need_scores ? view.num_items : 0, shape.rows});
  Tensor dconfusion = empty_gradient(w, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  Tensor dshared = empty(w, {need_shared ? view.num_items : 0, shape.cols});
  Tensor dmixing = empty(w, {need_mixing ? view.nnz : 0});
  dispatch(w, [&](auto zero) {
    using T = decltype(zero);
    const bool compact = is_small<T>(shape);
    Tensor each = empty(w, {need_scores ? view.nnz : 0, compact ? padded<T>(shape.rows) : shape.rows});
    MixInput<T> input = a.input<T>();
    const CommonScores<T> of_all(shared ? nullptr : pointer<T>(given.common), input.scores, view.num_items, shape);
    if (!shared && given.common) input.shared = of_all.scores.data();
    const bool through_common = !shared && given.common && need_scores;
    const int64_t share_width = compact ? padded<T>(shape.cols) : shape.cols;
    Tensor share = empty(w, {need_shared ? view.nnz : 0, share_width});
    thread_local std::vector<T> kept;  // fresh pages at every step would cost more than what is done with them
    std::vector<T> own;
    const int64_t share_size = through_common ? view.nnz * share_width : 0;
    std::vector<T>& room = share_size <= kKeptRows ? kept : own;
    if (static_cast<int64_t>(room.size()) < share_size) room.resize(share_size);
    T* shares = need_shared ? output<T>(share) : through_common ? room.data() : nullptr;
    const T count = static_cast<T>(mean ? std::max<int64_t>(1, view.nnz) : 1);
    const StepOut<T> out{output<T>(nll), need_scores ? output<T>(each) : nullptr, shares,
                         need_mixing ? output<T>(dmixing) : nullptr, need_confusion ? output<T>(dconfusion) : nullptr};
    Prior<T> rows(given, shape, 1, static_cast<int64_t>(a.index.runs.size()) - 1);
    step<T>(input, {pointer<T>(a.weight), T(1) / count}, view, a.index.runs, shape, out, rows);
    if (need_scores) sum_each(pointer<T>(each), compact, view, shape.rows, output<T>(dscores));
    if (need_shared) sum_each(pointer<T>(share), compact, view, shape.cols, output<T>(dshared));
    if (through_common) {
      std::vector<T> grad(view.num_items * shape.cols);
      sum_each<T>(shares, compact, view, shape.cols, grad.data());
      of_all.add_gradient(grad.data(), output<T>(dscores));
    }
    const T total = weighted_sum(pointer<T>(nll), pointer<T>(a.weight), view.nnz);
    *output<T>(loss) = (mean ? total / count : total) + rows.total();
  });
  return {loss, nll, dscores, dconfusion, dshared, dmixing};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) { m.impl("softmax_link_step", TORCH_BOX(&softmax_link_step_op)); }

}  // namespace crowdnal::cpu
