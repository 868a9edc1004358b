#include "cpu/tensors.h"

namespace crowdnal::cpu {
namespace {

// Without the dispatcher where there is nothing to do.
Tensor packed(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

Tensor check_long(const Tensor& tensor, const char* name, int64_t size) {
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Long, "crowdnal: ", name, " must be int64");
  STD_TORCH_CHECK(tensor.dim() == 1 && tensor.size(0) == size, "crowdnal: ", name, " must have shape [", size, "]");
  return packed(tensor);
}

void check_range(const Tensor& tensor, const char* name, int64_t bound) {
  const int64_t* values = pointer<int64_t>(tensor);
  const int64_t count = tensor.size(0);
  for (int64_t n = 0; n < count; ++n) {
    STD_TORCH_CHECK(values[n] >= 0 && values[n] < bound, "crowdnal: ", name, "[", n, "] = ", values[n],
                    " is out of range [0, ", bound, ")");
  }
}

}  // namespace

CheckedIndex check_index(const Tensor& indptr, const Tensor& item, const Tensor& annotator, const Tensor& order,
                         int64_t num_annotators, int64_t num_items, bool sorted) {
  const int64_t nnz = annotator.size(0);
  CheckedIndex out{check_long(indptr, "indptr", num_items + 1), check_long(item, "item", nnz),
                   check_long(annotator, "annotator", nnz), check_long(order, "order", nnz), {}};
  out.view = {pointer<int64_t>(out.indptr), pointer<int64_t>(out.item), pointer<int64_t>(out.annotator),
              pointer<int64_t>(out.order), num_items, nnz};
  const Index& view = out.view;
  check_range(out.annotator, "annotator", num_annotators);
  check_range(out.order, "order", nnz);
  STD_TORCH_CHECK(view.indptr[0] == 0 && view.indptr[num_items] == nnz, "crowdnal: indptr must run from 0 to ", nnz);
  for (int64_t i = 0; i < num_items; ++i) {
    STD_TORCH_CHECK(view.indptr[i] <= view.indptr[i + 1] && view.indptr[i + 1] <= nnz,
                    "crowdnal: indptr must not decrease (item row ", i, ")");
    for (int64_t n = view.indptr[i]; n < view.indptr[i + 1]; ++n) {
      STD_TORCH_CHECK(view.item[n] == i, "crowdnal: item[", n, "] = ", view.item[n], " but indptr says ", i);
    }
  }
  for (int64_t p = 1; sorted && p < nnz; ++p) {
    const int64_t before = view.annotator[view.order[p - 1]], here = view.annotator[view.order[p]];
    STD_TORCH_CHECK(before < here || (before == here && view.order[p - 1] < view.order[p]),
                    "crowdnal: order must sort the annotations by annotator, stably (position ", p, ")");
  }
  return out;
}

Tensor check_labels(const Tensor& label, int64_t nnz, int64_t num_labels) {
  Tensor out = check_long(label, "label", nnz);
  check_range(out, "label", num_labels);
  return out;
}

Tensor check_values(const Tensor& values, const char* name, const Tensor& like, std::initializer_list<int64_t> sizes) {
  STD_TORCH_CHECK(values.scalar_type() == like.scalar_type(), "crowdnal: ", name, " must have the dtype of confusion");
  bool same = values.dim() == static_cast<int64_t>(sizes.size());
  int64_t d = 0;
  for (int64_t size : sizes) same = same && values.size(d++) == size;
  STD_TORCH_CHECK(same, "crowdnal: ", name, " has the wrong shape");
  return packed(values);
}

Tensor check_confusion(const Tensor& confusion) {
  STD_TORCH_CHECK(confusion.dim() == 3 && confusion.size(1) > 0 && confusion.size(2) > 0,
                  "crowdnal: confusion must have 3 dimensions, with at least one class and one label");
  return packed(confusion);
}

}  // namespace crowdnal::cpu
