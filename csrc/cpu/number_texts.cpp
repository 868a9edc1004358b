// Texts numbered in order of first appearance: what a column of ids becomes.
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "cpu/detail/tensors.h"

namespace crowdnal::cpu {
namespace {

// Memory of a large table, which is read at random.
template <class T>
struct HugePages {
  using value_type = T;
  HugePages() = default;
  template <class U>
  HugePages(const HugePages<U>&) {}
  T* allocate(size_t count) {
    void* memory = std::malloc(count * sizeof(T));
    if (memory == nullptr) throw std::bad_alloc();
    use_huge_pages(memory, static_cast<int64_t>(count * sizeof(T)));
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, size_t) { std::free(memory); }
  bool operator==(const HugePages&) const { return true; }
};

// A text by its first 16 bytes as numbers, zeros behind its end, and where it lies.
struct Text {
  uint64_t words[2];
  const uint8_t* bytes;
  uint32_t size;
  int32_t code;  // its number; negative: none yet, or no text at all

  bool equals(const Text& other) const {
    return words[0] == other.words[0] && words[1] == other.words[1] && size == other.size &&
           (size <= 16 || std::memcmp(bytes + 16, other.bytes + 16, size - 16) == 0);
  }
};

// The next 8 bytes of a text, `left` of which are its own; `readable`: so many may be read.
inline uint64_t word_at(const uint8_t* bytes, int64_t left, int64_t readable) {
  uint64_t word = 0;
  if (left >= 8 || readable >= 8) {
    std::memcpy(&word, bytes, 8);
    return left >= 8 ? word : word & ((uint64_t(1) << 8 * left) - 1);
  }
  std::memcpy(&word, bytes, static_cast<size_t>(left));
  return word;
}

inline uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15;  // as in xxHash: an odd number whose bits look random
  return hash ^ (hash >> 32);
}

// Equal texts have equal hashes. `readable`: bytes from the text's first on that may be read.
inline uint64_t hash_of(const Text& text, int64_t readable) {
  uint64_t hash = mixed(mixed(text.size, text.words[0]), text.words[1]);
  for (int64_t at = 16; at < text.size; at += 8)
    hash = mixed(hash, word_at(text.bytes + at, text.size - at, readable - at));
  return hash;
}

inline Text read_text(const uint8_t* bytes, int64_t size, int64_t readable) {
  Text text = {{0, 0}, bytes, static_cast<uint32_t>(size), -1};
  if (size > 0) text.words[0] = word_at(bytes, size, readable);
  if (size > 8) text.words[1] = word_at(bytes + 8, size - 8, readable - 8);
  return text;
}

// Distinct texts with their numbers, in a table of open addresses at most half full. Bytes beyond 16 are not copied.
class Texts {
 public:
  // Early, for memory that no cache knows.
  void fetch(uint64_t hash) const { __builtin_prefetch(&slots_[hash & mask_]); }

  // The number of a text, a new one if it is not known.
  int32_t code(const Text& text, uint64_t hash) {
    uint64_t at = hash & mask_;
    for (; slots_[at].code >= 0; at = (at + 1) & mask_)
      if (slots_[at].equals(text)) return slots_[at].code;
    const int32_t code = count_++;
    slots_[at] = text;
    slots_[at].code = code;
    if (2 * static_cast<size_t>(count_) > slots_.size()) grow();
    return code;
  }

 private:
  void grow() {
    STD_TORCH_CHECK(count_ < int32_t(1) << 30, "crowdnal: contents have more than 2^30 different texts");
    Slots after(2 * slots_.size(), kNone);
    mask_ = after.size() - 1;
    for (const Text& text : slots_) {
      if (text.code < 0) continue;
      uint64_t at = hash_of(text, text.size) & mask_;
      while (after[at].code >= 0) at = (at + 1) & mask_;
      after[at] = text;
    }
    slots_.swap(after);
  }

