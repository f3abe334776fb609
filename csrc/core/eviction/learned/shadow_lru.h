// SPDX-License-Identifier: Apache-2.0
// Simulates a pool that evicts the least recently released block first. Blocks that requests hold
// are not evicted.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/eviction/learned/key_table.h"

namespace kvcache {

// Stores held keys, and released keys in the order of their releases. While more than `capacity`
// keys are present, the released key that is first in this order is removed.
class ShadowLru {
 public:
  // `next`: receives the keys that this cache evicts; null: none.
  explicit ShadowLru(int64_t capacity, ShadowLru* next = nullptr)
      : capacity_(static_cast<size_t>(capacity)), next_(next), links_(capacity_) {}

  int64_t capacity() const { return static_cast<int64_t>(capacity_); }
  bool contains(uint32_t key) const { return links_.find(key) != kNone; }
  // Marks the key as held. Returns whether the key was present.
  bool hold(uint32_t key) {
    uint32_t i = links_.find(key);
    const bool was_present = i != kNone;
    if (was_present) {
      if (!is_held(i)) unlink(i);
    } else {
      i = links_.add(key);
    }
    links_[i].older = links_[i].younger = i;  // held
    if (!was_present) shrink();
    return was_present;
  }
  void release(uint32_t key) {
    uint32_t i = links_.find(key);
    if (i == kNone) {
      i = links_.add(key);
    } else if (!is_held(i)) {
      unlink(i);
    }
    link_youngest(i);
    shrink();
  }
  // Makes a key the youngest, unless a request holds it. Adds it if it is not present.
  void touch(uint32_t key) {
    const uint32_t i = links_.find(key);
    if (i == kNone || !is_held(i)) release(key);
  }
  void remove(uint32_t key) {
    const uint32_t i = links_.find(key);
    if (i == kNone) return;
    if (!is_held(i)) unlink(i);
    links_.remove(i);
  }
  void clear() { links_.clear(); }
  size_t num_bytes() const { return links_.num_bytes(); }

 private:
  struct Links {
    uint32_t older, younger;  // for a held key, the node itself
  };
  using Table = KeyTable<Links>;  // node 0 closes the list
  static constexpr uint32_t kNone = Table::kNone;

  bool is_held(uint32_t i) const { return links_[i].older == i; }
  void shrink() {
    while (links_.size() > capacity_ && links_[0].younger != 0) {
      const uint32_t oldest = links_[0].younger;
      if (next_ != nullptr) next_->touch(links_.key_of(oldest));
      unlink(oldest);
      links_.remove(oldest);
    }
  }
  void unlink(uint32_t i) {
    links_[links_[i].older].younger = links_[i].younger;
    links_[links_[i].younger].older = links_[i].older;
  }
  void link_youngest(uint32_t i) {
    links_[i].older = links_[0].older;
    links_[i].younger = 0;
    links_[links_[0].older].younger = i;
    links_[0].older = i;
  }

  size_t capacity_;
  ShadowLru* next_;
  Table links_;
};

}  // namespace kvcache
