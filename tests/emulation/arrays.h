// Between numpy arrays and the pointers that the kernels take. Every function has the arguments of its op.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <initializer_list>
#include <limits>
#include <optional>

#include "common/index.h"
#include "cuda/launch.h"

namespace py = pybind11;
using crowdnal::Index;
using crowdnal::Shape;
using crowdnal::cuda::Context;

template <class T>
using Array = py::array_t<T, py::array::c_style>;
template <class T>
using MaybeArray = std::optional<Array<T>>;
using Longs = Array<int64_t>;

template <class T>
const T* pointer(const Array<T>& array) {
  return array.data();
}
template <class T>
const T* pointer(const MaybeArray<T>& array) {
  return array ? array->data() : nullptr;
}

// Filled with NaN: what a kernel forgets shows.
template <class T>
Array<T> empty(std::initializer_list<int64_t> sizes) {
  Array<T> out{std::vector<int64_t>(sizes)};
  std::fill_n(out.mutable_data(), out.size(), std::numeric_limits<T>::quiet_NaN());
  return out;
}

// How the next launches run.
inline uint64_t& seed() {
  static uint64_t value = 0;
  return value;
}
inline int64_t& most_blocks() {
  static int64_t value = INT32_MAX;
  return value;
}
inline Context context() {
  Context out;
  out.seed = seed();
  out.most_blocks = most_blocks();
  return out;
}

inline Index index_of(const Longs& indptr, const Longs& item, const Longs& annotator, const Longs& order) {
  return {indptr.data(), item.data(), annotator.data(), order.data(), indptr.size() - 1, annotator.size()};
}

template <class T>
Shape shape_of(const Array<T>& confusion) {
  return {confusion.shape(0), confusion.shape(1), confusion.shape(2)};
}
