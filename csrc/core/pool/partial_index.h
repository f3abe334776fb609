// SPDX-License-Identifier: Apache-2.0
// Maps hashes of prefixes that end inside a block to partially filled blocks.
//
// Only managers whose hash blocks are smaller than their allocation blocks have partial blocks.
// They copy the block when it is hit. Every operation is O(1) per entry, for any number of blocks
// with equal prefixes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <list>
#include <unordered_map>
#include <vector>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/pool/variants.h"

namespace kvcache {

class PartialIndex {
 public:
  // Returns the oldest block with the content of this hash, or the null block if there is none or
  // its variant differs.
  BlockId find(const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    if (by_content_.empty()) return kNullBlock;
    const auto found = by_content_.find({hash, group});
    if (found == by_content_.end()) return kNullBlock;
    const Part& oldest = found->second.front();
    return is_variant(oldest.variant, variant) ? oldest.block : kNullBlock;
  }
  void add(BlockId id, const Hash& hash, uint8_t group, uint64_t variant = 0) {
    ByContent::value_type& same = *by_content_.try_emplace({hash, group}).first;
    same.second.push_back({id, variant});
    of_block_[id].push_back({&same, std::prev(same.second.end())});
  }
  void forget(BlockId id) {  // removes all entries of the block
    if (of_block_.empty()) return;
    const auto block = of_block_.find(id);
    if (block == of_block_.end()) return;
    for (const Entry& entry : block->second) {
      entry.same->second.erase(entry.part);
      if (entry.same->second.empty()) by_content_.erase(entry.same->first);
    }
    of_block_.erase(block);
  }
  void clear() {
    by_content_.clear();
    of_block_.clear();
  }
  bool has(BlockId id) const { return of_block_.count(id) != 0; }
  // Returns the hashes of a block's parts, latest first.
  std::vector<Hash> of(BlockId id) const {
    std::vector<Hash> out;
    const auto block = of_block_.find(id);
    if (block == of_block_.end()) return out;
    for (const Entry& entry : block->second) out.push_back(entry.same->first.hash);
    std::reverse(out.begin(), out.end());
    return out;
  }

 private:
  struct Content {
    Hash hash;
    uint8_t group;
    bool operator==(const Content& other) const {
      return group == other.group && hash == other.hash;
    }
  };
  struct ContentHash {
    size_t operator()(const Content& of) const { return key_of(of.hash, of.group); }
  };
  struct Part {
    BlockId block;
    uint64_t variant;
  };
  using ByContent = std::unordered_map<Content, std::list<Part>, ContentHash>;  // oldest first
  struct Entry {
    ByContent::value_type* same;  // the parts with the content of this part
    std::list<Part>::iterator part;
  };

  ByContent by_content_;
  std::unordered_map<BlockId, std::vector<Entry>> of_block_;  // in the order of their addition
};

}  // namespace kvcache
