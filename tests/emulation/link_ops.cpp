// The mixture and the joint link, counts, EM and the pair confusion.
#include "arrays.h"
#include "cuda/em_step.cuh"
#include "cuda/mixture_link.cuh"
#include "cuda/pair_confusion.cuh"

using crowdnal::Normalization;
using namespace crowdnal::cuda;

namespace {

template <class T>
T* output_if(bool wanted, Array<T>& array) {
  return wanted ? array.mutable_data() : nullptr;
}

template <class T>
py::tuple mixture_link_op(Array<T> log_probs, Array<T> confusion, MaybeArray<T> weight, Longs indptr, Longs item,
                          Longs annotator, Longs order, Longs label, int64_t kind, bool mean) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> loss = empty<T>({}), nll = empty<T>({index.nnz}), posterior = empty<T>({index.nnz, shape.cols});
  Array<T> log_norm = empty<T>({most_runs(index, shape, static_cast<Normalization>(kind)), shape.cols});
  mixture_link(run, log_probs.data(), confusion.data(), pointer<T>(weight), label.data(), index, shape,
               static_cast<Normalization>(kind), mean, loss.mutable_data(), nll.mutable_data(),
               posterior.mutable_data(), log_norm.mutable_data());
  return py::make_tuple(loss, nll, posterior, log_norm);
}

