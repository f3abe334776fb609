// SPDX-License-Identifier: Apache-2.0
// Extra keys identify everything other than tokens on which a request's KV depends. They are
// encoded as CBOR, separately for each block.
//
// A block's keys, in this order: ["lora", name, path] on every block, followed by the adapter's
// version if it has one; ["mm", identifier, first token of the item - first token of the block] on
// every block that overlaps the item; ["cache_salt", salt] on block 0; ["prompt_embeds", digest of
// the block's rows].
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/hash.h"

namespace kvcache {

// An image or other item that replaces a run of tokens.
struct MmItem {
  std::string identifier;
  int64_t first, length;  // tokens
  bool operator==(const MmItem& other) const {
    return first == other.first && length == other.length && identifier == other.identifier;
  }
};

// For each block, provides a digest of the embedding rows that replace the request's tokens.
class RowDigests {
 public:
  virtual ~RowDigests() = default;
  virtual int64_t num_blocks() const = 0;  // number of leading blocks that may have rows
  // Returns no digest if rows replace none of the block's tokens. Throws if the digest cannot be
  // computed.
  virtual std::optional<Hash> of_block(int64_t block) const = 0;
};

class ExtraKeys {
 public:
  ExtraKeys() = default;
  // `lora`: name and path of the adapter and, optionally, its version. `items` may overlap, and may
  // cover tokens that are not known yet. A block's keys list the items in this order.
  ExtraKeys(const std::optional<std::vector<std::string>>& lora, std::vector<MmItem> items,
            const std::optional<std::string>& cache_salt,
            std::shared_ptr<const RowDigests> embeds);  // null: no rows

  // Whether the first num_blocks blocks have equal keys. Rethrows the errors of row digests.
  bool begins_like(const ExtraKeys& other, int64_t num_blocks) const;

  // Returns a digest of all keys. Embedding rows are compared by object, not by value: two
  // `RowDigests` with equal rows give different digests.
  uint64_t digest() const;
  // Returns the name of the first kind of keys that differs, or an empty string if none does.
  // Embedding rows whose digests are not known yet are considered equal.
  const char* first_difference(const ExtraKeys& other) const;

  // A number derived from the name of the adapter. It is the same in every process; 0: none.
  uint32_t adapter() const { return adapter_; }
  static uint32_t adapter_of(std::string_view name);

  // Returns the CBOR of a block's keys, which is empty without keys and valid until the next call.
  // Blocks must be requested in ascending order (repeats are allowed), because items are traversed
  // once.
  std::string_view of_block(int64_t block, int64_t block_size) {
    const bool has_keys = is_keyed_ || (block == 0 && !cache_salt_.empty());
    return has_keys ? encode(block, block_size) : std::string_view();
  }
  // The variant (core/pool/variants.h) of the last requested block, after a block of variant
  // `parent`. It covers the lengths of the block's items, which the keys do not contain.
  uint64_t variant_behind(uint64_t parent) const;
  bool has_items() const { return !items_.empty(); }
  bool has_embeds() const { return embeds_ != nullptr; }

 private:
  std::string_view encode(int64_t block, int64_t block_size);
  // Finds the items that overlap tokens [start, stop).
  void find_items(int64_t start, int64_t stop);
  int64_t num_blocks_with_rows() const { return embeds_ == nullptr ? 0 : embeds_->num_blocks(); }
  const std::optional<Hash>& embed_digest(int64_t block) const;

  bool is_keyed_ = false;          // whether blocks after the first may have keys
  std::string lora_, cache_salt_;  // CBOR, empty if unset
  uint32_t adapter_ = 0;
  std::vector<MmItem> items_;
  std::shared_ptr<const RowDigests> embeds_;
  mutable std::vector<std::optional<Hash>>
      embed_digests_;             // digests of the first blocks; computed on demand
  std::vector<size_t> by_first_;  // items by first token
  size_t next_ = 0;  // index in by_first_ of the first item that no requested block has reached
  std::vector<size_t> touching_;  // items that overlap the last requested block, ascending
  std::string buffer_;
};

}  // namespace kvcache
