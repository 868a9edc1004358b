#include "cpu/detail/normalization.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/detail/runs.h"

namespace crowdnal::cpu {
namespace {

// The highest log f of each column (0 where that is -infinity), and the logarithm of the sum relative to it. Together
// they would lose what distinguishes the labels where both are large.
template <class T>
CROWDNAL_CLONES void exact_norms(const T* x, int64_t labels, int64_t classes, Normalization kind, T* highest_of,
                                 T* rest) {
  constexpr T kLowest = -std::numeric_limits<T>::infinity();
  for (int64_t k = 0; k < classes; k += kLanes<T>) {
    Vec<T> highest = broadcast(kLowest), sum = Vec<T>{};
    for (int64_t y = 0; y < labels; ++y) {
      highest = Max::of(log_value<T>(load_some(x + y * classes + k, (labels - y) * classes - k), kind), highest);
    }
    highest = highest == kLowest ? Vec<T>{} : highest;
    for (int64_t y = 0; y < labels; ++y) {
      sum += fast_exp(log_value<T>(load_some(x + y * classes + k, (labels - y) * classes - k), kind) - highest);
    }
    store_some(highest_of + k, highest, classes - k);
    store_some(rest + k, fast_log(sum), classes - k);
  }
}

// Short rows do not fill a vector: their matrix is worked on as one row, and cut into rows afterwards.
template <class T>
inline bool is_short(int64_t classes) {
  return classes < 2 * kLanes<T>;
}

// The plain sums, padded to whole vectors. values [labels, classes]: null, or where to put f, which short rows need;
// slopes: null, or where to put df/dx of softplus, which needs `values`.
template <class T>
CROWDNAL_CLONES void sums(const T* x, int64_t labels, int64_t classes, Normalization kind, T* __restrict sum,
                          T* __restrict values, T* __restrict slopes) {
  const int64_t size = labels * classes;
  const bool softplus = kind == Normalization::kSoftplus, ready = is_short<T>(classes);
  for (int64_t e = 0; ready && e < size; e += kLanes<T>) {
    const Vec<T> v = load_some(x + e, size - e);
    if (slopes) {
      const Softplus<T> f(v);
      store_some(values + e, f.value, size - e);
      store_some(slopes + e, f.slope, size - e);
    } else {
      store_some(values + e, softplus ? Softplus<T>(v).value : fast_exp(v), size - e);
    }
  }
  for (int64_t k = 0; k < classes; k += kLanes<T>) store(sum + k, Vec<T>{});
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; k += kLanes<T>) {
      const int64_t e = y * classes + k;
      if (ready) {
        store(sum + k, load(sum + k) + load_some(values + e, size - e));
        continue;
      }
      const Vec<T> v = load_some(x + e, size - e);
      if (slopes) {
        const Softplus<T> f(v);
        store(sum + k, load(sum + k) + f.value);
        store_some(values + e, f.value, size - e);
        store_some(slopes + e, f.slope, size - e);
        continue;
      }
      const Vec<T> f = softplus ? Softplus<T>(v).value : fast_exp(v);
      store(sum + k, load(sum + k) + f);
      if (values) store_some(values + e, f, size - e);
    }
  }
}

template <class T>
CROWDNAL_CLONES bool log_sums(const T* sum, int64_t classes, T* log_norm) {
  bool good = true;
  for (int64_t k = 0; k < classes; ++k) good &= sum[k] > T(kTiny) && sum[k] < T(kHuge);
  for (int64_t k = 0; good && k < classes; k += kLanes<T>) {
    store_some(log_norm + k, fast_log(load(sum + k)), classes - k);
  }
  return good;
}

}  // namespace

template <class T>
bool log_norms(const T* x, int64_t labels, int64_t classes, Normalization kind, T* log_norm, T* values, T* slopes,
               std::vector<T>* apart) {
  thread_local std::vector<T> scratch;
  if (apart) apart->clear();
  const int64_t padded = classes + kLanes<T>;
  const bool own = !values && is_short<T>(classes);
  scratch.resize(padded + (own ? labels * classes : 0));
  sums(x, labels, classes, kind, scratch.data(), own ? scratch.data() + padded : values,
       kind == Normalization::kSoftplus ? slopes : nullptr);
  if (log_sums(scratch.data(), classes, log_norm)) return true;
  std::vector<T> unwanted;
  std::vector<T>& both = apart ? *apart : unwanted;
  both.resize(2 * classes);
  exact_norms(x, labels, classes, kind, both.data(), both.data() + classes);
  for (int64_t k = 0; k < classes; ++k) log_norm[k] = both[k] + both[classes + k];
  return false;
}

