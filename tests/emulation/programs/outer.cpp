// mix_annotators through the kernel of a warp and the tiled one, each on a fixed problem: prints "right", "wrong", or what the emulator refuses.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/detail/outer.cuh"

using namespace crowdnal;
using namespace crowdnal::cuda;

bool right(const Shape& shape) {
  const int64_t nnz = 45, rows = shape.rows, cols = shape.cols;
  std::vector<int64_t> indptr(nnz + 1), item(nnz), annotator(nnz), order(nnz);
  std::vector<float> scores(nnz * rows), grad(nnz * cols), out(3 * rows * cols);
  std::vector<double> wanted(out.size());
  for (int64_t n = 0; n < nnz; ++n) {
    indptr[n + 1] = n + 1;
    item[n] = order[n] = n;
    annotator[n] = (n >= 3) + (n >= 13);  // two in the first chunk
    for (int64_t c = 0; c < rows; ++c) scores[n * rows + c] = std::sin(float(n + 3 * c));
    for (int64_t k = 0; k < cols; ++k) grad[n * cols + k] = std::cos(float(2 * n + k));
    for (int64_t e = 0; e < rows * cols; ++e) {
      wanted[annotator[n] * rows * cols + e] += scores[n * rows + e / cols] * grad[n * cols + e % cols];
    }
  }
  const Index index{indptr.data(), item.data(), annotator.data(), order.data(), nnz, nnz};
  Context context;
  mix_annotators(context, GradRows<float>{grad.data(), cols}, scores.data(), index, shape, out.data());
  bool all = true;
  for (size_t e = 0; e < out.size(); ++e) all = all && std::fabs(out[e] - wanted[e]) < 1e-4;
  return all;
}

int main() {
  try {
    std::puts(right({3, 9, 10}) && right({3, 20, 40}) ? "right" : "wrong");
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
