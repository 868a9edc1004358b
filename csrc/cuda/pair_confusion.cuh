// Pair confusion of LIA: log_q[n, k] = log_softmax over j of logsumexp_l (D_i + C_r)[k, j, l] at the observed label.
#pragma once

#include "cuda/detail/pair_sum.cuh"

namespace crowdnal::cuda {

// A group per class of `together` annotations, which lie together: the exponentials of an item are taken once as long as
// it stays the same. Sums of rows that are wider than a group rest where the results will lie. Two lanes write what an
// annotation has got, so a group waits for as many annotations as it has pairs of them.
template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads, 24 / sizeof(T))
    pair_kernel(Pairs<T, E> pairs, int together, T* log_q, T* log_norm) {
  constexpr int kGroups = kThreads / L::G, kReady = L::G / 2;
  const int classes = static_cast<int>(pairs.classes), tile = pairs.tile(), size = pairs.size();
  const int lane = threadIdx.x % L::G, latents = static_cast<int>(pairs.latents);
  const int64_t units = (pairs.index.nnz + together - 1) / together * classes;
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < units; base += int64_t(gridDim.x) * kGroups) {
    const int64_t unit = base + threadIdx.x / L::G, part = unit < units ? unit / classes : 0;
    const int64_t begin = part * together, left = unit < units ? pairs.index.nnz - begin : 0;
    const int k = static_cast<int>(unit % classes), count = left < together ? static_cast<int>(left) : together;
    T *norms = log_norm + begin * classes + k, *qs = log_q + begin * classes + k, *results = lane % 2 ? qs : norms;
    unsigned exact = 0;  // which of them
    for (int first = 0; first < (L::kWide ? tile : 1); first += L::kWidth) {
      const Place<L> place(k, first, tile);
      const bool last = !L::kWide || first + L::kWidth >= tile;
      if constexpr (L::kWide) __syncwarp();  // what rests was written by other lanes
      int64_t held = -1;
      T e[L::kOwn], c[L::kOwn] = {}, kept = T(0), kept_observed = T(0);
      Annotation now = pairs.fetch(begin);
      for (int t = 0; t < together; ++t) {
        pairs.check(now);
        load_row(pairs.tile_of(now.annotator), place, c);
        const Annotation next = pairs.fetch(begin + (t + 1 < count ? t + 1 : 0));
        if (__ballot_sync(kAll, now.item != held)) {
          exp_row(pairs.difficulty + now.item * size, place, pairs.template highest_of<L>(now.item, k), e);
        }
        const int own = pairs.observed(now);
        const bool resumes = first > 0 && t < count && lane == 0;
        T sum = resumes ? norms[t * classes] : T(0), observed = resumes ? qs[t * classes] : T(0);
        for (int j = 0; j < L::kPer; ++j) {
          T piece = T(0);
          for (int v = j * L::V; v < (j + 1) * L::V; ++v) piece += e[v] * c[v];
          sum += piece;
          observed += place.observed(j, own, latents) ? piece : T(0);
        }
        sum = group_sum<L::G>(sum);
        observed = group_sum<L::G>(observed);  // of the very bits that went into `sum`
        held = now.item;
        now = next;
        if (!last) {
          if (t < count && lane < 2) results[t * classes] = lane ? observed : sum;
          continue;
        }
        if (t < count && !(observed > kTiny<T>)) exact |= 1u << t;
        const int turn = t % kReady;
        if (turn == lane / 2) {
          kept = sum;
          kept_observed = observed;
        }
        const int mine = t - turn + lane / 2;
        if ((turn + 1 == kReady || t + 1 == together) && mine <= t && mine < count) {
          results[mine * classes] = std::log(lane % 2 ? kept_observed / kept : kept);
        }
      }
    }
    for (; exact; exact &= exact - 1) {
      const int t = __ffs(exact) - 1;
      const Annotation a = pairs.fetch(begin + t);
      const int own = pairs.observed(a);
      const ExactRow<T, E, L::G> row(pairs, a, k);
      const ShiftedSum<T> all = row.sum(0, tile), observed = row.sum(own, own + latents);
      const T difference = (observed.shift - all.shift) + (std::log(observed.sum) - std::log(all.sum));
      const T norm = all.shift + std::log(all.sum), q = all.sum == T(0) ? T(-INFINITY) : difference;
      if (lane / 2 == t % kReady) results[t * classes] = lane % 2 ? q : norm;  // who wrote before
    }
  }
}

