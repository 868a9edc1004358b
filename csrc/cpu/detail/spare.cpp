#include "cpu/detail/spare.h"

#if defined(__linux__)
#include <sys/mman.h>

#include <atomic>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

// Of torch 2.11; null before.
extern "C" __attribute__((weak)) AOTITorchError torch_from_blob(void* data, int64_t dims, const int64_t* sizes,
                                                                const int64_t* strides, int64_t offset, int32_t dtype,
                                                                int32_t device_type, int32_t device_index,
                                                                AtenTensorHandle* out, int32_t layout,
                                                                const uint8_t* metadata, int64_t metadata_size,
                                                                void (*deleter)(void*, void*), void* context);
#endif

namespace crowdnal::cpu {

#if defined(__linux__)
namespace {

constexpr int64_t kPage = 1 << 21, kLarge = 4 * kPage;

// Mapped, not from malloc, which would keep what comes back in between.
struct Block {
  void* mapped;
  int64_t bytes;  // whole huge pages; as much again is mapped as aligns them
  void* data() const {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(mapped) + kPage - 1) / kPage * kPage);
  }
};

// Never destroyed: storages may go after it would be.
std::atomic<Block*>& spare() {
  static auto* slot = new std::atomic<Block*>(nullptr);
  return *slot;
}

void drop(Block* block) {
  if (!block) return;
  munmap(block->mapped, block->bytes + kPage);
  delete block;
}

// The deleter of a storage.
void keep(void*, void* context) {
  auto* block = static_cast<Block*>(context);
#if defined(MADV_FREE)
  madvise(block->data(), block->bytes, MADV_FREE);
#endif
  drop(spare().exchange(block));
}

// Null if there is no memory.
Block* take(int64_t bytes) {
  Block* found = spare().exchange(nullptr);
  if (found && found->bytes == bytes) return found;
  Block* none = nullptr;
  if (found && !spare().compare_exchange_strong(none, found)) drop(found);
  void* mapped = mmap(nullptr, bytes + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return nullptr;
  use_huge_pages(mapped, bytes + kPage);
  return new Block{mapped, bytes};
}

}  // namespace
#endif

Tensor empty_gradient(const Tensor& like, std::initializer_list<int64_t> sizes) {
#if defined(__linux__)
  int64_t bytes = like.scalar_type() == ScalarType::Double ? 8 : 4;
  for (const int64_t size : sizes) bytes *= size;
  if (!torch_from_blob || bytes < kLarge) return empty(like, sizes);
  Block* block = take((bytes + kPage - 1) / kPage * kPage);
  if (!block) return empty(like, sizes);
  int64_t strides[4], count = 1, d = static_cast<int64_t>(sizes.size());
  for (auto size = sizes.end(); size != sizes.begin(); count *= *size) {
    --size;
    strides[--d] = count;
  }
  int32_t dtype;
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  TORCH_ERROR_CODE_CHECK(torch_from_blob(block->data(), static_cast<int64_t>(sizes.size()), sizes.begin(), strides, 0,
                                         dtype, aoti_torch_device_type_cpu(), -1, &handle, aoti_torch_layout_strided(),
                                         nullptr, 0, keep, block));
  return Tensor(handle);
#else
  return empty(like, sizes);
#endif
}

}  // namespace crowdnal::cpu
