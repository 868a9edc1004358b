// torch's parallel_for on threads that ThreadSanitizer knows, in place of OpenMP's, whose barriers it does not see. The
// least share of a thread is not minded: small problems are divided, too.
#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <thread>
#include <vector>

extern "C" AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t, ParallelFunc body, void* context) {
  const int64_t shares = std::clamp<int64_t>(end - begin, 1, 4);
  std::vector<std::thread> threads;
  for (int64_t n = 0; n < shares; ++n) {
    const int64_t first = begin + (end - begin) * n / shares, last = begin + (end - begin) * (n + 1) / shares;
    threads.emplace_back([=] { body(first, last, context); });
  }
  for (auto& thread : threads) thread.join();
  return 0;
}
