// Pair confusion of LIA: log_q[n, k] = log_softmax over j of logsumexp_l (D_i + C_r)[k, j, l] at the observed label.
#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/detail/pair_rows.h"
#include "cpu/detail/runs.h"

namespace crowdnal::cpu {
namespace {

// Annotations that are summed in one call.
constexpr int64_t kTogether = 16;

struct Inputs {
  Tensor difficulty, competence, label;
  CheckedIndex index;
  Tiles tiles;
  int64_t num_annotators;
};

Inputs check_inputs(const Tensor& difficulty, const Tensor& competence, const Tensor& indptr, const Tensor& item,
                    const Tensor& annotator, const Tensor& order, OptionalTensor plan, const Tensor& label) {
  check_competence(competence);
  const Tiles tiles{competence.size(1), competence.size(2), competence.size(3)};
  const int64_t num_annotators = competence.size(0);
  CheckedIndex index = check_index(indptr, item, annotator, order, plan, num_annotators, true);
  const Tensor labels = check_labels(label, index, tiles.labels);
  const ScalarType type = competence.scalar_type();
  const Tensor d = check_stored(difficulty, "difficulty", type,
                                {index.view.num_items, tiles.classes, tiles.labels, tiles.latents});
  const Tensor c = check_stored(competence, "competence", type,
                                {num_annotators, tiles.classes, tiles.labels, tiles.latents});
  return {widened(d, index.view.item, index.view.nnz),
          widened(c, index.view.annotator, index.view.nnz),
          labels,
          index,
          tiles,
          num_annotators};
}

// [nnz] the run that each annotation is in.
std::vector<int64_t> run_of(const Index& index, const Runs& runs) {
  std::vector<int64_t> out(index.nnz);
  for (int64_t run = 0; run + 1 < static_cast<int64_t>(runs.size()); ++run) {
    for (int64_t p = runs[run]; p < runs[run + 1]; ++p) out[index.order[p]] = run;
  }
  return out;
}

// Tiles of many items or annotators. In a tensor, so that torch's allocator serves and counts them.
template <class T>
struct Sides {
  Sides(const Tensor& values, const Tiles& tiles, int64_t count)
      : tiles(tiles), stride(tiles.padded() + tiles.size()), values(pointer<T>(values)),
        storage(empty(values, {count, stride})), start(output<T>(storage)) {}

  void fill(int64_t place, int64_t row) {
    T* highest = start + place * stride;
    pair_tile(values + row * tiles.matrix(), tiles, highest, highest + tiles.padded());
  }
  Side<T> at(int64_t place, int64_t row) const {
    const T* highest = start + place * stride;
    return {values + row * tiles.matrix(), highest, highest + tiles.padded()};
  }

  const Tiles tiles;
  const int64_t stride;
  const T* values;
  Tensor storage;
  T* const start;
};

// Items and annotators of a batch, and which of them an annotation joins.
template <class T>
struct Batch {
  explicit Batch(const Inputs& inputs)
      : index(inputs.index.view), tiles(inputs.tiles), label(pointer<int64_t>(inputs.label)),
        run(run_of(index, inputs.index.runs)), items(inputs.difficulty, tiles, index.num_items),
        annotators(inputs.competence, tiles, static_cast<int64_t>(inputs.index.runs.size()) - 1) {
    const Runs& runs = inputs.index.runs;
    parallel_for(0, static_cast<int64_t>(runs.size()) - 1, tasks_per_thread(8 * tiles.size()),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t r = begin; r < end; ++r) annotators.fill(r, index.annotator[index.order[runs[r]]]);
                 });
    parallel_for(0, index.num_items, tasks_per_thread(8 * tiles.size()), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (index.indptr[i] < index.indptr[i + 1]) items.fill(i, i);
      }
    });
  }

  Side<T> item(int64_t n) const { return items.at(index.item[n], index.item[n]); }
  Side<T> annotator(int64_t n) const { return annotators.at(run[n], index.annotator[n]); }

  const Index& index;
  const Tiles tiles;
  const int64_t* label;
  const std::vector<int64_t> run;
  Sides<T> items, annotators;
};

