// `chunks SIZE COUNT..`: chunks of SIZE positions over annotators with so many annotations each. Prints where they are
// cut, and how many slots begin at each.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuda/detail/chunks.cuh"

using namespace crowdnal;
using namespace crowdnal::cuda;

int main(int count, char** arguments) {
  std::vector<int64_t> annotator, order;
  for (int r = 2; r < count; ++r) annotator.insert(annotator.end(), std::atoll(arguments[r]), r - 2);
  const auto nnz = static_cast<int64_t>(annotator.size());
  for (int64_t n = 0; n < nnz; ++n) order.push_back(n);
  const int64_t size = std::atoll(arguments[1]);
  const Index index{nullptr, nullptr, annotator.data(), order.data(), 0, nnz};
  Context context;
  const Chunks chunks = cut(context, index, Chunks{size, ceil_div(nnz, size)});
  for (int64_t chunk = 0; chunk < chunks.count; ++chunk) {
    std::printf("%d %d %d\n", int(chunks.begin(chunk)), int(chunks.end(chunk, nnz)),
                chunks.slots_from ? chunks.slots_from[chunk] : 0);
  }
}