// out[i, k, m] = sum_{n of i} gradient at n, k and m, a group per class and item.                   out: as difficulty
template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads, 24 / sizeof(T)) pair_items_kernel(PairGrad<T, E> grad, T* out) {
  constexpr int kGroups = kThreads / L::G;
  const Pairs<T, E>& pairs = grad.pairs;
  const int classes = static_cast<int>(pairs.classes), tile = pairs.tile(), size = pairs.size();
  const int latents = static_cast<int>(pairs.latents);
  const int64_t rows = pairs.index.num_items * classes;
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < rows; base += int64_t(gridDim.x) * kGroups) {
    const int64_t row = base + threadIdx.x / L::G, i = row < rows ? row / classes : 0;
    const int k = static_cast<int>(row % classes);
    const int64_t begin = row < rows ? pairs.index.indptr[i] : 0, end = row < rows ? pairs.index.indptr[i + 1] : 0;
    CROWDNAL_ASSERT(0 <= begin && begin <= end && end <= pairs.index.nnz);
    const T along = begin < end ? pairs.template highest_of<L>(i, k) : T(0);
    for (int first = 0; first < (L::kWide ? tile : 1); first += L::kWidth) {
      const Place<L> place(k, first, tile);
      PairSum<T, L> sum;
      int64_t next = begin;
      Annotation ahead = begin < end ? pairs.fetch(begin)
                                     : Annotation{};  // its load is in flight while one is worked on
      do {
        const int64_t block = next, stop = block + kTermBlock < end ? block + kTermBlock : end;
        T c[L::kOwn] = {};
        while (next < stop) {
          const Annotation now = ahead;
          pairs.check(now);
          load_row(pairs.tile_of(now.annotator), place, c);
          if (++next < end) ahead = pairs.fetch(next);
          const Coefficients<T> by(grad, now.n * classes + k);
          sum.add(by, [&](int t) { return c[t]; }, place, pairs.observed(now), latents);
        }
        T e[L::kOwn];
        exp_row(pairs.difficulty + i * size, place, along, e);
        for (int t = 0; t < L::kOwn; ++t) e[t] = begin < end ? e[t] : T(0);
        if (row < rows && (block == begin || block < end)) {
          sum.close(grad, e, block, next, [](int64_t n) { return n; }, k, place, block > begin, out + i * size);
        }
      } while (__ballot_sync(kAll, next < end));
    }
  }
}

// out[r, k, m] = sum_{n of r} gradient at n, k and m, a group per class and chunk.                   out: as competence
// `abreast` chunks start side by side, evenly spread over all, and so on with those behind them: if every annotator has
// one, they pass the items at about the same time, and find in the cache what another has fetched.
template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads, 20 / sizeof(T))
    pair_annotators_kernel(PairGrad<T, E> grad, Chunks chunks, int64_t abreast, T* out, T* slots) {
  constexpr int kGroups = kThreads / L::G;
  const Pairs<T, E>& pairs = grad.pairs;
  const Index& index = pairs.index;
  const int classes = static_cast<int>(pairs.classes), tile = pairs.tile(), size = pairs.size();
  const int latents = static_cast<int>(pairs.latents);
  const int64_t units = (chunks.count + abreast - 1) / abreast * abreast * classes;
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < units; base += int64_t(gridDim.x) * kGroups) {
    const int64_t unit = base + threadIdx.x / L::G, column = unit / classes % abreast, row = unit / classes / abreast;
    const int k = static_cast<int>(unit % classes);
    const int64_t top = column * chunks.count / abreast, bottom = (column + 1) * chunks.count / abreast;
    const bool active = unit < units && row < bottom - top;
    const int64_t chunk = active ? top + row : 0, begin = chunks.begin(chunk);
    const int64_t stop = chunks.end(chunk, index.nnz), end = active ? stop : begin;
    for (int first = 0; first < (L::kWide ? tile : 1); first += L::kWidth) {
      const Place<L> place(k, first, tile);
      PairSum<T, L> sum;
      T d[L::kOwn];
      for (int t = 0; t < L::kOwn; ++t) d[t] = T(-INFINITY);
      const auto order = [&](int64_t p) { return index.order[p < stop ? p : stop - 1]; };
      Annotation now = pairs.fetch(order(begin));
      int64_t after = order(begin + 1), owner = now.annotator;
      pairs.check(now);
      T* to = chunks.in_slot(chunk) ? slots + chunk * size : out + owner * size;
      bool begun = false;
      int in_block = 0;
      for (int64_t p = begin; __ballot_sync(kAll, p < end); ++p) {
        pairs.check(now);
        const E* matrix = pairs.difficulty + now.item * size;
        load_row(matrix, place, d);
        const T along = pairs.template highest_of<L>(now.item, k);
        const Coefficients<T> by(grad, now.n * classes + k);
        const int own = pairs.observed(now);
        now = pairs.fetch(after);  // the next: its load is in flight while this one is worked on
        after = order(p + 2);
        const T shift = L::kWide ? along : highest<L>(d);
        if (p >= end) continue;
        sum.add(by, [&](int t) { return std::exp(d[t] - shift); }, place, own, latents);
        const bool more = p + 1 < end && now.annotator == owner;
        if (++in_block < kTermBlock && more) continue;
        T c[L::kOwn] = {};
        load_row(pairs.tile_of(owner), place, c);
        sum.close(grad, c, p + 1 - in_block, p + 1, order, k, place, begun, to);
        begun = more;
        in_block = 0;
        if (!more && p + 1 < end) {
          owner = now.annotator;
          to = out + owner * size;
        }
      }
    }
  }
}

