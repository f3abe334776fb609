// SPDX-License-Identifier: Apache-2.0
// An array whose entries are found by key.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvcache {

// An entry has a `key` and a `next`, the index of the next entry with the same head. Entry 0 is
// never linked.
template <class Entry>
class KeyedArray {
 public:
  explicit KeyedArray(int64_t num_entries) {  // grows on demand
    size_t num_heads = 1;
    while (4 * num_heads <= static_cast<size_t>(num_entries)) num_heads *= 2;
    heads_.assign(num_heads, 0);
  }

  Entry& operator[](size_t i) { return entries_[i]; }
  const Entry& operator[](size_t i) const { return entries_[i]; }
  // Returns the entry that was linked last with this key; 0 if there is none.
  uint32_t find(uint32_t key) const {
    uint32_t i = heads_[head_of(key)];
    while (i != 0 && entries_[i].key != key) i = entries_[i].next;
    return i;
  }
  void link(uint32_t i, const Entry& entry) {
    uint32_t& head = heads_[head_of(entry.key)];
    if (i >= entries_.size()) entries_.resize(i + 1);
    entries_[i] = entry;
    entries_[i].next = static_cast<decltype(entry.next)>(head);
    head = i;
  }
  void unlink(uint32_t i) {  // has no effect if the entry is not linked
    uint32_t& head = heads_[head_of(entries_[i].key)];
    if (head == i) head = entries_[i].next;
    for (uint32_t at = head; at != 0; at = entries_[at].next) {
      if (entries_[at].next == i) entries_[at].next = entries_[i].next;
    }
  }
  void clear() { heads_.assign(heads_.size(), 0); }
  size_t num_bytes() const {
    return entries_.capacity() * sizeof(Entry) + heads_.capacity() * sizeof(uint32_t);
  }

 private:
  size_t head_of(uint32_t key) const {
    return (key * uint64_t{0x9E3779B97F4A7C15} >> 32) & (heads_.size() - 1);
  }

  std::vector<Entry> entries_;
  std::vector<uint32_t> heads_;
};

}  // namespace kvcache