template <class T>
CROWDNAL_CLONES void log_joint(const T* prior, const T* x, const T* log_norm, const std::vector<T>& apart,
                               int64_t classes, Normalization kind, T* out) {
  const T *highest = apart.data(), *rest = highest + classes;
  for (int64_t k = 0; k < classes; k += kLanes<T>) {
    const int64_t left = classes - k;
    const Vec<T> own = load_some(prior + k, left);
    Vec<T> t = log_value<T>(load_some(x + k, left), kind);
    if (kind == Normalization::kNone) {
      t = own + t;
    } else if (apart.empty()) {
      t = (own + t) - load_some(log_norm + k, left);
    } else {
      t = own + ((t - load_some(highest + k, left)) - load_some(rest + k, left));
    }
    store_some(out + k, t, left);
  }
}

namespace {

// slope = d log f / dx, which for softplus goes to 1 where it underflows.
template <class T>
CROWDNAL_INLINE Vec<T> slope_of(const Vec<T>& x, Normalization kind) {
  const Vec<T> one = Vec<T>{} + T(1);
  if (kind != Normalization::kSoftplus) return one;
  const Softplus<T> softplus(x);
  return softplus.value > broadcast<T>(T(kTiny)) ? softplus.slope / softplus.value : one;
}

// slope A, wherever its sum is: in what `exact_norms` says.
template <class T>
CROWDNAL_INLINE Vec<T> share_of(const Vec<T>& x, const Vec<T>& highest, const Vec<T>& rest, Normalization kind) {
  if (kind == Normalization::kSoftmax) return fast_exp((x - highest) - rest);
  const auto tail = x < broadcast<T>(T(kSoftplusTail));  // there slope = exp(x), and the sum may underflow with it
  const Vec<T> none = Vec<T>{}, shift = tail ? x : none, factor = tail ? none + T(1) : Softplus<T>(x).slope;
  return factor * fast_exp((shift - highest) - rest);
}

// Divides the column by the sums if none is extreme. Both are padded to whole vectors.
template <class T>
CROWDNAL_CLONES bool divide(const T* log_norm, int64_t classes, T* column) {
  bool good = true;
  for (int64_t k = 0; k < classes; ++k) good &= log_norm[k] > T(-60) && log_norm[k] < T(60);
  for (int64_t k = 0; good && k < classes; k += kLanes<T>) {
    store(column + k, load(column + k) * fast_exp(-load(log_norm + k)));
  }
  return good;
}

// out = -slope A column. log_norm, whose place is used: as `norm` of log_norms, and behind it as much again. slopes:
// df/dx or null. scratch: [labels, classes], for short rows.
template <class T>
CROWDNAL_CLONES void spread(const T* x, T* log_norm, T* column, int64_t labels, int64_t classes, Normalization kind,
                            const T* slopes, T* __restrict scratch, T* __restrict out) {
  const int64_t size = labels * classes;
  T* rest = log_norm + classes + kLanes<T>;
  const bool divided = divide(log_norm, classes, column), given = divided && slopes;
  const bool ready = given || (divided && is_short<T>(classes));
  const bool softplus = kind == Normalization::kSoftplus;
  if (!divided) exact_norms(x, labels, classes, kind, log_norm, rest);
  for (int64_t e = 0; ready && !given && e < size; e += kLanes<T>) {
    const Vec<T> v = load_some(x + e, size - e);
    store_some(scratch + e, softplus ? Softplus<T>(v).slope : fast_exp(v), size - e);
  }
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; k += kLanes<T>) {
      const int64_t e = y * classes + k;
      Vec<T> v = load_some((given ? slopes : ready ? scratch : x) + e, size - e);
      if (divided && !ready) {
        v = softplus ? Softplus<T>(v).slope : fast_exp(v);
      } else if (!divided) {
        v = share_of<T>(v, load(log_norm + k), load(rest + k), kind);
      }
      store_some(out + e, -v * load(column + k), size - e);
    }
  }
}

