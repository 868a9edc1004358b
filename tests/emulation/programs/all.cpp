// Every kernel once over the borders of its tiers, on arrays of exactly their size: for a sanitizer.
#include <cmath>
#include <cstdio>
#include <memory>
#include <vector>

#include "cuda/detail/prior.cuh"
#include "cuda/em_step.cuh"
#include "cuda/mixture_link.cuh"
#include "cuda/pair_confusion.cuh"
#include "cuda/select.cuh"
#include "cuda/softmax_step.cuh"

using namespace crowdnal;
using namespace crowdnal::cuda;
using T = float;

// On the heap, without room behind.
template <class V>
struct Heap {
  explicit Heap(int64_t size, double scale = 1) : values(new V[size]), size(size) {
    for (int64_t e = 0; e < size; ++e) values[e] = from(scale * std::sin(1.0 + e));
  }
  static V from(double value) {
    if constexpr (std::is_arithmetic_v<V>) {
      return static_cast<V>(value);
    } else {
      return V{static_cast<uint16_t>(0x3800 + 100 * value)};  // about 0.5 as Half, smaller as BFloat16
    }
  }
  operator V*() { return values.get(); }
  std::unique_ptr<V[]> values;
  int64_t size;
};

struct Problem {
  Problem(int64_t num_items, int64_t num_annotators, int64_t labels, int64_t per_item)
      : nnz(num_items * per_item), indptr(num_items + 1), item(nnz), annotator(nnz), order(nnz), label(nnz) {
    int64_t p = 0;
    indptr[0] = 0;
    for (int64_t n = 0; n < nnz; ++n) {
      item[n] = n / per_item;
      indptr[item[n] + 1] = n + 1;
      annotator[n] = n * n % num_annotators;
      label[n] = n * 7 % labels;
    }
    for (int64_t r = 0; r < num_annotators; ++r) {
      for (int64_t n = 0; n < nnz; ++n) {
        if (annotator[n] == r) order[p++] = n;
      }
    }
    for (int64_t p = 0; p < nnz; ++p) {
      const int64_t n = order[p];
      plan.push_back({int32_t(n), int32_t(item[n]), int32_t(annotator[n]), int32_t(label[n])});
    }
    index = {indptr, item, annotator, order, num_items, nnz, nnz % 2 ? nullptr : plan.data()};
  }
  int64_t nnz;
  Heap<int64_t> indptr, item, annotator, order, label;
  std::vector<Planned> plan;
  Index index;
};

template <class E>
void run(int64_t B, int64_t R, int64_t C, int64_t K, int64_t per_item) {
  Problem p(B, R, K, per_item);
  const Index& index = p.index;
  const int64_t nnz = p.nnz;
  Context context;
  Heap<T> one(1), weight(nnz), scores(B * C), shared(B * K), grad(nnz * K), nll(nnz), each(nnz * K);
  Heap<E> confusion(R * C * K);
  {
    const Shape shape{R, C, K};
    Heap<T> counts(C * K), given(R);
    Heap<T> dscores(B * C), dconfusion(R * C * K), dshared(B * K), dmixing(nnz);
    select<E>(context, confusion, p.annotator, nnz, shape, Heap<E>(nnz * C * K));
    const MixInput<T, E> input{scores, confusion, {shared, weight, p.label}};
    softmax_link<T, E>(context, input, weight, index, shape, true, one, nll, each);
    const GradRows<T> rows{each, K, p.label, weight, nll, one, T(nnz), T(0)};
    softmax_link_backward<T, E>(context, rows, input, index, shape,
                                SoftmaxLinkGrads<T>{dscores, dconfusion, dshared, dmixing});
    for (int bare = 0; bare < 2 && fits_step(shape); ++bare) {  // with every gradient, and without any
      const SoftmaxLinkGrads<T> all{dscores, dconfusion, dshared, dmixing};
      softmax_step<T, E>(context, input, weight, index, shape, true, one, nll, bare ? SoftmaxLinkGrads<T>{} : all);
    }
    add_prior<T, E>(context, confusion, std::nullopt, {counts, counts, given}, weight, index, shape, true, nll, one,
                    dconfusion);
  }
  const Shape shape{R, K, C};
  const int64_t runs = std::min(nnz, R);
  Heap<T> posterior(nnz * C), norm(runs * C), dmatrices(R * K * C), ditems(B * C), items(B * C), item_nll(B), totals(C);
  Heap<T> counts(K * C), given(R);
  for (const auto kind : {Normalization::kNone, Normalization::kSoftmax, Normalization::kSoftplus}) {
    add_prior<T, E>(context, confusion, kind, {counts, nullptr, given}, nullptr, index, shape, false, nll, one,
                    dmatrices);
    mixture_link<T, E>(context, scores, confusion, weight, p.label, index, shape, kind, true, one, nll, posterior,
                       norm);
    const GradRows<T> rows{posterior, C, nullptr, weight, nll, one, T(nnz), T(0), T(-1)};
    mixture_link_backward<T, E>(context, rows, confusion, p.label, norm, index, shape, kind, ditems, dmatrices);
    joint_link<T, E>(context, scores, false, confusion, weight, p.label, index, shape, kind, true, one, item_nll, items,
                     norm);
    joint_link_backward<T, E>(context, one, item_nll, confusion, weight, p.label, items, static_cast<T*>(nullptr),
                              index, shape, kind, true, ditems, dmatrices);
  }
  Heap<int64_t> found(nnz);
  Index own = index;
  own.item = found;
  for (T* prior : {static_cast<T*>(scores), static_cast<T*>(nullptr)}) {
    if (!prior && C != K) continue;
    em_step<T, E>(context, prior, false, confusion, weight, p.label, own, found, shape, one, items, dmatrices, totals);
  }
  const int64_t classes = std::min<int64_t>(C, 5);  // the kernels tell rows of a matrix apart by their length alone
  for (const int64_t L : {3, 4}) {
    const int64_t size = classes * K * L;
    Heap<E> difficulty(B * size), competence(R * size, L == 4 ? 50 : 1);  // with exact rows and without
    Heap<T> log_q(nnz * classes), log_norm(nnz * classes), dd(B * size), dc(R * size);
    const Pairs<T, E> pairs{difficulty, competence, R, classes, K, L, index, p.label};
    pair_confusion<T, E>(context, pairs, log_q, log_norm);
    pair_confusion_backward<T, E>(context, PairGrad<T, E>{pairs, posterior, log_q, log_norm}, dd, dc);
  }
}

int main() {
  run<T>(5, 3, 1, 1, 1);
  run<T>(20, 3, 8, 8, 5);
  run<T>(40, 3, 10, 10, 2);
  run<T>(30, 60, 16, 15, 3);
  run<T>(6, 9, 9, 17, 6);
  run<T>(3, 2, 33, 40, 12);
  run<T>(2, 1, 129, 130, 5);
  run<T>(9, 1, 48, 52, 2);
  run<Half>(6, 3, 8, 12, 5);
  run<BFloat16>(6, 9, 9, 17, 6);
  run<BFloat16>(2, 1, 129, 130, 5);
  std::puts("done");
}
