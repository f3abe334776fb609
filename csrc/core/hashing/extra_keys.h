// Extra keys: the KV of a request depends on them besides its tokens. Per block, as CBOR.
//
// The keys of a block, in this order: ["lora", name, path] on every block; ["mm", identifier, first
// token of the item - first token of the block] on every block that the item touches;
// ["cache_salt", salt] on block 0; ["prompt_embeds", digest of the block's rows].
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/pool/block_pool.h"

namespace kvcache {

// An image, or whatever else stands in for a run of tokens.
struct MmItem {
  std::string identifier;
  int64_t first, length;  // tokens
  bool operator==(const MmItem& other) const {
    return first == other.first && length == other.length && identifier == other.identifier;
  }
};

// What stands for the rows that replace a request's tokens: a digest of each block's.
class RowDigests {
 public:
  virtual ~RowDigests() = default;
  virtual int64_t num_blocks() const = 0;  // the first ones, that have rows
  // Throws where it cannot be computed.
  virtual Hash of_block(int64_t block) const = 0;
};

class ExtraKeys {
 public:
  ExtraKeys() = default;
  // Keys of a block name items in the order of `items`, which may overlap. Tokens they cover need
  // not be known yet: a block's keys do not depend on when they are asked for.
  ExtraKeys(const std::optional<std::pair<std::string, std::string>>& lora,
            std::vector<MmItem> items, const std::optional<std::string>& cache_salt,
            std::shared_ptr<const RowDigests> embeds);  // null: there are none

  // Whether the first blocks have the same keys. Throws whatever a digest of rows does.
  bool begins_like(const ExtraKeys& other, int64_t num_blocks) const;

  // A number that stands for the salt, the same in each process; 0: there is none.
  uint32_t tenant() const { return tenant_; }

  // CBOR of the block's keys, empty for none; valid until the next call. Ask for blocks in
  // ascending order (one may be asked again): items are walked once.
  std::string_view of_block(int64_t block, int64_t block_size);
  // The variant (core/pool/variants.h) of the block last asked for, behind a block of variant
  // `parent`: by the lengths of the items that it touches, which its keys do not name.
  uint64_t variant_behind(uint64_t parent) const;
  bool has_items() const { return !items_.empty(); }

 private:
  void find_items(int64_t start, int64_t stop);  // those that touch tokens start to stop - 1
  int64_t num_blocks_with_rows() const { return embeds_ == nullptr ? 0 : embeds_->num_blocks(); }
  const Hash& embed_digest(int64_t block) const;

  std::string lora_, cache_salt_;  // their CBOR, empty for none
  uint32_t tenant_ = 0;
  std::vector<MmItem> items_;
  std::shared_ptr<const RowDigests> embeds_;
  mutable std::vector<Hash> embed_digests_;  // of the first blocks: computed when asked for
  std::vector<size_t> by_first_;             // items by first token
  size_t next_ = 0;               // of by_first_: the first that no block has reached yet
  std::vector<size_t> touching_;  // items that the block last asked for touches, ascending
  std::string buffer_;
};

}  // namespace kvcache
