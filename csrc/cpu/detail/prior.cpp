#include "cpu/detail/prior.h"

#include <cmath>
#include <limits>

#include "cpu/detail/runs.h"

namespace crowdnal::cpu {

PriorArguments check_prior(OptionalTensor prior, OptionalTensor common, OptionalTensor labels_given, const Tensor& like,
                           const Shape& shape) {
  if (prior) prior = check_values(*prior, "prior", like, {shape.rows, shape.cols});
  if (common) common = check_values(*common, "common", like, {shape.rows, shape.cols});
  if (labels_given) labels_given = check_values(*labels_given, "labels_given", like, {shape.num_annotators});
  STD_TORCH_CHECK(labels_given || !prior, "crowdnal: prior needs labels_given");
  return {prior, common, labels_given};
}

namespace {

// The tables of a prior, see there; `common` [rows, cols] or null. What is not written stays as it is.
template <class T>
CROWDNAL_CLONES void fill_tables(const T* given, const T* common, int along, Prior<T>& to) {
  constexpr int64_t L = kLanes<T>;
  const int64_t cols = to.cols, size = to.rows * cols;
  for (int64_t c = 0; c < to.rows; ++c) {
    for (int64_t k = 0; k < cols; ++k) to.strength[along == 1 ? c : k] += given[c * cols + k];
  }
  for (int64_t c = 0; c < to.rows; ++c) {
    for (int64_t k = 0; k < cols; k += L) {
      const int64_t e = c * cols + k, table = c * to.width + k;
      const Bits<T> here = first_lanes<T>(cols - k);
      const Vec<T> none = Vec<T>{}, counts = only<T>(load_some(given + e, size - e), here);
      const Vec<T> total = along == 1 ? broadcast(to.strength[c]) : load(to.strength.data() + k);
      const Vec<T> own = common ? only<T>(load_some(common + e, size - e), here) : none;
      store(to.counts.data() + table, counts);
      store(to.constant.data() + table, counts == none ? none : fast_log(counts / total) - own);
      if (along == 1) store_some(to.common.data() + table, own, cols - k);
    }
  }
}

}  // namespace

template <class T>
Prior<T>::Prior(const PriorArguments& arguments, const Shape& shape, int along, int64_t runs)
    : rows(shape.rows), cols(shape.cols), width(padded<T>(shape.cols)) {
  const T *given = pointer<T>(arguments.counts), *shared = pointer<T>(arguments.common);
  bool any = false;
  for (int64_t e = 0; given && e < rows * cols; ++e) any |= !(given[e] == T(0));
  if (!any) return;
  labels_given = pointer<T>(arguments.labels_given);
  counts.resize(rows * width);
  constant.resize(rows * width);
  strength.resize(padded<T>(along == 1 ? rows : cols));
  if (along == 1) common.assign(rows * width, -std::numeric_limits<T>::infinity());
  value.resize(runs);
  fill_tables(given, shared, along, *this);
}

template <class T>
CROWDNAL_CLONES T prior_of_large(const Prior<T>& prior, const T* matrix, T u, T* grad, T* scratch) {
  return prior_of_rows<T>(prior, matrix, 0, u, grad, prior.cols, scratch, prior.width / kLanes<T>);
}

template <class T>
CROWDNAL_CLONES T prior_of_normalized(const Prior<T>& prior, const T* matrix, const T* norm,
                                      const std::vector<T>& apart, const T* values, const T* slopes, Normalization kind,
                                      T u, T* grad) {
  constexpr int64_t L = kLanes<T>;
  const int64_t cols = prior.cols, size = prior.rows * cols;
  const Vec<T> one = Vec<T>{} + T(1), tiny = broadcast<T>(T(kTiny));
  const bool plain = kind == Normalization::kNone, softplus = kind == Normalization::kSoftplus;
  std::vector<T> inverses(apart.empty() && !plain ? prior.width : 0);  // 1 / sum_y f
  for (int64_t k = 0; k < static_cast<int64_t>(inverses.size()); k += L) {
    store(inverses.data() + k, fast_exp(-load_some(norm + k, cols - k)));
  }
  Vec<T> each = {};
  for (int64_t y = 0; y < prior.rows; ++y) {
    for (int64_t k = 0; k < cols; k += L) {
      const int64_t e = y * cols + k, table = y * prior.width + k;
      const Bits<T> here = first_lanes<T>(cols - k);
      const Vec<T> counts = load(prior.counts.data() + table), x = only<T>(load_some(matrix + e, size - e), here);
      Vec<T> log_share = x, slope = one, share = {};
      if (!apart.empty()) {
        log_share = (log_value<T>(x, kind) - load_some(apart.data() + k, cols - k)) -
                    load_some(apart.data() + cols + k, cols - k);
        share = fast_exp(log_share);
        if (softplus) {
          const Softplus<T> both(x);
          slope = both.value > tiny ? both.slope / both.value : one;
        }
      } else if (!plain) {
        Vec<T> f, log_f = x;
        if (softplus) {
          Vec<T> steep;
          if (values && slopes) {
            f = load_some(values + e, size - e);
            steep = load_some(slopes + e, size - e);
          } else {
            const Softplus<T> both(x);
            f = both.value;
            steep = both.slope;
          }
          log_f = f > tiny ? fast_log(f) : x;  // below, softplus is exp
          slope = f > tiny ? steep / f : one;
        } else {
          f = values ? load_some(values + e, size - e) : fast_exp(x);
        }
        share = f * load(inverses.data() + k);
        log_share = log_f - load_some(norm + k, cols - k);
      }
      each += only<T>(counts * (load(prior.constant.data() + table) - log_share), here);
      if (!grad) continue;
      const Vec<T> change = only<T>(slope * (share * load(prior.strength.data() + k) - counts), here);
      store_some(grad + e, load_some(grad + e, size - e) + u * change, size - e);
    }
  }
  return u * sum_of<T>(each);
}

namespace {

// scores = log(sums), sums = p chances, for the items begin..end-1
template <class T>
CROWDNAL_CLONES void common_scores(const T* p, const T* chances, int64_t begin, int64_t end, const Shape& shape,
                                   T* sums, T* scores) {
  for (int64_t first = begin; first < end; first += kGroup) {
    const int64_t count = std::min(kGroup, end - first);
    const T* from[kGroup];
    T* to[kGroup];
    for (int64_t j = 0; j < count; ++j) {
      from[j] = p + (first + j) * shape.rows;
      to[j] = sums + (first + j) * shape.cols;
    }
    mix_group(from, chances, to, count, shape.rows, shape.cols);
  }
  for (int64_t e = begin * shape.cols; e < end * shape.cols; ++e) scores[e] = fast_log(sums[e]);
}

template <class T>
CROWDNAL_CLONES void common_gradient(T* grad, const T* chances, const T* sums, int64_t begin, int64_t end,
                                     const Shape& shape, T* to) {
  for (int64_t e = begin * shape.cols; e < end * shape.cols; ++e) grad[e] /= sums[e];
  std::vector<T> rows(kGroup * shape.rows);
  for (int64_t first = begin; first < end; first += kGroup) {
    const int64_t count = std::min(kGroup, end - first);
    const T* from[kGroup];
    T* each[kGroup];
    for (int64_t j = 0; j < count; ++j) {
      from[j] = grad + (first + j) * shape.cols;
      each[j] = rows.data() + j * shape.rows;
    }
    matrix_group(chances, from, each, count, shape.rows, shape.cols);
    for (int64_t e = 0; e < count * shape.rows; ++e) to[first * shape.rows + e] += rows[e];
  }
}

}  // namespace

template <class T>
CommonScores<T>::CommonScores(const T* common, const T* p, int64_t num_items, const Shape& shape)
    : shape(shape), num_items(common ? num_items : 0), chances(common ? shape.matrix() : 0),
      sums(this->num_items * shape.cols), scores(sums.size()) {
  for (size_t e = 0; e < chances.size(); ++e) chances[e] = std::exp(common[e]);
  parallel_for(0, this->num_items, tasks_per_thread(shape.matrix()), [&](int64_t begin, int64_t end) {
    common_scores(p, chances.data(), begin, end, shape, sums.data(), scores.data());
  });
}

template <class T>
void CommonScores<T>::add_gradient(T* grad, T* to) const {
  parallel_for(0, num_items, tasks_per_thread(shape.matrix()), [&](int64_t begin, int64_t end) {
    common_gradient(grad, chances.data(), sums.data(), begin, end, shape, to);
  });
}

#define CROWDNAL_INSTANTIATE(T)                                                                                     \
  template struct CommonScores<T>;                                                                                  \
  template Prior<T>::Prior(const PriorArguments&, const Shape&, int, int64_t);                                      \
  template T prior_of_large<T>(const Prior<T>&, const T*, T, T*, T*);                                               \
  template T prior_of_normalized<T>(const Prior<T>&, const T*, const T*, const std::vector<T>&, const T*, const T*, \
                                    Normalization, T, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