template <class T>
py::tuple mixture_link_backward_op(MaybeArray<T> grad_loss, MaybeArray<T> grad_nll, Array<T> log_probs,
                                   Array<T> confusion, MaybeArray<T> weight, Longs indptr, Longs item, Longs annotator,
                                   Longs order, Longs label, Array<T> posterior, MaybeArray<T> log_norm, int64_t kind,
                                   bool mean, bool need_log_probs, bool need_confusion) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> dlog_probs = empty<T>({need_log_probs ? index.num_items : 0, shape.cols});
  Array<T> dconfusion = empty<T>({need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  const T count = static_cast<T>(mean ? std::max<int64_t>(1, index.nnz) : 1);
  const GradRows<T> grad{posterior.data(), shape.cols, nullptr, pointer<T>(weight), pointer<T>(grad_nll),
                         pointer<T>(grad_loss), count, T(0), T(-1)};
  mixture_link_backward(run, grad, confusion.data(), label.data(), pointer<T>(log_norm), index, shape,
                        static_cast<Normalization>(kind), output_if(need_log_probs, dlog_probs),
                        output_if(need_confusion, dconfusion));
  return py::make_tuple(dlog_probs, dconfusion);
}

template <class T>
Array<T> evidence_op(Array<T> log_confusion, MaybeArray<T> weight, Longs indptr, Longs item, Longs annotator, Longs order,
                     Longs label) {
  auto run = context();
  const Shape shape = shape_of(log_confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> out = empty<T>({index.num_items, shape.cols});
  evidence(run, normalize<T>(run, log_confusion.data(), label.data(), index, shape, Normalization::kNone, nullptr),
           pointer<T>(weight), index, shape.cols, out.mutable_data());
  return out;
}

template <class T>
Array<T> counts_op(Array<T> values, MaybeArray<T> weight, Longs indptr, Longs item, Longs annotator, Longs order,
                   Longs label, int64_t num_annotators, int64_t num_labels) {
  auto run = context();
  const Shape shape{num_annotators, num_labels, values.shape(1)};
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> out = empty<T>({num_annotators, num_labels, shape.cols});
  sum_labelled(run, ItemRows<T>{values.data(), shape.cols, item.data(), pointer<T>(weight)}, label.data(), index, shape,
               out.mutable_data());
  return out;
}

// As the op, and the order of the annotators, which the launcher makes by sorting.
template <class T>
py::tuple em_step_op(MaybeArray<T> log_prior, Array<T> log_confusion, MaybeArray<T> weight, Longs indptr,
                     Longs annotator, Longs label, Longs order) {
  auto run = context();
  const Shape shape = shape_of(log_confusion);
  Longs item{std::vector<int64_t>{annotator.size()}};
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> loss = empty<T>({}), posterior = empty<T>({index.num_items, shape.cols}), totals = empty<T>({shape.cols});
  Array<T> counts = empty<T>({shape.num_annotators, shape.rows, shape.cols});
  em_step(run, pointer<T>(log_prior), log_prior && log_prior->shape(0) == 1, log_confusion.data(), pointer<T>(weight),
          label.data(), index, item.mutable_data(), shape, loss.mutable_data(), posterior.mutable_data(),
          counts.mutable_data(), totals.mutable_data());
  return py::make_tuple(loss, posterior, counts, totals);
}

template <class T>
py::tuple joint_link_op(Array<T> log_prior, Array<T> confusion, MaybeArray<T> weight, Longs indptr, Longs item,
                        Longs annotator, Longs order, Longs label, int64_t kind, bool mean) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> loss = empty<T>({}), nll = empty<T>({index.num_items}), posterior = empty<T>({index.num_items, shape.cols});
  Array<T> log_norm = empty<T>({most_runs(index, shape, static_cast<Normalization>(kind)), shape.cols});
  joint_link(run, log_prior.data(), false, confusion.data(), pointer<T>(weight), label.data(), index, shape,
             static_cast<Normalization>(kind), mean, loss.mutable_data(), nll.mutable_data(), posterior.mutable_data(),
             log_norm.mutable_data());
  return py::make_tuple(loss, nll, posterior, log_norm);
}

template <class T>
py::tuple joint_link_backward_op(MaybeArray<T> grad_loss, MaybeArray<T> grad_nll, Array<T> log_prior, Array<T> confusion,
                                 MaybeArray<T> weight, Longs indptr, Longs item, Longs annotator, Longs order,
                                 Longs label, Array<T> posterior, MaybeArray<T> log_norm, int64_t kind, bool mean,
                                 bool need_log_prior, bool need_confusion) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> dlog_prior = empty<T>({need_log_prior ? index.num_items : 0, shape.cols});
  Array<T> dconfusion = empty<T>({need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  joint_link_backward(run, pointer<T>(grad_loss), pointer<T>(grad_nll), confusion.data(), pointer<T>(weight),
                      label.data(), posterior.data(), pointer<T>(log_norm), index, shape,
                      static_cast<Normalization>(kind), mean, output_if(need_log_prior, dlog_prior),
                      output_if(need_confusion, dconfusion));
  return py::make_tuple(dlog_prior, dconfusion);
}

template <class T>
Pairs<T> pairs_of(const Array<T>& difficulty, const Array<T>& competence, const Index& index, const Longs& label) {
  return {difficulty.data(),   competence.data(),   competence.shape(0), competence.shape(1), competence.shape(2),
          competence.shape(3), index,               label.data(),        nullptr,             nullptr};
}

template <class T>
py::tuple pair_confusion_op(Array<T> difficulty, Array<T> competence, Longs indptr, Longs item, Longs annotator,
                            Longs order, Longs label) {
  auto run = context();
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> log_q = empty<T>({index.nnz, competence.shape(1)}), log_norm = empty<T>({index.nnz, competence.shape(1)});
  pair_confusion(run, pairs_of(difficulty, competence, index, label), log_q.mutable_data(), log_norm.mutable_data());
  return py::make_tuple(log_q, log_norm);
}

template <class T>
py::tuple pair_confusion_backward_op(Array<T> grad, Array<T> difficulty, Array<T> competence, Longs indptr, Longs item,
                                     Longs annotator, Longs order, Longs label, Array<T> log_q, Array<T> log_norm,
                                     bool need_difficulty, bool need_competence) {
  auto run = context();
  const Index index = index_of(indptr, item, annotator, order);
  const Pairs<T> pairs = pairs_of(difficulty, competence, index, label);
  Array<T> ddifficulty = empty<T>({need_difficulty ? index.num_items : 0, pairs.classes, pairs.labels, pairs.latents});
  Array<T> dcompetence = empty<T>({need_competence ? pairs.num_annotators : 0, pairs.classes, pairs.labels, pairs.latents});
  pair_confusion_backward(run, PairGrad<T>{pairs, grad.data(), log_q.data(), log_norm.data()},
                          output_if(need_difficulty, ddifficulty), output_if(need_competence, dcompetence));
  return py::make_tuple(ddifficulty, dcompetence);
}

template <class T>
void bind(py::module_ m) {
  m.def("mixture_link", &mixture_link_op<T>);
  m.def("mixture_link_backward", &mixture_link_backward_op<T>);
  m.def("evidence", &evidence_op<T>);
  m.def("counts", &counts_op<T>);
  m.def("em_step", &em_step_op<T>);
  m.def("joint_link", &joint_link_op<T>);
  m.def("joint_link_backward", &joint_link_backward_op<T>);
  m.def("pair_confusion", &pair_confusion_op<T>);
  m.def("pair_confusion_backward", &pair_confusion_backward_op<T>);
}

}  // namespace

void bind_links(py::module_ single, py::module_ twice) {
  bind<float>(single);
  bind<double>(twice);
}