// What the backward of every annotation reads.
template <class T>
struct Upstream {
  const T *grad, *log_q, *log_norm;  // [nnz, classes]
  const T* coefficients;             // [nnz, 2, padded]
  const bool* exact;                 // [nnz] whether there are exact classes
};

// out = gradient for the item or the annotator that annotations at(first) .. at(last - 1) share, from a block of them.
template <bool kItem, class T, class At>
void block_gradient(const Batch<T>& batch, const Upstream<T>& upstream, int64_t first, int64_t last, const At& at,
                    T* total, T* out) {
  const Tiles& tiles = batch.tiles;
  std::fill_n(total, tiles.size(), T(0));
  const T *tile[kTogether], *coefficients[kTogether];
  int64_t label[kTogether];
  for (int64_t begin = first; begin < last; begin += kTogether) {
    const int64_t count = std::min(kTogether, last - begin);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t n = at(begin + j);
      tile[j] = (kItem ? batch.annotator(n) : batch.item(n)).tile;
      coefficients[j] = upstream.coefficients + n * 2 * tiles.padded();
      label[j] = batch.label[n];
    }
    pair_accumulate(tile, coefficients, label, count, tiles, total);
  }
  pair_release((kItem ? batch.item(at(first)) : batch.annotator(at(first))).tile, tiles, total, out);
  for (int64_t p = first; p < last; ++p) {
    const int64_t n = at(p), row = n * tiles.classes;
    if (!upstream.exact[n]) continue;
    pair_exact_gradient(batch.item(n), batch.annotator(n), tiles, batch.label[n], upstream.grad + row,
                        upstream.log_q + row, upstream.log_norm + row, out);
  }
}

// The same from any number of them, of one at least. `total` [tiles] and `partial` are to work in.
template <bool kItem, class T, class At>
void owner_gradient(const Batch<T>& batch, const Upstream<T>& upstream, int64_t first, int64_t last, const At& at,
                    T* total, std::vector<T>& partial, T* out) {
  block_gradient<kItem>(batch, upstream, first, std::min(last, first + kSegmentBlock), at, total, out);
  for (int64_t block = first + kSegmentBlock; block < last; block += kSegmentBlock) {
    partial.resize(batch.tiles.matrix());
    block_gradient<kItem>(batch, upstream, block, std::min(last, block + kSegmentBlock), at, total, partial.data());
    for (int64_t e = 0; e < batch.tiles.matrix(); ++e) out[e] += partial[e];
  }
}

std::tuple<Tensor, Tensor> pair_confusion_op(const Tensor& difficulty, const Tensor& competence, const Tensor& indptr,
                                             const Tensor& item, const Tensor& annotator, const Tensor& order,
                                             OptionalTensor plan, const Tensor& label) {
  const Inputs inputs = check_inputs(difficulty, competence, indptr, item, annotator, order, plan, label);
  const Index& view = inputs.index.view;
  const Tiles& tiles = inputs.tiles;
  Tensor log_q = empty(inputs.competence, {view.nnz, tiles.classes});
  Tensor log_norm = empty(inputs.competence, {view.nnz, tiles.classes});
  dispatch(inputs.competence, [&](auto zero) {
    using T = decltype(zero);
    const Batch<T> batch(inputs);
    parallel_for(0, view.nnz, tasks_per_thread(tiles.size()), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        pair_row(batch.item(n), batch.annotator(n), tiles, batch.label[n], output<T>(log_q) + n * tiles.classes,
                 output<T>(log_norm) + n * tiles.classes);
      }
    });
  });
  return {log_q, log_norm};
}