// column += rows order[first..last-1] of grad
template <class T>
CROWDNAL_CLONES void add_rows(const GradRows<T>& grad, const int64_t* order, int64_t first, int64_t last,
                              int64_t classes, T* column) {
  for (int64_t p = first; p < last; ++p) {
    const T u = grad.factor(order[p]);
    const T* row = grad.values + order[p] * classes;
    for (int64_t k = 0; k < classes; k += kLanes<T>) {
      store(column + k, load(column + k) + u * load_some(row + k, classes - k));
    }
  }
}

// out[y] += row n of grad, y its label (through the slope if `x` is given), for n = order[first..last-1]
template <class T>
CROWDNAL_CLONES void add_labelled(const T* x, const GradRows<T>& grad, const int64_t* label, const int64_t* order,
                                  int64_t first, int64_t last, int64_t classes, Normalization kind, T* out) {
  for (int64_t p = first; p < last; ++p) {
    const int64_t n = order[p], row = label[n] * classes;
    const T u = grad.factor(n);
    for (int64_t k = 0; k < classes; k += kLanes<T>) {
      const int64_t available = classes - k;
      Vec<T> g = u * load_some(grad.values + n * classes + k, available);
      if (x) g = g * slope_of<T>(load_some(x + row + k, available), kind);
      store_some(out + row + k, load_some(out + row + k, available) + g, available);
    }
  }
}

// column += sum_y partial[y]
template <class T>
CROWDNAL_CLONES void add_columns(const T* partial, int64_t labels, int64_t classes, T* column) {
  for (int64_t y = 0; y < labels; ++y) {
    for (int64_t k = 0; k < classes; ++k) column[k] += partial[y * classes + k];
  }
}

// out += slope G
template <class T>
CROWDNAL_CLONES void add_sloped(const T* x, const T* grad, int64_t size, Normalization kind, T* out) {
  for (int64_t e = 0; e < size; e += kLanes<T>) {
    const Vec<T> g = load_some(grad + e, size - e) * slope_of<T>(load_some(x + e, size - e), kind);
    store_some(out + e, load_some(out + e, size - e) + g, size - e);
  }
}

}  // namespace

template <class T>
void through_normalization(const T* x, const T* log_norm, const GradRows<T>& grad, const int64_t* label,
                           const int64_t* order, int64_t first, int64_t last, int64_t labels, int64_t classes,
                           Normalization kind, const T* slopes, T* out) {
  thread_local std::vector<T> scratch;  // norm and column, padded to whole vectors; short rows, or total and partial G
  const int64_t size = labels * classes, padded = classes + kLanes<T>;
  const bool direct = last - first <= std::min(labels, kSegmentBlock), plain = kind == Normalization::kNone;
  scratch.assign(3 * padded + (direct ? (is_short<T>(classes) ? size : 0) : 2 * size), T(0));
  T *norm = scratch.data(), *column = norm + 2 * padded, *total = column + padded, *partial = total + size;
  if (plain) {
    std::fill_n(out, size, T(0));
  } else {
    std::copy_n(log_norm, classes, norm);
  }
  if (direct) {
    if (!plain) {
      add_rows(grad, order, first, last, classes, column);
      spread(x, norm, column, labels, classes, kind, slopes, total, out);
    }
    add_labelled(plain ? nullptr : x, grad, label, order, first, last, classes, kind, out);
    return;
  }
  for (int64_t block = first; block < last; block += kSegmentBlock) {
    if (block > first) std::fill_n(partial, size, T(0));
    T* into = block == first ? total : partial;
    add_labelled<T>(nullptr, grad, label, order, block, std::min(last, block + kSegmentBlock), classes, kind, into);
    for (int64_t e = 0; block > first && e < size; ++e) total[e] += partial[e];
  }
  if (!plain) {
    add_columns(total, labels, classes, column);
    spread(x, norm, column, labels, classes, kind, slopes, partial, out);
  }
  add_sloped(x, total, size, kind, out);
}

#define CROWDNAL_INSTANTIATE(T)                                                                                  \
  template bool log_norms<T>(const T*, int64_t, int64_t, Normalization, T*, T*, T*, std::vector<T>*);            \
  template void log_joint<T>(const T*, const T*, const T*, const std::vector<T>&, int64_t, Normalization, T*);   \
  template void through_normalization<T>(const T*, const T*, const GradRows<T>&, const int64_t*, const int64_t*, \
                                         int64_t, int64_t, int64_t, int64_t, Normalization, const T*, T*);
CROWDNAL_INSTANTIATE(float)
CROWDNAL_INSTANTIATE(double)
#undef CROWDNAL_INSTANTIATE

}  // namespace crowdnal::cpu
