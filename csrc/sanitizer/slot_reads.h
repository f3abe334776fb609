// SPDX-License-Identifier: Apache-2.0
// Checks the slots and states that attention reads.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "sanitizer/request_tags.h"
#include "sanitizer/shadow.h"
#include "sanitizer/slot_group.h"

namespace kvcache::sanitizer {

// Checks the reads of one group. Only slots that were not checked before, or whose block or table
// entry has changed since, are compared.
class SlotReads {
 public:
  SlotReads(const SlotGroup& group, std::shared_ptr<Shadow> shadow,
            std::shared_ptr<const RequestTags> requests)
      : group_(group), shadow_(std::move(shadow)), requests_(std::move(requests)) {}

  struct Ranges {
    const int64_t* rows;    // indices of requests, or -1
    const int64_t* starts;  // first token that is computed
    const int64_t* stops;
    int64_t size;
  };
  // Limits a table to the columns that ranges with these ends read. Throws std::invalid_argument
  // if it has fewer columns.
  void cut(Table* table, const int64_t* stops, int64_t size);
  Findings check(const Ranges& ranges, const Table& table);
  // Checks the state after `num_tokens` of each request. A request without tokens reads none.
  Findings check_states(const int64_t* rows, const int64_t* num_tokens, const int64_t* pages,
                        int64_t size);
  Findings skip() {
    num_read_ = num_compared_ = 0;
    return {};
  }
  // The number of slots that attention read in the last check, and the number of these slots that
  // were compared.
  int64_t num_read() const { return num_read_; }
  int64_t num_compared() const { return num_compared_; }

  // Discards the checks of token `start` and all later tokens.
  void forget(int64_t row, int64_t start);

 private:
  struct Row {
    int64_t first = 0, stop = 0;  // tokens that were checked
    int64_t checked_at = 0;       // `Shadow::num_changes` at the last check
    std::vector<int32_t> table;
  };

  void check_rows(const int64_t* rows, const int64_t* stops, const Table& table, int64_t size);
  int64_t length(int64_t row, int64_t stop) const;
  int64_t first_unchecked(int64_t r, int64_t start, int64_t stop, const Table& table, Row* checked);
  bool has_changes(const Row& checked, int64_t column) const;
  bool compare(int64_t row, int64_t position, int64_t block, int64_t offset);

  SlotGroup group_;
  std::shared_ptr<Shadow> shadow_;
  std::shared_ptr<const RequestTags> requests_;
  std::vector<Row> rows_;
  FindingList found_;
  int64_t num_read_ = 0, num_compared_ = 0;
};

}  // namespace kvcache::sanitizer
