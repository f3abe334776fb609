// SPDX-License-Identifier: Apache-2.0
// Checks writes to slots and records them in the shadow.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sanitizer/request_tags.h"
#include "sanitizer/shadow.h"
#include "sanitizer/slot_group.h"

namespace kvcache::sanitizer {

// A write runs in stages. `begin...` and `advance` return as soon as a stage has findings, before
// later stages change the shadow. Reports therefore show the state at the time of the finding. The
// write is complete when they return no findings. All `begin...` functions throw
// std::invalid_argument, without any change, if a table has too few columns. The tokens must be
// known.
class SlotWrites {
 public:
  SlotWrites(std::shared_ptr<Shadow> shadow, std::shared_ptr<const RequestTags> requests)
      : shadow_(std::move(shadow)), requests_(std::move(requests)) {}

  // `slots`: one per token, or -1. `table`: compared with the slots, if given.
  Findings begin(const SlotGroup& group, const TokenRanges& ranges, const int64_t* slots,
                 const Table& table, int64_t step);
  // Writes the state after token `starts` of each range; all counts are 1. `pages`: one per range.
  Findings begin_states(const SlotGroup& group, const TokenRanges& ranges, const int64_t* pages,
                        int64_t step);
  // Writes content from an external source, which is trusted. For states, the table has one page
  // per range.
  void load(const SlotGroup& group, const TokenRanges& ranges, const Table& table, int64_t step);
  Findings advance();

  const RequestTags& requests() const { return *requests_; }
  // Number of slots in the last write.
  int64_t num_written() const { return static_cast<int64_t>(tokens_.size()); }

 private:
  struct Token {
    int64_t serial, position;
    uint64_t tag;
    int64_t block, offset;
    int64_t writer = kNobody;  // previous writer of the block
    bool overwrites = false;
  };
  using Stage = void (SlotWrites::*)();

  void start(const SlotGroup& group, int64_t step);
  void add(int64_t row, int64_t position, int64_t block, int64_t offset);
  bool needs_checks(const Token& token);
  void check_blocks();
  void take_blocks();
  void check_content();
  void write();
  void fill_states();
  void fill(int8_t event);
  void log(const Token& token, int8_t event);
  void found(FindingKind kind, const Token& token, int64_t other = kNobody);

  std::shared_ptr<Shadow> shadow_;
  std::shared_ptr<const RequestTags> requests_;
  SlotGroup group_{};
  int64_t step_ = 0;
  std::vector<Token> tokens_;
  std::vector<Stage> stages_;  // remaining stages, in reverse order
  FindingList found_;
};

}  // namespace kvcache::sanitizer