  static constexpr Text kNone = {{0, 0}, nullptr, 0, -1};
  using Slots = std::vector<Text, HugePages<Text>>;
  Slots slots_ = Slots(1 << 12, kNone);
  uint64_t mask_ = (1 << 12) - 1;
  int32_t count_ = 0;
};

// One piece of the column: offsets of its texts in its bytes, as Arrow keeps them.
template <class Offset>
void number(const uint8_t* content, int64_t bytes, const Offset* ends, int64_t count, int64_t start, Texts& known,
            int64_t* codes, std::vector<int64_t>& first) {
  constexpr int64_t kBlock = 64;
  Text texts[kBlock];
  uint64_t hashes[kBlock];
  for (int64_t from = 0; from < count; from += kBlock) {
    const int64_t size = std::min(kBlock, count - from);
    for (int64_t n = 0; n < size; ++n) {
      const int64_t low = ends[from + n], high = ends[from + n + 1];
      STD_TORCH_CHECK(0 <= low && low <= high && high <= bytes, "crowdnal: ends: text ", from + n,
                      " reaches beyond its ", bytes, " bytes");
      STD_TORCH_CHECK(high - low < int64_t(1) << 32, "crowdnal: ends: text ", from + n, " has 2^32 bytes or more");
      texts[n] = read_text(content + low, high - low, bytes - low);
      hashes[n] = hash_of(texts[n], bytes - low);
      known.fetch(hashes[n]);
    }
    for (int64_t n = 0; n < size; ++n) {
      const bool again = n > 0 && hashes[n] == hashes[n - 1] && texts[n].equals(texts[n - 1]);
      const int64_t code = again ? codes[from + n - 1] : known.code(texts[n], hashes[n]);
      if (code == static_cast<int64_t>(first.size())) first.push_back(start + from + n);
      codes[from + n] = code;
    }
  }
}

std::tuple<Tensor, Tensor> number_texts_op(std::vector<Tensor> contents, std::vector<Tensor> ends) {
  STD_TORCH_CHECK(contents.size() == ends.size() && !ends.empty(), "crowdnal: ends must be as many as contents, and ",
                  "some; got ", ends.size(), " and ", contents.size());
  int64_t total = 0;
  for (size_t p = 0; p < ends.size(); ++p) {
    STD_TORCH_CHECK(contents[p].scalar_type() == ScalarType::Byte, "crowdnal: contents must be uint8");
    STD_TORCH_CHECK(ends[p].scalar_type() == ScalarType::Int || ends[p].scalar_type() == ScalarType::Long,
                    "crowdnal: ends must be int32 or int64");
    length(contents[p], "contents");
    STD_TORCH_CHECK(length(ends[p], "ends") > 0, "crowdnal: ends must have shape [texts + 1], got none");
    contents[p] = packed(contents[p], "contents");
    ends[p] = packed(ends[p], "ends");
    total += ends[p].size(0) - 1;
  }
  Tensor codes = empty_long({total});
  Texts known;
  std::vector<int64_t> first;
  int64_t start = 0;
  for (size_t p = 0; p < ends.size(); ++p) {
    const int64_t count = ends[p].size(0) - 1;
    int64_t* out = output<int64_t>(codes) + start;
    if (ends[p].scalar_type() == ScalarType::Int)
      number(pointer<uint8_t>(contents[p]), contents[p].size(0), pointer<int32_t>(ends[p]), count, start, known, out,
             first);
    else
      number(pointer<uint8_t>(contents[p]), contents[p].size(0), pointer<int64_t>(ends[p]), count, start, known, out,
             first);
    start += count;
  }
  Tensor rows = empty_long({static_cast<int64_t>(first.size())});
  std::copy(first.begin(), first.end(), output<int64_t>(rows));
  return {codes, rows};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(crowdnal, CPU, m) { m.impl("number_texts", TORCH_BOX(&number_texts_op)); }

}  // namespace crowdnal::cpu