// log_q, log_norm: [nnz, classes]. together: 1 to 32, or 0: as sizes have it.
template <class T, class E>
void pair_confusion(Context& context, Pairs<T, E> pairs, T* log_q, T* log_norm, int64_t together = 0) {
  pairs = with_tiles(context, pairs);
  constexpr int64_t kMost = 16, kGroupsWanted = 1 << 16;
  if (together == 0) together = std::clamp<int64_t>(pairs.index.nnz * pairs.classes / kGroupsWanted, 1, kMost);
  const int64_t groups = ceil_div(pairs.index.nnz, together) * pairs.classes;
  for_pair_tier(pairs, [&](auto tier) {
    using L = decltype(tier);
    launch(context, pair_kernel<T, E, L>, group_blocks<L::G>(groups), kThreads, 0, pairs, together, log_q, log_norm);
  });
}

// each: annotations of a chunk, or 0: as sizes have it.
template <class T, class E>
void pair_confusion_backward(Context& context, PairGrad<T, E> grad, T* difficulty_grad, T* competence_grad,
                             int64_t each = 0) {
  grad.pairs = with_tiles(context, grad.pairs);
  const Pairs<T, E>& pairs = grad.pairs;
  const int64_t nnz = pairs.index.nnz, size = pairs.size();
  for_pair_tier(pairs, [&](auto tier) {
    using L = decltype(tier);
    if (difficulty_grad) {
      const int64_t rows = pairs.index.num_items * pairs.classes;
      launch(context, pair_items_kernel<T, E, L>, group_blocks<L::G>(rows), kThreads, 0, grad, difficulty_grad);
    }
    if (!competence_grad) return;
    constexpr int64_t kThreadsWanted = 1 << 20, kSlotElements = 1 << 24, kLeast = 8;
    const int64_t most = std::max<int64_t>(1, std::min(kThreadsWanted / (pairs.classes * L::G), kSlotElements / size));
    const int64_t chunk = each > 0 ? each : std::max(kLeast, ceil_div(nnz, most));
    const Chunks chunks = cut(context, pairs.index, Chunks{chunk, ceil_div(nnz, chunk)});
    T* slots = context.template scratch<T>(chunks.count * size);
    context.zero(competence_grad, pairs.num_annotators * size);
    const int64_t abreast = std::max<int64_t>(1, std::min(pairs.num_annotators, chunks.count));
    const int64_t groups = ceil_div(chunks.count, abreast) * abreast * pairs.classes;
    launch(context, pair_annotators_kernel<T, E, L>, group_blocks<L::G>(groups), kThreads, 0, grad, chunks, abreast,
           competence_grad, slots);
    add_slots(context, pairs.index, size, chunks, slots, competence_grad);
  });
}

}  // namespace crowdnal::cuda
