// mix_annotators through the tiled kernel on a fixed problem: prints "right", "wrong", or what the emulator refuses.
#include <cmath>
#include <cstdio>
#include <vector>

#include "cuda/outer.cuh"

using namespace crowdnal;
using namespace crowdnal::cuda;

int main() {
  const Shape shape{2, 20, 40};
  const int64_t nnz = 45;
  std::vector<int64_t> indptr(nnz + 1), item(nnz), annotator(nnz), order(nnz);
  std::vector<float> scores(nnz * shape.rows), grad(nnz * shape.cols), out(2 * 20 * 40);
  std::vector<double> wanted(out.size());
  for (int64_t n = 0; n < nnz; ++n) {
    indptr[n + 1] = n + 1;
    item[n] = order[n] = n;
    annotator[n] = n >= 13;
    for (int64_t c = 0; c < 20; ++c) scores[n * 20 + c] = std::sin(float(n + 3 * c));
    for (int64_t k = 0; k < 40; ++k) grad[n * 40 + k] = std::cos(float(2 * n + k));
    for (int64_t e = 0; e < 800; ++e) wanted[annotator[n] * 800 + e] += scores[n * 20 + e / 40] * grad[n * 40 + e % 40];
  }
  const Index index{indptr.data(), item.data(), annotator.data(), order.data(), nnz, nnz};
  Context context;
  try {
    mix_annotators(context, GradRows<float>{grad.data(), 40}, scores.data(), index, shape, out.data());
  } catch (const std::exception& error) {
    return std::puts(error.what()), 0;
  }
  bool right = true;
  for (size_t e = 0; e < out.size(); ++e) right = right && std::fabs(out[e] - wanted[e]) < 1e-4;
  std::puts(right ? "right" : "wrong");
}
