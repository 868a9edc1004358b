// The kernels of csrc/cuda on the emulator, as a Python module: here the primitives and the softmax link.
#include "arrays.h"
#include "cuda/select.cuh"
#include "cuda/softmax_link.cuh"

using namespace crowdnal::cuda;

namespace {

template <class T>
Array<T> mix_op(Array<T> scores, Array<T> confusion, Longs indptr, Longs item, Longs annotator, Longs order) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> out = empty<T>({index.nnz, shape.cols});
  mix(run, MixInput<T>{scores.data(), confusion.data(), nullptr, nullptr, nullptr}, index, shape, out.mutable_data(),
      static_cast<T*>(nullptr));
  return out;
}

template <class T>
Array<T> mix_items_op(Array<T> grad, Array<T> confusion, Longs indptr, Longs item, Longs annotator, Longs order) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> out = empty<T>({index.num_items, shape.rows});
  mix_items(run, GradRows<T>{grad.data(), shape.cols}, confusion.data(), index, shape, out.mutable_data());
  return out;
}

template <class T>
Array<T> mix_annotators_op(Array<T> scores, Array<T> grad, Longs indptr, Longs item, Longs annotator, Longs order,
                           int64_t num_annotators) {
  auto run = context();
  const Shape shape{num_annotators, scores.shape(1), grad.shape(1)};
  Array<T> out = empty<T>({num_annotators, shape.rows, shape.cols});
  mix_annotators(run, GradRows<T>{grad.data(), shape.cols}, scores.data(), index_of(indptr, item, annotator, order), shape,
                 out.mutable_data());
  return out;
}

template <class T>
Array<T> select_op(Array<T> confusion, Longs annotators) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  Array<T> out = empty<T>({annotators.size(), shape.rows, shape.cols});
  select(run, confusion.data(), annotators.data(), annotators.size(), shape, out.mutable_data());
  return out;
}

template <class T>
py::tuple softmax_link_op(Array<T> scores, Array<T> confusion, MaybeArray<T> shared, MaybeArray<T> mixing,
                          MaybeArray<T> weight, Longs indptr, Longs item, Longs annotator, Longs order, Longs label,
                          bool mean) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> loss = empty<T>({}), nll = empty<T>({index.nnz}), probs = empty<T>({index.nnz, shape.cols});
  const MixInput<T> input{scores.data(), confusion.data(), pointer<T>(shared), pointer<T>(mixing), label.data()};
  softmax_link(run, input, pointer<T>(weight), index, shape, mean, loss.mutable_data(), nll.mutable_data(),
               probs.mutable_data());
  return py::make_tuple(loss, nll, probs);
}

template <class T>
py::tuple softmax_link_backward_op(MaybeArray<T> grad_loss, MaybeArray<T> grad_nll, Array<T> scores, Array<T> confusion,
                                   MaybeArray<T> shared, MaybeArray<T> mixing, MaybeArray<T> weight, Longs indptr,
                                   Longs item, Longs annotator, Longs order, Longs label, Array<T> probs, bool mean,
                                   bool need_scores, bool need_confusion, bool need_shared, bool need_mixing) {
  auto run = context();
  const Shape shape = shape_of(confusion);
  const Index index = index_of(indptr, item, annotator, order);
  Array<T> dscores = empty<T>({need_scores ? index.num_items : 0, shape.rows});
  Array<T> dconfusion = empty<T>({need_confusion ? shape.num_annotators : 0, shape.rows, shape.cols});
  Array<T> dshared = empty<T>({need_shared ? index.num_items : 0, shape.cols});
  Array<T> dmixing = empty<T>({need_mixing ? index.nnz : 0});
  const T count = static_cast<T>(mean ? std::max<int64_t>(1, index.nnz) : 1);
  const GradRows<T> grad{probs.data(), shape.cols, label.data(), pointer<T>(weight), pointer<T>(grad_nll),
                         pointer<T>(grad_loss), count, T(0)};
  const MixInput<T> input{scores.data(), confusion.data(), pointer<T>(shared), pointer<T>(mixing), label.data()};
  softmax_link_backward(run, grad, input, index, shape,
                        SoftmaxLinkGrads<T>{need_scores ? dscores.mutable_data() : nullptr,
                                            need_confusion ? dconfusion.mutable_data() : nullptr,
                                            need_shared ? dshared.mutable_data() : nullptr,
                                            need_mixing ? dmixing.mutable_data() : nullptr});
  return py::make_tuple(dscores, dconfusion, dshared, dmixing);
}

template <class T>
void bind(py::module_ m) {
  m.def("mix", &mix_op<T>);
  m.def("mix_items", &mix_items_op<T>);
  m.def("mix_annotators", &mix_annotators_op<T>);
  m.def("select", &select_op<T>);
  m.def("softmax_link", &softmax_link_op<T>);
  m.def("softmax_link_backward", &softmax_link_backward_op<T>);
}

}  // namespace

void bind_links(py::module_ single, py::module_ twice);

PYBIND11_MODULE(crowdnal_emulated, m) {
  m.def("configure", [](uint64_t order, int64_t blocks) {
    seed() = order;
    most_blocks() = blocks;
  });
  py::module_ single = m.def_submodule("float32"), twice = m.def_submodule("float64");
  bind<float>(single);
  bind<double>(twice);
  bind_links(single, twice);
}
