// The joint link and its gradients for an upstream of 1: annotators, then items, then annotators.
#include "cpu/detail/small_joint.h"
#include "cpu/detail/spare.h"
#include "cpu/joint_link.h"

namespace crowdnal::cpu {
namespace {

constexpr int64_t kMany = 16;  // labels of an annotator from which on a table of its own pays

std::tuple<Tensor, Tensor, Tensor, Tensor> joint_link_step_op(const Tensor& log_prior, const Tensor& confusion,
                                                              OptionalTensor weight, const Tensor& indptr,
                                                              const Tensor& item, const Tensor& annotator,
                                                              const Tensor& order, OptionalTensor plan,
                                                              const Tensor& label, int64_t normalization, bool mean,
                                                              bool need_log_prior, bool need_confusion) {
  const Tensor stored = check_confusion(confusion);
  const Shape shape = shape_of(stored);  // rows = observed labels, cols = classes
  const auto kind = check_normalization(normalization);
  const CheckedIndex index = check_index(indptr, item, annotator, order, plan, shape.num_annotators, true);
  const Index& view = index.view;
  const Tensor a = widened(stored, view.annotator, view.nnz);
  const Tensor labels = check_labels(label, index, shape.rows);
  const Tensor prior = check_values(log_prior, "log_prior", a, {view.num_items, shape.cols});
  if (weight) weight = check_values(*weight, "weight", a, {view.nnz});
  const bool normalized = kind != Normalization::kNone;
  const int64_t runs = static_cast<int64_t>(index.runs.size()) - 1, tasks = tasks_per_thread(shape.matrix() * 8);
  Tensor loss = empty(a, {}), nll = empty(a, {view.num_items}), dlog_prior = empty(a, {view.num_items, shape.cols});
  Tensor dconfusion = empty_gradient(a, {need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  dispatch(a, [&](auto zero) {
    using T = decltype(zero);
    // Counts alone: summed in a table of whole vectors where an annotator has many labels, but few for a cell.
    const bool many = view.nnz >= kMany * runs && count_tables(view.nnz, shape, kReuse) == 0;
    const bool compact = is_small<T>(shape) && (normalized || many);
    const int64_t* y = pointer<int64_t>(labels);
    const JointInput<T> in{pointer<T>(a), pointer<T>(weight), y, kind};
    JointMatrices<T> matrices(compact ? runs : 0, shape, kind);
    Tensor rows = empty(a, {normalized ? view.nnz : 0, compact ? padded<T>(shape.cols) : shape.cols});
    Tensor log_norm = empty(a, {normalized && !compact ? runs : 0, shape.cols});
    LabelTerms<T> terms{in.confusion, shape.num_annotators * shape.rows, shape.rows, in.weight, y};
    if (normalized) terms = {pointer<T>(rows), view.nnz, 0, in.weight, nullptr, compact};
    if (compact && normalized) {
      for_each_share(view, index.runs, tasks, [&](int64_t run, int64_t end) {
        joint_rows_small(in, view, index.runs, shape, run, end, matrices, output<T>(rows));
      });
    } else if (normalized) {
      log_rows(in.confusion, y, index, shape, kind, output<T>(log_norm), output<T>(rows));
    }
    T* dt = output<T>(dlog_prior);
    const int64_t per_item = view.nnz / std::max<int64_t>(1, view.num_items) + 8;
    parallel_for(0, view.num_items, tasks_per_thread(shape.cols * per_item), [&](int64_t begin, int64_t end) {
      posteriors<T>(terms, view, {pointer<T>(prior), false}, shape.cols, begin, end, dt, output<T>(nll));
    });
    const T count = static_cast<T>(joint_denominator(view, mean));
    joint_upstream<T>(dt, view, shape.cols, T(1) / count, nullptr, dt);
    *output<T>(loss) = weighted_sum(pointer<T>(nll), static_cast<const T*>(nullptr), view.num_items) / count;
    if (!need_confusion) return;
    T* out = output<T>(dconfusion);
    if (!compact) {
      return joint_confusion(in.confusion, pointer<T>(log_norm), dt, in.weight, y, index, shape, kind, output<T>(rows),
                             out);
    }
    for_each_share(view, index.runs, tasks, [&](int64_t run, int64_t end) {
      joint_gradient_small(in, view, index.runs, shape, run, end, matrices, dt, out);
    });
    MatricesOut<T>{out, view, index.runs, shape}.finish();
  });
  if (!need_log_prior) dlog_prior = empty(a, {0, shape.cols});
  return {loss, nll, dlog_prior, dconfusion};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) { m.impl("joint_link_step", TORCH_BOX(&joint_link_step_op)); }

}  // namespace crowdnal::cpu
