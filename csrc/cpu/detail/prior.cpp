#include "cpu/detail/prior.h"

#include <cmath>
#include <limits>

namespace crowdnal::cpu {

PriorArguments check_prior(OptionalTensor prior, OptionalTensor common, OptionalTensor labels_given, const Tensor& like,
                           const Shape& shape) {
  if (prior) prior = check_values(*prior, "prior", like, {shape.rows, shape.cols});
  if (common) common = check_values(*common, "common", like, {shape.rows, shape.cols});
  if (labels_given) labels_given = check_values(*labels_given, "labels_given", like, {shape.num_annotators});
  STD_TORCH_CHECK(labels_given || !prior, "crowdnal: prior needs labels_given");
  return {prior, common, labels_given};
}

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
  for (int64_t e = 0; e < rows * cols; ++e) strength[along == 1 ? e / cols : e % cols] += given[e];
  for (int64_t c = 0; c < rows; ++c) {
    for (int64_t k = 0; k < cols; ++k) {
      const T count = given[c * cols + k], own = shared ? shared[c * cols + k] : T(0);
      counts[c * width + k] = count;
      if (count != T(0)) constant[c * width + k] = std::log(count / strength[along == 1 ? c : k]) - own;
      if (along == 1) common[c * width + k] = own;
    }
  }
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

#define CROWDNAL_INSTANTIATE(T)                                                                                     \
  template Prior<T>::Prior(const PriorArguments&, const Shape&, int, int64_t);                                      \
  template T prior_of_large<T>(const Prior<T>&, const T*, T, T*, T*);                                               \
  template T prior_of_normalized<T>(const Prior<T>&, const T*, const T*, const std::vector<T>&, const T*, const T*, \
                                    Normalization, T, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
