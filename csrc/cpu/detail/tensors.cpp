#include "cpu/detail/tensors.h"

#include "cpu/detail/runs.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace crowdnal::cpu {
namespace {

// Whether a value is outside 0..bound-1.
CROWDNAL_CLONES bool any_outside(const int64_t* values, int64_t count, int64_t bound) {
  uint64_t bad = 0;
  for (int64_t n = 0; n < count; ++n) bad |= static_cast<uint64_t>(values[n]) >= static_cast<uint64_t>(bound);
  return bad != 0;
}

// Whether a value is smaller than the one before it.
CROWDNAL_CLONES bool any_descent(const int64_t* values, int64_t count) {
  uint64_t bad = 0;
  for (int64_t n = 1; n < count; ++n) bad |= values[n] < values[n - 1];
  return bad != 0;
}

}  // namespace

void check_range(const int64_t* values, int64_t count, const char* name, int64_t bound) {
  if (!any_outside(values, count, bound)) return;
  int64_t n = 0;
  while (values[n] >= 0 && values[n] < bound) ++n;
  STD_TORCH_CHECK(false, "crowdnal: ", name, "[", n, "] = ", values[n], " is out of range [0, ", bound, ")");
}

namespace {

// indptr and item say the same.
void check_items(const Index& view) {
  const int64_t *indptr = view.indptr, *item = view.item;
  STD_TORCH_CHECK(indptr[0] == 0 && indptr[view.num_items] == view.nnz, "crowdnal: indptr must run from 0 to ",
                  view.nnz);
  STD_TORCH_CHECK(!any_descent(indptr, view.num_items + 1), "crowdnal: indptr must not decrease");
  bool same = !any_descent(item, view.nnz);
  for (int64_t i = 0; i < view.num_items; ++i) {  // ascending, so the ends of a segment say all
    const int64_t first = indptr[i], last = indptr[i + 1];
    same = same && (first == last || (item[first] == i && item[last - 1] == i));
  }
  STD_TORCH_CHECK(same,
                  "crowdnal: item does not say what indptr says: it must repeat the number of every item as "
                  "often as it has annotations");
}

}  // namespace

Runs check_order(const int64_t* order, const int64_t* annotator, int64_t nnz, int64_t num_annotators) {
  check_range(order, nnz, "order", nnz);
  Runs runs;
  runs.reserve(std::min(nnz, num_annotators) + 1);
  int64_t owner = -1, before = -1;
  for (int64_t p = 0; p < nnz; ++p) {
    const int64_t n = order[p], here = annotator[n];
    STD_TORCH_CHECK(owner < here || (owner == here && before < n),
                    "crowdnal: order must sort the annotations by annotator, stably (position ", p, ")");
    if (owner != here) runs.push_back(p);
    owner = here;
    before = n;
  }
  runs.push_back(nnz);
  return runs;
}

namespace {

// Whether all of a plan is `right` by its position.
template <class Right>
void check_planned(const OptionalTensor& plan, int64_t nnz, const Right& right) {
  const auto* rows = pointer<int32_t>(*plan);
  for (int64_t p = 0; p < nnz; ++p) {
    const int32_t* row = rows + 4 * p;
    STD_TORCH_CHECK(right(p, Planned{row[0], row[1], row[2], row[3]}), "crowdnal: plan[", p,
                    "] is not what order, item, annotator and label say: it is that of other annotations");
  }
}

}  // namespace

CheckedIndex check_index(const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
                         OptionalTensor plan, int64_t num_annotators, bool runs) {
  const int64_t nnz = length(annotator, "annotator"), num_items = count_items(indptr);
  CheckedIndex out{check_long(indptr, "indptr", num_items + 1),
                   check_long(item, "item", nnz),
                   check_long(annotator, "annotator", nnz),
                   check_long(order, "order", nnz),
                   check_plan(plan, nnz),
                   {},
                   {}};
  out.view = {pointer<int64_t>(out.indptr),
              pointer<int64_t>(out.item),
              pointer<int64_t>(out.annotator),
              pointer<int64_t>(out.order),
              num_items,
              nnz};
  check_range(out.view.annotator, nnz, "annotator", num_annotators);
  check_items(out.view);
  if (runs) out.runs = check_order(out.view.order, out.view.annotator, nnz, num_annotators);
  if (out.plan) {
    check_planned(out.plan, nnz, [&](int64_t p, const Planned& at) {
      const int64_t n = out.view.order[p];
      return n == at.annotation && 0 <= n && n < nnz && out.view.item[n] == at.item &&
             out.view.annotator[n] == at.annotator;
    });
  }
  return out;
}

