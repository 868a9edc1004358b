// `matrices ROWS COLS COUNT..`: annotators with so many annotations each. Prints how many matrices' worth of elements a
// product with large matrices reads, and one with them transposed.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "counted.h"
#include "cuda/detail/matrix.cuh"

using namespace crowdnal;
using namespace crowdnal::cuda;

int main(int count, char** arguments) {
  std::vector<int64_t> annotator, order, item;
  for (int r = 3; r < count; ++r) annotator.insert(annotator.end(), std::atoll(arguments[r]), r - 3);
  const auto nnz = static_cast<int64_t>(annotator.size());
  for (int64_t n = 0; n < nnz; ++n) {
    order.push_back(n);
    item.push_back(0);
  }
  const Index index{nullptr, item.data(), annotator.data(), order.data(), 1, nnz};
  const Shape shape{count - 3, std::atoll(arguments[1]), std::atoll(arguments[2])};
  const std::vector<Counted> confusion(shape.num_annotators * shape.matrix(), {1.0f});
  const std::vector<float> scores(shape.rows, 1.0f), grad(nnz * shape.cols, 1.0f);
  std::vector<float> out(nnz * shape.cols), back(nnz * shape.rows);
  const auto matrices = [&] {
    const double read = Counted::reads / double(shape.matrix());
    Counted::reads = 0;
    return read;
  };
  Context context;
  multiply(context, scores.data(), confusion.data(), index, shape, out.data());
  const double forward = matrices();
  multiply_transposed(context, GradRows<float>{grad.data(), shape.cols}, confusion.data(), index, shape, back.data());
  bool right = true;
  for (float h : out) right = right && h == float(shape.rows);
  for (float h : back) right = right && h == float(shape.cols);
  std::printf("%s %g %g\n", right ? "right" : "wrong", forward, matrices());
}
