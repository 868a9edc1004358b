// The pair confusion, with its work cut in other ways than its size asks for: prints "right", "wrong", or what the
// emulator refuses. `pairs together`: forward, the same bits; `pairs chunks`: the annotators' gradient; `pairs reads`:
// how many elements of wide rows are read.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

#include "counted.h"
#include "cuda/pair_confusion.cuh"

using namespace crowdnal;
using namespace crowdnal::cuda;

constexpr int64_t B = 90, R = 3, C = 3, K = 3, nnz = 2 * B + B / 3;

struct Problem {
  explicit Problem(int64_t latents)
      : indptr(B + 1), item(nnz), annotator(nnz), order(nnz), label(nnz), difficulty(B * C * K * latents),
        competence(R * C * K * latents), grad(nnz * C), log_q(nnz * C), log_norm(nnz * C) {
    for (int64_t i = 0, n = 0; i < B; ++i) {
      for (indptr[i + 1] = indptr[i] + (i % 3 ? 2 : 3); n < indptr[i + 1]; ++n) {
        item[n] = i;
        annotator[n] = n % 7 == 0 ? 0 : (n % 5 == 0 ? 2 : 1);
        label[n] = n % K;
      }
    }
    for (int64_t r = 0, p = 0; r < R; ++r) {
      for (int64_t n = 0; n < nnz; ++n) {
        if (annotator[n] == r) order[p++] = n;
      }
    }
    const auto fill = [](std::vector<float>& values, float scale) {
      for (size_t e = 0; e < values.size(); ++e) values[e] = scale * std::sin(1.7f * static_cast<float>(e));
    };
    fill(difficulty, 2);
    for (size_t e = 0; e < difficulty.size(); ++e) {
      if (e / (K * latents) % 2 && e / latents % K == 0) difficulty[e] -= 60;  // exact rows among others
    }
    fill(competence, 9);
    fill(grad, 1);
    const Index index{indptr.data(), item.data(), annotator.data(), order.data(), B, nnz};
    pairs = {difficulty.data(), competence.data(), R, C, K, latents, index, label.data()};
  }
  void forward(int64_t together) {
    Context context;
    pair_confusion<float, float>(context, pairs, log_q.data(), log_norm.data(), together);
  }
  std::vector<float> backward(int64_t each) {
    Context context;
    std::vector<float> out(competence.size(), NAN);
    const PairGrad<float, float> given{pairs, grad.data(), log_q.data(), log_norm.data()};
    pair_confusion_backward<float, float>(context, given, nullptr, out.data(), each);
    return out;
  }

  std::vector<int64_t> indptr, item, annotator, order, label;
  std::vector<float> difficulty, competence, grad, log_q, log_norm;
  Pairs<float, float> pairs;
};

bool together_is_right(int64_t latents) {
  Problem problem(latents);
  problem.forward(1);
  const std::vector<float> q = problem.log_q, norm = problem.log_norm;
  bool all = *std::min_element(q.begin(), q.end()) < -50;
  for (int64_t together : {0, 2, 3, 5, 16, 32}) {
    std::fill(problem.log_q.begin(), problem.log_q.end(), NAN);
    problem.forward(together);
    all = all && q == problem.log_q && norm == problem.log_norm;
  }
  return all;
}

bool chunks_are_right(int64_t latents) {
  Problem problem(latents);
  problem.forward(0);
  const std::vector<float> wanted = problem.backward(1);
  bool all = true;
  for (int64_t each : {0, 5, 32, 33, 70, 100, 1000}) {
    const std::vector<float> out = problem.backward(each);
    for (size_t e = 0; e < out.size(); ++e)
      all = all && std::fabs(out[e] - wanted[e]) < 1e-5f * (1 + std::fabs(wanted[e]));
  }
  return all;
}

// Rows of two passes: one reading of each row for its maximum, one for all passes, of an item or of each of its
// annotations. Groups without work may read a row more.
bool reads_are_right(int64_t latents) {
  Problem problem(latents);
  const int64_t row = C * K * latents;
  const std::vector<Counted> difficulty(B * row, {0.5f}), competence(R * row, {0.25f});
  const Pairs<float, Counted> pairs{difficulty.data(),   competence.data(),  R, C, K, latents,
                                    problem.pairs.index, problem.pairs.label};
  const auto rows_read = [&](const auto& run) {
    Context context;
    Counted::reads = 0;
    run(context);
    return Counted::reads / double(row);
  };
  std::vector<float> dd(difficulty.size()), dc(competence.size());
  const double forward = rows_read([&](Context& context) {
    pair_confusion<float, Counted>(context, pairs, problem.log_q.data(), problem.log_norm.data(), 1);
  });
  const double backward = rows_read([&](Context& context) {
    const PairGrad<float, Counted> given{pairs, problem.grad.data(), problem.log_q.data(), problem.log_norm.data()};
    pair_confusion_backward<float, Counted>(context, given, dd.data(), dc.data());
  });
  const auto close = [](double found, double wanted) { return wanted <= found && found < wanted + 10; };
  return close(forward, 2 * R + B + nnz) && close(backward, 2 * R + B + B + nnz);
}

int main(int, char** argv) {
  const std::string part = argv[1];
  try {
    if (part == "reads") {
      std::puts(reads_are_right(88) && reads_are_right(45) ? "right" : "wrong");
      return 0;
    }
    const auto right = part == "together" ? together_is_right : chunks_are_right;
    // groups of four lanes and of eight, rows that one walks along
    std::puts(right(4) && right(3) && right(88) && right(45) ? "right" : "wrong");
  } catch (const std::exception& error) {
    std::puts(error.what());
  }
}
