// SPDX-License-Identifier: Apache-2.0
#include "sanitizer/slot_writes.h"

#include <algorithm>

namespace kvcache::sanitizer {
namespace {

int64_t needed_width(const SlotGroup& group, const TokenRanges& ranges) {
  int64_t width = 0;
  for (int64_t r = 0; r < ranges.size; ++r) {
    if (ranges.counts[r] > 0)
      width = std::max(width, group.width(ranges.starts[r] + ranges.counts[r]));
  }
  return width;
}

}  // namespace

void SlotWrites::start(const SlotGroup& group, int64_t step) {
  group_ = group;
  step_ = step;
  stages_.clear();
  tokens_.clear();
  if (!found_.empty()) (void)found_.take();
}

void SlotWrites::add(int64_t row, int64_t position, int64_t block, int64_t offset) {
  tokens_.push_back(
      {requests_->serial(row), position, requests_->tags(row)[position], block, offset});
}

Findings SlotWrites::begin(const SlotGroup& group, const TokenRanges& ranges, const int64_t* slots,
                           const Table& table, int64_t step) {
  if (table.data != nullptr) table.check_width(needed_width(group, ranges));
  start(group, step);
  bool needs_checks = false;
  const int64_t size = group.block_size, num_slots = shadow_->num_blocks() * size;
  for (int64_t r = 0; r < ranges.size; ++r) {
    const int64_t row = ranges.rows[r];
    if (row < 0) {
      found_.add({FindingKind::kStaleRow, r, 0, -1, -1, 0});
      slots += ranges.counts[r];
      continue;
    }
    for (int64_t i = 0; i < ranges.counts[r]; ++i) {
      const int64_t slot = *slots++, position = ranges.starts[r] + i;
      if (slot < 0) continue;
      const int64_t block = slot / size, offset = slot % size;
      const auto report = [&](FindingKind kind, int64_t wanted) {
        found_.add({kind, requests_->serial(row), position, block, offset, wanted});
      };
      if (table.data != nullptr) {
        const int64_t entry = table.at(r, group.column(position));
        const int64_t wanted = entry * size + position % size;
        if (wanted != slot) report(FindingKind::kSlotMismatch, wanted);
      }
      if (slot < num_slots) {
        add(row, position, block, offset);
        needs_checks = needs_checks || this->needs_checks(tokens_.back());
      } else {
        report(FindingKind::kSlotBeyondPool, kNobody);
      }
    }
  }
  stages_ = {&SlotWrites::write};
  if (needs_checks) {
    stages_.insert(stages_.end(), {&SlotWrites::check_content, &SlotWrites::take_blocks,
                                   &SlotWrites::check_blocks});
  }
  return advance();
}

// Whether a check may find a defect in this write, or the writer of the block changes. Most tokens
// of a decode step continue a block and need no checks.
bool SlotWrites::needs_checks(const Token& token) {
  const ShadowBlock& block = shadow_->block(token.block);
  const uint64_t old = shadow_->slot(token.block, token.offset).tag;
  return block.writer != token.serial || block.owner != group_.index || token.block == 0 ||
         block.is_fresh ||
         (shadow_->tracks_holders && (block.holder != token.serial || block.num_holders == 0)) ||
         (old != 0 && old != token.tag);
}

Findings SlotWrites::begin_states(const SlotGroup& group, const TokenRanges& ranges,
                                  const int64_t* pages, int64_t step) {
  start(group, step);
  stages_ = {&SlotWrites::fill_states, &SlotWrites::check_blocks};
  for (int64_t r = 0; r < ranges.size; ++r) {
    const int64_t row = ranges.rows[r], position = ranges.starts[r];
    if (row < 0) {
      found_.add({FindingKind::kStaleRow, r, 0, -1, -1, 0});
    } else if (shadow_->has(pages[r])) {
      add(row, position, pages[r], 0);
    } else {
      found_.add({FindingKind::kSlotBeyondPool, requests_->serial(row), position, pages[r], 0, 0});
    }
  }
  return advance();
}

void SlotWrites::load(const SlotGroup& group, const TokenRanges& ranges, const Table& table,
                      int64_t step) {
  const bool is_state = group.kind == SlotGroup::Kind::kState;
  const bool has_tokens = std::any_of(ranges.counts, ranges.counts + ranges.size,
                                      [](int64_t count) { return count > 0; });
  table.check_width(is_state ? int64_t{has_tokens} : needed_width(group, ranges));
  start(group, step);
  for (int64_t r = 0; r < ranges.size; ++r) {
    const int64_t stop = ranges.starts[r] + ranges.counts[r];
    if (ranges.rows[r] < 0) continue;
    for (int64_t p = is_state ? std::max(stop - 1, ranges.starts[r]) : ranges.starts[r]; p < stop;
         ++p) {
      const int64_t block = table.at(r, is_state ? 0 : group.column(p));
      if (block > 0 && shadow_->has(block)) {
        add(ranges.rows[r], p, block, is_state ? 0 : p % group.block_size);
      }
    }
  }
  fill(kLoaded);
}

Findings SlotWrites::advance() {
  while (found_.empty() && !stages_.empty()) {
    const Stage stage = stages_.back();
    stages_.pop_back();
    (this->*stage)();
  }
  return found_.empty() ? Findings{} : found_.take();
}

// Reports writes to the null block and to blocks that the request does not hold.
void SlotWrites::check_blocks() {
  for (const Token& token : tokens_) {
    const ShadowBlock& block = shadow_->block(token.block);
    if (token.block == 0) found(FindingKind::kNullBlockWrite, token);
    if (!shadow_->tracks_holders) continue;
    if (block.num_holders == 0 && token.block > 0) {
      found(FindingKind::kWriteAfterFree, token);
    } else if (block.num_holders == 1 && block.holder != token.serial && block.holder != kNobody) {
      found(FindingKind::kHeldByOther, token, block.holder);
    }
  }
}

// Records the requests as writers of their blocks, and reports blocks with two writers in a step.
void SlotWrites::take_blocks() {
  for (Token& token : tokens_) {
    shadow_->take_over(token.block, group_.index);
    if (shadow_->block(token.block).is_fresh) shadow_->drop_stale(token.block, token.offset);
    token.writer = shadow_->block(token.block).writer;
  }
  for (const Token& token : tokens_) shadow_->block(token.block).writer = token.serial;
  for (const Token& token : tokens_) {
    const ShadowBlock& block = shadow_->block(token.block);
    const bool has_written =
        token.writer != token.serial && token.writer != kNobody && block.write_step == step_;
    if (block.writer != token.serial) {
      found(FindingKind::kTwoWriters, token, block.writer);
    } else if (has_written) {
      found(FindingKind::kTwoWriters, token, token.writer);
    }
  }
}

// Reports writes to shared blocks that change their content.
void SlotWrites::check_content() {
  int64_t before = -1;  // block of the last new writer
  for (Token& token : tokens_) {
    if (token.writer != token.serial) {
      if (token.block != before) log(token, kWritten);
      before = token.block;
    }
    const uint64_t old = shadow_->slot(token.block, token.offset).tag;
    token.overwrites = old != 0 && old != token.tag;
    const ShadowBlock& block = shadow_->block(token.block);
    if (token.overwrites && shadow_->tracks_holders && block.num_holders > 1 &&
        group_.kind != SlotGroup::Kind::kCircular) {
      found(FindingKind::kWriteToShared, token, block.num_holders);
    }
  }
}

void SlotWrites::write() {
  for (const Token& token : tokens_) {
    if (token.overwrites) shadow_->change(token.block);
    shadow_->slot(token.block, token.offset) = {token.tag, token.serial << 32 | token.position};
    shadow_->block(token.block).write_step = step_;
  }
}

void SlotWrites::fill_states() { fill(kWritten); }

void SlotWrites::fill(int8_t event) {
  for (Token& token : tokens_) token.writer = shadow_->block(token.block).writer;
  int64_t before = -1;
  for (const Token& token : tokens_) {
    shadow_->take_over(token.block, group_.index);
    ShadowBlock& block = shadow_->block(token.block);
    block.is_fresh = false;
    block.writer = token.serial;
    block.write_step = step_;
    shadow_->slot(token.block, token.offset) = {token.tag, token.serial << 32 | token.position};
    shadow_->change(token.block);
    if (event == kLoaded ? token.block != before : token.writer != token.serial) log(token, event);
    before = token.block;
  }
}

void SlotWrites::log(const Token& token, int8_t event) {
  shadow_->log(token.block,
               {step_, token.serial, static_cast<int32_t>(token.position), group_.index, event, 0});
}

void SlotWrites::found(FindingKind kind, const Token& token, int64_t other) {
  found_.add({kind, token.serial, token.position, token.block, token.offset, other});
}

}  // namespace kvcache::sanitizer
