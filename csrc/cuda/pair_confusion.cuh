// Pair confusion of LIA: log_q[n, k] = log_softmax over j of logsumexp_l (D_i + C_r)[k, j, l] at the observed label.
#pragma once

#include "cuda/pair_rows.cuh"

namespace crowdnal::cuda {

// A group a class of `together` annotations, which lie together: the exponentials of an item are taken once as long as
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
        if (__ballot_sync(kAll, now.item != held)) exp_row(pairs.difficulty + now.item * size, place, e);
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

template <class T, class E>
struct PairGrad {
  Pairs<T, E> pairs;
  const T *grad, *log_q, *log_norm;  // [nnz, classes]
};

// What multiplies exp(D + C) of an annotation's class in the gradient: for the labels that were not observed, and for
// the one that was. Neither for an exact row.
template <class T>
struct Coefficients {
  T other, observed;
  bool exact;
  template <class E>
  __device__ Coefficients(const PairGrad<T, E>& grad, int64_t at) {
    const T g = grad.grad[at], norm = grad.log_norm[at], gap = -norm - grad.log_q[at];
    const T all = std::exp(-norm), own = std::exp(gap);
    exact = !(gap <= kGap<T>);
    other = exact ? T(0) : -g * all;
    observed = exact ? T(0) : g * (own - all);  // exactly 0 where the label is certain
  }
};

// Sums of one class over a block of annotations of an item or an annotator.
template <class T, class L>
struct PairSum {
  T scaled[L::kOwn] = {};  // what the owner's exponentials are yet to multiply
  bool exact = false;      // whether there are exact rows

  // `other(t)`: the exponentials of the other side.
  template <class Other>
  __device__ void add(const Coefficients<T>& by, const Other& other, const Place<L>& place, int own, int latents) {
    for (int j = 0; j < L::kPer; ++j) {
      const T factor = place.observed(j, own, latents) ? by.observed : by.other;
      for (int t = j * L::V; t < (j + 1) * L::V; ++t) scaled[t] += factor * other(t);
    }
    exact = exact || by.exact;
  }
  // to = values, or that much more.
  __device__ static void write(const T (&values)[L::kOwn], bool more, const Place<L>& place, T* to) {
    to += place.at;
    for (int j = 0; j < L::kPer; ++j) {
      if (!place.has(j)) continue;
      T sum[L::V] = {};
      if (more) load<L::V>(to + place.step(j), sum);
      for (int v = 0; v < L::V; ++v) sum[v] += values[j * L::V + v];
      store<L::V>(sum, to + place.step(j));
    }
  }
  // Writes the block and begins again: annotations order(begin) .. order(end - 1), e of the owner.
  template <class E, class Order>
  __device__ void close(const PairGrad<T, E>& grad, const T (&e)[L::kOwn], int64_t begin, int64_t end,
                        const Order& order, int k, const Place<L>& place, bool more, T* to) {
    for (int t = 0; t < L::kOwn; ++t) scaled[t] *= e[t];
    write(scaled, more, place, to);
    for (int t = 0; t < L::kOwn; ++t) scaled[t] = T(0);
    if (exact) add_exact(grad, begin, end, order, k, place, to);
    exact = false;
  }
  // From the sums once more: logarithms as large as these are too coarse to take an exponential of.
  template <class E, class Order>
  __device__ static void add_exact(const PairGrad<T, E>& grad, int64_t begin, int64_t end, const Order& order,
                                   int k, const Place<L>& place, T* to) {
    const Pairs<T, E>& pairs = grad.pairs;
    T total[L::kOwn] = {};
    CROWDNAL_ROLLED
    for (int64_t p = begin; p < end; ++p) {
      const Annotation a = pairs.fetch(order(p));
      const int64_t at = a.n * pairs.classes + k;
      if (!Coefficients<T>(grad, at).exact) continue;
      const int latents = static_cast<int>(pairs.latents), own = pairs.observed(a);
      const ExactRow<T, E, L::G> row(pairs, a, k);
      const ShiftedSum<T> all = row.sum(0, place.tile), observed = row.sum(own, own + latents);
      const T g = grad.grad[at];
      // nothing of a sum without terms
      const T by_all = all.sum == T(0) ? T(0) : -g / all.sum, by_own = observed.sum == T(0) ? T(0) : g / observed.sum;
      for (int j = 0; j < L::kPer; ++j) {
        for (int v = 0; place.has(j) && v < L::V; ++v) {
          const T value = row(place.begin + place.step(j) + v);
          total[j * L::V + v] += by_all * std::exp(value - all.shift);
          if (place.observed(j, own, latents)) total[j * L::V + v] += by_own * std::exp(value - observed.shift);
        }
      }
    }
    write(total, true, place, to);
  }
};

// out[i, k, m] = sum_{n of i} gradient at n, k and m, a group a class of an item.                   out: as difficulty
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
    for (int first = 0; first < (L::kWide ? tile : 1); first += L::kWidth) {
      const Place<L> place(k, first, tile);
      PairSum<T, L> sum;
      int64_t next = begin;
      Annotation ahead = begin < end ? pairs.fetch(begin) : Annotation{};  // on its way while one is worked on
      do {
        const int64_t block = next, stop = block + kBlock < end ? block + kBlock : end;
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
        exp_row(pairs.difficulty + i * size, place, e);
        for (int t = 0; t < L::kOwn; ++t) e[t] = begin < end ? e[t] : T(0);
        if (row < rows && (block == begin || block < end)) {
          sum.close(grad, e, block, next, [](int64_t n) { return n; }, k, place, block > begin, out + i * size);
        }
      } while (__ballot_sync(kAll, next < end));
    }
  }
}

