// SPDX-License-Identifier: Apache-2.0
// The shadow state of one memory (the device or the host tier): the content of its slots, the
// holders of its blocks, and the last events of each block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/zeroed_array.h"

namespace kvcache::sanitizer {

constexpr int64_t kNobody = -1;

struct ShadowSlot {
  uint64_t tag;    // tag of the token prefix whose KV the slot holds; 0: never written
  int64_t origin;  // serial number of the request that computed it << 32 | position
};

// Requests are identified by their serial numbers; kNobody means no request.
struct ShadowBlock {
  int64_t holder = kNobody;  // last request to which the block was allocated
  int64_t writer = kNobody;  // last request that wrote the block
  int64_t write_step = -1;
  int64_t num_events = 0;
  int32_t num_holders = 0;
  int16_t owner = kNobody;  // group whose content the block holds
  bool is_fresh = false;    // allocated, but not read or written since
};

// The values of `EventKind` in Python that native code uses.
constexpr int8_t kWritten = 2, kLoaded = 4;

struct ShadowEvent {
  int64_t step;
  int64_t request;
  int32_t position;  // first token written, or source block of a copy
  int16_t group;
  int8_t kind;
  int8_t medium;  // medium of a copy's source
};

class Shadow {
 public:
  // `stride`: slots per block, the largest block size. `history`: number of events kept per block.
  Shadow(int64_t num_blocks, int64_t stride, int64_t history);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t stride() const { return stride_; }
  int64_t num_bytes() const;
  bool has(int64_t block) const { return block >= 0 && block < num_blocks_; }

  ShadowSlot* slots() { return slots_.data(); }
  ShadowSlot& slot(int64_t block, int64_t offset) {
    return slots_[static_cast<size_t>(block * stride_ + offset)];
  }
  ShadowBlock* blocks() { return blocks_.data(); }
  ShadowBlock& block(int64_t id) { return blocks_[static_cast<size_t>(id)]; }

  // Counts changes that make earlier checks of a block invalid.
  int64_t num_changes() const { return num_changes_; }
  int64_t changed_at(int64_t block) const { return changed_at_[static_cast<size_t>(block)]; }
  void change(int64_t block) { changed_at_[static_cast<size_t>(block)] = ++num_changes_; }

  // Drops the content of a block.
  void clear(int64_t block);
  // Drops the content that earlier holders left in a block, starting with the first slot that the
  // new holder writes.
  void drop_stale(int64_t block, int64_t first_offset);
  // Assigns a block to this group, and drops content of any other group.
  void take_over(int64_t block, int16_t group);

  // Appends an event to the history of a block. The oldest event is overwritten.
  void log(int64_t block, const ShadowEvent& event);
  // Returns the last events of a block, oldest first.
  std::vector<ShadowEvent> events(int64_t block) const;

  bool tracks_holders = false;  // whether allocations are reported to the shadow

 private:
  int64_t num_blocks_, stride_, history_;
  ZeroedArray<ShadowSlot> slots_;
  std::vector<ShadowBlock> blocks_;
  ZeroedArray<ShadowEvent> ring_;
  ZeroedArray<int64_t> changed_at_;  // stored apart from the blocks, because reads scan it
  int64_t num_changes_ = 0;
};

}  // namespace kvcache::sanitizer
