// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/extra_keys.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>

#include "core/hashing/cbor.h"
#include "core/hashing/xxh3.h"
#include "core/secret_key.h"

namespace kvcache {

namespace {

// Writes the head of an array with `size` entries, and the key's name as the first entry.
void append_key(std::string* out, uint32_t size, std::string_view name) {
  append_head(out, kArray, size);
  append_string(out, kText, name);
}

// Returns a number other than 0 that is derived from the text.
uint32_t number_of(std::string_view text) {
  uint8_t digest[16];
  xxh3_128(reinterpret_cast<const uint8_t*>(text.data()), text.size(), digest);
  uint32_t number;
  std::memcpy(&number, digest, sizeof(number));
  return std::max(number, uint32_t{1});
}

}  // namespace

uint32_t ExtraKeys::adapter_of(std::string_view name) { return number_of(name); }

ExtraKeys::ExtraKeys(const std::optional<std::vector<std::string>>& lora, std::vector<MmItem> items,
                     const std::optional<std::string>& cache_salt,
                     std::shared_ptr<const RowDigests> embeds)
    : items_(std::move(items)), embeds_(std::move(embeds)), by_first_(items_.size()) {
  is_keyed_ = lora || !items_.empty() || embeds_ != nullptr;
  if (lora) {
    append_key(&lora_, static_cast<uint32_t>(lora->size() + 1), "lora");
    for (const std::string& each : *lora) append_string(&lora_, kText, each);
    adapter_ = adapter_of(lora->front());
  }
  if (cache_salt) {
    append_key(&cache_salt_, 2, "cache_salt");
    append_string(&cache_salt_, kText, *cache_salt);
  }
  std::iota(by_first_.begin(), by_first_.end(), size_t{0});
  std::stable_sort(by_first_.begin(), by_first_.end(),
                   [this](size_t a, size_t b) { return items_[a].first < items_[b].first; });
}

bool ExtraKeys::begins_like(const ExtraKeys& other, int64_t num_blocks) const {
  if (lora_ != other.lora_ || cache_salt_ != other.cache_salt_ || items_ != other.items_) {
    return false;
  }
  const int64_t n = std::min(num_blocks_with_rows(), num_blocks);
  if (n != std::min(other.num_blocks_with_rows(), num_blocks)) return false;
  for (int64_t block = 0; block < n; ++block) {
    if (!(embed_digest(block) == other.embed_digest(block))) return false;
  }
  return true;
}

uint64_t ExtraKeys::digest() const {
  uint64_t digest = std::hash<const RowDigests*>()(embeds_.get());
  const auto add = [&digest](uint64_t value) {
    digest = (digest ^ value) * 0x9E3779B97F4A7C15;
    digest ^= digest >> 32;
  };
  for (const std::string* text : {&lora_, &cache_salt_}) {
    if (!text->empty()) add(std::hash<std::string>()(*text));
  }
  for (const MmItem& item : items_) {
    add(std::hash<std::string>()(item.identifier));
    add(static_cast<uint64_t>(item.first));
    add(static_cast<uint64_t>(item.length));
  }
  return digest;
}

const char* ExtraKeys::first_difference(const ExtraKeys& other) const {
  if (cache_salt_ != other.cache_salt_) return "cache_salt";
  if (lora_ != other.lora_) return "lora";
  if (items_ != other.items_) return "mm_items";
  const auto num_known =
      static_cast<int64_t>(std::min(embed_digests_.size(), other.embed_digests_.size()));
  const bool are_equal = num_blocks_with_rows() == other.num_blocks_with_rows() &&
                         std::equal(embed_digests_.begin(), embed_digests_.begin() + num_known,
                                    other.embed_digests_.begin());
  return are_equal ? "" : "prompt_embeds";
}

const std::optional<Hash>& ExtraKeys::embed_digest(int64_t block) const {
  while (static_cast<int64_t>(embed_digests_.size()) <= block) {
    embed_digests_.push_back(embeds_->of_block(static_cast<int64_t>(embed_digests_.size())));
  }
  return embed_digests_[static_cast<size_t>(block)];
}

void ExtraKeys::find_items(int64_t start, int64_t stop) {
  while (next_ < by_first_.size() && items_[by_first_[next_]].first < stop) {
    const size_t item = by_first_[next_++];
    touching_.insert(std::upper_bound(touching_.begin(), touching_.end(), item), item);
  }
  const auto is_past = [&](size_t i) { return items_[i].first + items_[i].length <= start; };
  touching_.erase(std::remove_if(touching_.begin(), touching_.end(), is_past), touching_.end());
}

std::string_view ExtraKeys::encode(int64_t block, int64_t block_size) {
  const int64_t start = block * block_size;
  find_items(start, start + block_size);
  const bool has_salt = block == 0 && !cache_salt_.empty();
  std::optional<Hash> rows;  // digest of the rows of the block
  if (block < num_blocks_with_rows()) rows = embed_digest(block);
  const size_t num_keys = !lora_.empty() + touching_.size() + has_salt + rows.has_value();
  if (num_keys == 0) return {};

  buffer_.clear();
  append_head(&buffer_, kArray, static_cast<uint32_t>(num_keys));
  buffer_ += lora_;
  for (const size_t i : touching_) {
    append_key(&buffer_, 3, "mm");
    append_string(&buffer_, kText, items_[i].identifier);
    append_int(&buffer_, items_[i].first - start);
  }
  if (has_salt) buffer_ += cache_salt_;
  if (rows) {
    append_key(&buffer_, 2, "prompt_embeds");
    append_string(&buffer_, kBytes, {reinterpret_cast<const char*>(rows->bytes), sizeof(Hash)});
  }
  return buffer_;
}

uint64_t ExtraKeys::variant_behind(uint64_t parent) const {
  uint64_t variant = parent;
  for (const size_t i : touching_) {
    Hash words{};
    std::memcpy(words.bytes, &variant, sizeof(variant));
    std::memcpy(words.bytes + sizeof(variant), &items_[i].length, sizeof(items_[i].length));
    variant = tag_of(words) | 1;  // distinct from the variant of content without items
  }
  return variant;
}

}  // namespace kvcache