// out[r, k, m] = sum_{n of r} gradient at n, k and m, a group a class of a chunk.                   out: as competence
template <class T, class E, class L>
__global__ void __launch_bounds__(kThreads, 20 / sizeof(T))
    pair_annotators_kernel(PairGrad<T, E> grad, Chunks chunks, T* out, T* slots) {
  constexpr int kGroups = kThreads / L::G;
  const Pairs<T, E>& pairs = grad.pairs;
  const Index& index = pairs.index;
  const int classes = static_cast<int>(pairs.classes), tile = pairs.tile(), size = pairs.size();
  const int latents = static_cast<int>(pairs.latents);
  const int64_t units = chunks.count * classes;
  for (int64_t base = int64_t(blockIdx.x) * kGroups; base < units; base += int64_t(gridDim.x) * kGroups) {
    const int64_t unit = base + threadIdx.x / L::G, chunk = unit < units ? unit / classes : 0;
    const int k = static_cast<int>(unit % classes);
    const int64_t begin = chunk * chunks.size, stop = begin + chunks.size < index.nnz ? begin + chunks.size : index.nnz;
    const int64_t end = unit < units ? stop : begin;
    for (int first = 0; first < (L::kWide ? tile : 1); first += L::kWidth) {
      const Place<L> place(k, first, tile);
      PairSum<T, L> sum;
      T d[L::kOwn];
      for (int t = 0; t < L::kOwn; ++t) d[t] = T(-INFINITY);
      const auto order = [&](int64_t p) { return index.order[p < stop ? p : stop - 1]; };
      Annotation now = pairs.fetch(order(begin));
      int64_t after = order(begin + 1), owner = now.annotator;
      pairs.check(now);
      T* to = continues(index, begin) ? slots + chunk * size : out + owner * size;
      bool begun = false;
      int in_block = 0;
      for (int64_t p = begin; __ballot_sync(kAll, p < end); ++p) {
        pairs.check(now);
        const E* matrix = pairs.difficulty + now.item * size;
        load_row(matrix, place, d);
        const Coefficients<T> by(grad, now.n * classes + k);
        const int own = pairs.observed(now);
        now = pairs.fetch(after);  // the next: on its way while this one is worked on
        after = order(p + 2);
        const T shift = highest(matrix, place, d);
        if (p >= end) continue;
        sum.add(by, [&](int t) { return std::exp(d[t] - shift); }, place, own, latents);
        const bool more = p + 1 < end && now.annotator == owner;
        if (++in_block < kBlock && more) continue;
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
    const Chunks chunks{chunk, ceil_div(nnz, chunk)};
    T* slots = context.template scratch<T>(chunks.count * size);
    context.zero(competence_grad, pairs.num_annotators * size);
    const int64_t groups = chunks.count * pairs.classes;
    launch(context, pair_annotators_kernel<T, E, L>, group_blocks<L::G>(groups), kThreads, 0, grad, chunks,
           competence_grad, slots);
    add_slots(context, pairs.index, size, chunks, slots, competence_grad);
  });
}

}  // namespace crowdnal::cuda