Tensor check_labels(const Tensor& label, const CheckedIndex& index, int64_t num_labels) {
  Tensor out = check_long(label, "label", index.view.nnz);
  const int64_t* labels = pointer<int64_t>(out);
  check_range(labels, index.view.nnz, "label", num_labels);
  if (index.plan) {
    check_planned(index.plan, index.view.nnz,
                  [&](int64_t, const Planned& at) { return labels[at.annotation] == at.label; });
  }
  return out;
}

namespace {

// The shortest way to a tensor: torch::stable::empty looks its op up by name.
Tensor allocate(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) {
  AtenTensorHandle handle;
  const auto code = aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cpu(), 0, &handle);
  STD_TORCH_CHECK(code == AOTI_TORCH_SUCCESS, "crowdnal: no memory for a tensor of ", dims, " dimensions and ",
                  dims > 0 ? sizes[0] * strides[0] : 1, " elements, for ", dims > 0 ? sizes[0] : 1, " rows");
  return Tensor(handle);
}

template <class E>
void widen(const Tensor& matrices, const std::vector<int64_t>& owners, int64_t size, Tensor& out) {
  const E* from = pointer<E>(matrices);
  float* to = output<float>(out);
  parallel_for(0, static_cast<int64_t>(owners.size()), tasks_per_thread(size), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int64_t first = owners[t] * size;
      for (int64_t e = first; e < first + size; ++e) to[e] = from[e];
    }
  });
}

}  // namespace

Tensor widened(const Tensor& matrices, const int64_t* owner, int64_t count) {
  if (!is_half(matrices)) return matrices;
  int64_t sizes[4], strides[4], size = 1;
  for (int64_t d = matrices.dim() - 1; d >= 0; --d) {
    sizes[d] = matrices.size(d);
    strides[d] = matrices.stride(d);
    size *= d > 0 ? sizes[d] : 1;
  }
  Tensor out = allocate(matrices.dim(), sizes, strides, aoti_torch_dtype_float32());
  std::vector<bool> seen(sizes[0]);
  std::vector<int64_t> owners;
  for (int64_t n = 0; n < count; ++n) {
    if (!seen[owner[n]]) owners.push_back(owner[n]);
    seen[owner[n]] = true;
  }
  const auto to_float = matrices.scalar_type() == ScalarType::Half ? widen<Half> : widen<BFloat16>;
  to_float(matrices, owners, size, out);
  return out;
}

void use_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr int64_t kHugePage = 1 << 21;
  if (bytes < 4 * kHugePage) return;
  const auto begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  madvise(reinterpret_cast<void*>(begin), (bytes - kHugePage) / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
}

namespace {

Tensor fresh(int32_t dtype, int64_t size_of_one, std::initializer_list<int64_t> sizes) {
  int64_t strides[4], count = 1, d = static_cast<int64_t>(sizes.size());
  for (auto size = sizes.end(); size != sizes.begin();) {
    strides[--d] = count;
    count *= std::max<int64_t>(1, *--size);
  }
  Tensor out = allocate(static_cast<int64_t>(sizes.size()), sizes.begin(), strides, dtype);
  use_huge_pages(out.mutable_data_ptr(), count * size_of_one);
  return out;
}

}  // namespace

Tensor empty(const Tensor& like, std::initializer_list<int64_t> sizes) {
  int32_t dtype;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  return fresh(dtype, like.scalar_type() == ScalarType::Double ? 8 : 4, sizes);
}

Tensor empty_long(std::initializer_list<int64_t> sizes) { return fresh(aoti_torch_dtype_int64(), 8, sizes); }

}  // namespace crowdnal::cpu