std::tuple<Tensor, Tensor> pair_confusion_backward_op(const Tensor& grad, const Tensor& difficulty,
                                                      const Tensor& competence, const Tensor& indptr,
                                                      const Tensor& item, const Tensor& annotator, const Tensor& order,
                                                      OptionalTensor plan, const Tensor& label, const Tensor& log_q,
                                                      const Tensor& log_norm, bool need_difficulty,
                                                      bool need_competence) {
  const Inputs inputs = check_inputs(difficulty, competence, indptr, item, annotator, order, plan, label);
  const Index& view = inputs.index.view;
  const Tiles& tiles = inputs.tiles;
  const Tensor g = check_values(grad, "grad", inputs.competence, {view.nnz, tiles.classes});
  const Tensor q = check_values(log_q, "log_q", inputs.competence, {view.nnz, tiles.classes});
  const Tensor norm = check_values(log_norm, "log_norm", inputs.competence, {view.nnz, tiles.classes});
  Tensor ddifficulty = empty(inputs.competence,
                             {need_difficulty ? view.num_items : 0, tiles.classes, tiles.labels, tiles.latents});
  Tensor dcompetence = empty(inputs.competence,
                             {need_competence ? inputs.num_annotators : 0, tiles.classes, tiles.labels, tiles.latents});
  Tensor scratch = empty(inputs.competence, {view.nnz, 2, tiles.padded()});
  const Shape shape{inputs.num_annotators, tiles.classes, tiles.labels * tiles.latents};
  dispatch(inputs.competence, [&](auto zero) {
    using T = decltype(zero);
    const Batch<T> batch(inputs);
    std::unique_ptr<bool[]> exact(new bool[view.nnz]);
    const Upstream<T> upstream{pointer<T>(g), pointer<T>(q), pointer<T>(norm), pointer<T>(scratch), exact.get()};
    parallel_for(0, view.nnz, tasks_per_thread(32 * tiles.classes), [&](int64_t begin, int64_t end) {
      for (int64_t n = begin; n < end; ++n) {
        const int64_t row = n * tiles.classes;
        exact[n] = pair_coefficients(upstream.grad + row, upstream.log_q + row, upstream.log_norm + row, tiles,
                                     output<T>(scratch) + n * 2 * tiles.padded()) > 0;
      }
    });
    if (need_difficulty) {
      const int64_t per_item = view.nnz / std::max<int64_t>(1, view.num_items) + 1;
      parallel_for(0, view.num_items, tasks_per_thread(tiles.size() * per_item), [&](int64_t begin, int64_t end) {
        std::vector<T> total(tiles.size()), partial;
        for (int64_t i = begin; i < end; ++i) {
          T* out = output<T>(ddifficulty) + i * tiles.matrix();
          const int64_t first = view.indptr[i], last = view.indptr[i + 1];
          if (first == last) {
            std::fill_n(out, tiles.matrix(), T(0));
          } else {
            const auto same = [](int64_t n) { return n; };
            owner_gradient<true>(batch, upstream, first, last, same, total.data(), partial, out);
          }
        }
      });
    }
    if (!need_competence) return;
    const Runs& runs = inputs.index.runs;
    const MatricesOut<T> place{output<T>(dcompetence), view, runs, shape};
    for_each_share(view, runs, tasks_per_thread(tiles.size()), [&](int64_t run, int64_t end) {
      std::vector<T> total(tiles.size()), partial;
      const auto ordered = [&](int64_t p) { return view.order[p]; };
      for (; run < end; ++run) {
        owner_gradient<false>(batch, upstream, runs[run], runs[run + 1], ordered, total.data(), partial, place(run));
      }
    });
    place.finish();
  });
  return {ddifficulty, dcompetence};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) {
  m.impl("pair_confusion", TORCH_BOX(&pair_confusion_op));
  m.impl("pair_confusion_backward", TORCH_BOX(&pair_confusion_backward_op));
}

}  // namespace crowdnal::cpu
