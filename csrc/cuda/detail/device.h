// The device of a tensor, its current stream, and memory from torch's allocator. The tests have another in its place, for
// the emulator (tests/emulation/cuda/detail/device.h).
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <deque>

#include "arguments.h"
#include "cuda/detail/launch.h"

namespace crowdnal::cuda {

class Device : public Context {
 public:
  explicit Device(const Tensor& like)
      : Context(current_stream(device_of(like))), index_(like.get_device_index()), guard_(index_) {}

  bool has(const Tensor& tensor) const { return tensor.is_cuda() && tensor.get_device_index() == index_; }

  Tensor make(int64_t dims, const int64_t* sizes, const int64_t* strides, int32_t dtype) const {
    AtenTensorHandle handle;
    if (aoti_torch_empty_strided(dims, sizes, strides, dtype, aoti_torch_device_type_cuda(), index_, &handle)) {
      check(cudaPeekAtLastError());  // what a kernel before this op did wrong is no lack of memory
      refuse_memory(dims, sizes);
    }
    return Tensor(handle);
  }

 private:
  static int32_t device_of(const Tensor& like) {
    STD_TORCH_CHECK(like.is_cuda(), "crowdnal: an argument is not on the device of the other arguments");
    return like.get_device_index();
  }
  static cudaStream_t current_stream(int32_t device) {
    void* stream;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
    return static_cast<cudaStream_t>(stream);
  }

  // Freed with the op, and reused only by what follows it on its stream.
  void* allocate(int64_t bytes) override {
    const int64_t stride = 1;
    return scratch_.emplace_back(make(1, &bytes, &stride, aoti_torch_dtype_uint8())).mutable_data_ptr();
  }

  int32_t index_;
  torch::stable::accelerator::DeviceGuard guard_;
  std::deque<Tensor> scratch_;
};

}  // namespace crowdnal::cuda
