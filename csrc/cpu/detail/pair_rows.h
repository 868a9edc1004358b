// Loops over one annotation of the pair confusion, cloned for newer processors.
// Exponentials of a sum factorise: exp(D + C) = exp(D) exp(C), so they are taken once per item and once per annotator,
// and an annotation costs multiply-adds. Where such a sum gets too small to be accurate, its class goes through
// logarithms instead (the exact rows).
#pragma once

#include <cstdint>

namespace crowdnal::cpu {

// How the exponentials of a [classes, labels, latents] tensor lie: [blocks][labels * latents][width], with the class
// as the lane, so that every class has its own sum. Lanes without a class are 0.
struct Tiles {
  int64_t classes, labels, latents;
  int64_t inner() const { return labels * latents; }
  int64_t matrix() const { return classes * inner(); }
  int64_t width() const { return classes <= 4 ? 4 : (classes <= 8 ? 8 : 16); }
  int64_t blocks() const { return (classes + width() - 1) / width(); }
  int64_t padded() const { return blocks() * width(); }
  int64_t size() const { return padded() * inner(); }
};

// An item or an annotator.
template <class T>
struct Side {
  const T* values;   // [classes, labels * latents]
  const T* highest;  // [classes] maximum of each class's values; 0 where they are all -infinity
  const T* tile;     // [blocks, labels * latents, width] exp(values - highest)
};

// highest and tile of `values`.
template <class T>
void pair_tile(const T* values, const Tiles& tiles, T* highest, T* tile);

// log_norm[k] = log sum_{j, l} v[k, j, l] and log_q[k] = log sum_l v[k, label, l] - log_norm[k], where v is the
// product of the tiles. A class for which nothing is possible: -infinity twice.
template <class T>
void pair_row(const Side<T>& item, const Side<T>& annotator, const Tiles& tiles, int64_t label, T* log_q, T* log_norm);

// What multiplies v in the gradient: coefficients [2, padded] for the labels that were not observed and for the one
// that was; 0 for exact classes. Returns the number of these.
template <class T>
int64_t pair_coefficients(const T* grad, const T* log_q, const T* log_norm, const Tiles& tiles, T* coefficients);

// total += coefficients x tile, for `count` annotations.
template <class T>
void pair_accumulate(const T* const* tile, const T* const* coefficients, const int64_t* label, int64_t count,
                     const Tiles& tiles, T* total);

// out[k, j, l] = tile x total; destroys `total`.
template <class T>
void pair_release(const T* tile, const Tiles& tiles, T* total, T* out);

// Adds the gradient of an annotation's exact classes to `out`.
template <class T>
void pair_exact_gradient(const Side<T>& item, const Side<T>& annotator, const Tiles& tiles, int64_t label,
                         const T* grad, const T* log_q, const T* log_norm, T* out);

}  // namespace crowdnal::cpu
