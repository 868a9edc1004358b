// Texts numbered in order of first appearance: what a column of ids becomes.
#include <cstring>
#include <vector>

#include "cpu/detail/tensors.h"

namespace crowdnal::cpu {
namespace {

// A text by its first 16 bytes as numbers, zeros behind its end, and where it lies.
struct Text {
  uint64_t words[2];
  const uint8_t* bytes;
  int64_t size;

  bool operator==(const Text& other) const {
    return words[0] == other.words[0] && words[1] == other.words[1] && size == other.size &&
           (size <= 16 || std::memcmp(bytes + 16, other.bytes + 16, static_cast<size_t>(size - 16)) == 0);
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

// `readable`: bytes from the text's first on that may be read. Equal texts have equal hashes.
inline uint64_t describe(const uint8_t* bytes, int64_t size, int64_t readable, Text& text) {
  text = {{0, 0}, bytes, size};
  if (size > 0) text.words[0] = word_at(bytes, size, readable);
  if (size > 8) text.words[1] = word_at(bytes + 8, size - 8, readable - 8);
  uint64_t hash = mixed(mixed(static_cast<uint64_t>(size), text.words[0]), text.words[1]);
  for (int64_t at = 16; at < size; at += 8) hash = mixed(hash, word_at(bytes + at, size - at, readable - at));
  return hash;
}

// Distinct texts by number, in a table of open addresses at most half full. Their bytes are not copied.
class Texts {
 public:
  // Each a step towards the text that a hash probably means, in memory that no cache knows.
  void fetch_slot(uint64_t hash) const { __builtin_prefetch(&slots_[hash & mask_]); }
  void fetch_text(uint64_t hash) const {
    const Slot& slot = slots_[hash & mask_];
    if (slot.hash == hash && slot.code >= 0) __builtin_prefetch(&texts_[static_cast<size_t>(slot.code)]);
  }

  // Its number, a new one if it is not known.
  int64_t code(const Text& text, uint64_t hash) {
    uint64_t at = hash & mask_;
    for (; slots_[at].code >= 0; at = (at + 1) & mask_)
      if (slots_[at].hash == hash && texts_[static_cast<size_t>(slots_[at].code)] == text) return slots_[at].code;
    const int64_t code = static_cast<int64_t>(texts_.size());
    slots_[at] = {hash, code};
    texts_.push_back(text);
    if (2 * texts_.size() > slots_.size()) grow();
    return code;
  }

 private:
  struct Slot {
    uint64_t hash = 0;
    int64_t code = -1;
  };

  void grow() {
    std::vector<Slot> after(2 * slots_.size());
    mask_ = after.size() - 1;
    for (const Slot& slot : slots_) {
      if (slot.code < 0) continue;
      uint64_t at = slot.hash & mask_;
      while (after[at].code >= 0) at = (at + 1) & mask_;
      after[at] = slot;
    }
    slots_.swap(after);
  }

  uint64_t mask_ = (1 << 12) - 1;
  std::vector<Slot> slots_ = std::vector<Slot>(1 << 12);
  std::vector<Text> texts_;
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
      hashes[n] = describe(content + low, high - low, bytes - low, texts[n]);
      known.fetch_slot(hashes[n]);
    }
    for (int64_t n = 0; n < size; ++n) known.fetch_text(hashes[n]);
    for (int64_t n = 0; n < size; ++n) {
      const bool again = n > 0 && hashes[n] == hashes[n - 1] && texts[n] == texts[n - 1];
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
