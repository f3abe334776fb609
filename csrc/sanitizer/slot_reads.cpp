// SPDX-License-Identifier: Apache-2.0
#include "sanitizer/slot_reads.h"

#include <algorithm>

namespace kvcache::sanitizer {

void SlotReads::forget(int64_t row, int64_t start) {
  if (row >= static_cast<int64_t>(rows_.size())) return;
  Row& checked = rows_[static_cast<size_t>(row)];
  if (start == 0) checked = {};
  checked.stop = std::min(checked.stop, start);
}

void SlotReads::cut(Table* table, const int64_t* stops, int64_t size) {
  if (size == 0) return;
  int64_t longest = 1;
  for (int64_t r = 0; r < size; ++r) longest = std::max(longest, stops[r]);
  table->check_width(group_.width(longest));
  table->width = group_.width(longest);
}

Findings SlotReads::check(const Ranges& ranges, const Table& table) {
  check_rows(ranges.rows, ranges.stops, table, ranges.size);
  rows_.resize(std::max(rows_.size(), static_cast<size_t>(requests_->num_rows())));
  for (int64_t r = 0; r < ranges.size; ++r) {
    const int64_t row = ranges.rows[r];
    if (row < 0) continue;
    const int64_t start = ranges.starts[r], stop = length(row, ranges.stops[r]);
    const int64_t first =
        group_.kind == SlotGroup::Kind::kCircular
            ? group_.first_needed(start)
            : first_unchecked(r, start, stop, table, &rows_[static_cast<size_t>(row)]);
    num_read_ += std::max<int64_t>(stop - group_.first_needed(start), 0);
    bool is_right = true;
    for (int64_t p = first; p < stop; ++p) {
      is_right &= compare(row, p, table.at(r, group_.column(p)), p % group_.block_size);
    }
    if (!is_right) forget(row, 0);  // the step may be repeated
  }
  return found_.empty() ? Findings{} : found_.take();
}

Findings SlotReads::check_states(const int64_t* rows, const int64_t* num_tokens,
                                 const int64_t* pages, int64_t size) {
  const Table table{reinterpret_cast<const char*>(pages), 1, sizeof(int64_t), sizeof(int64_t),
                    true};
  check_rows(rows, num_tokens, table, size);
  for (int64_t r = 0; r < size; ++r) {
    const int64_t stop = rows[r] < 0 ? 0 : length(rows[r], num_tokens[r]);
    if (stop == 0) continue;
    ++num_read_;
    compare(rows[r], stop - 1, table.at(r, 0), 0);
  }
  return found_.empty() ? Findings{} : found_.take();
}

// Reports rows of ended requests, and rows that read more tokens than they have.
void SlotReads::check_rows(const int64_t* rows, const int64_t* stops, const Table& table,
                           int64_t size) {
  num_read_ = num_compared_ = 0;
  for (int64_t r = 0; r < size; ++r) {
    if (rows[r] < 0) {
      found_.add({FindingKind::kStaleRow, r, 0, -1, -1, 0});
      continue;
    }
    const int64_t known = length(rows[r], stops[r]);
    if (known == stops[r]) continue;
    const int64_t block = table.at(r, std::min(group_.column(known), table.width - 1));
    found_.add({FindingKind::kReadBeyondLength, requests_->serial(rows[r]), known,
                shadow_->has(block) ? block : -1, known % group_.block_size, stops[r]});
  }
}

int64_t SlotReads::length(int64_t row, int64_t stop) const {
  return std::min(stop, requests_->num_tokens(row));
}

// Returns the first token of a row that must be compared, and marks all tokens as checked.
int64_t SlotReads::first_unchecked(int64_t r, int64_t start, int64_t stop, const Table& table,
                                   Row* checked) {
  const int64_t needed = group_.first_needed(start), width = group_.width(stop);
  int64_t first = needed;
  if (needed >= checked->first) first = std::max(needed, std::min(checked->stop, start));
  if (static_cast<int64_t>(checked->table.size()) != width) {
    checked->table.resize(static_cast<size_t>(width), -1);
  }
  // Columns before the first needed token are ignored, because they have left the window.
  int64_t column = needed / group_.block_size;
  if (table.equals(r, column, checked->table) && !has_changes(*checked, column)) column = width;
  for (; column < width; ++column) {
    const int32_t block = table.at(r, column);
    int32_t& known = checked->table[static_cast<size_t>(column)];
    const bool has_changed =
        shadow_->has(block) && shadow_->changed_at(block) > checked->checked_at;
    if (block == known && !has_changed) continue;
    known = block;
    first = std::max(needed, std::min(first, column * group_.block_size));
  }
  checked->first = needed;
  checked->stop = stop;
  checked->checked_at = shadow_->num_changes();
  return first;
}

// Whether any block of the checked table, starting at this column, has changed since the check.
bool SlotReads::has_changes(const Row& checked, int64_t column) const {
  if (shadow_->num_changes() == checked.checked_at) return false;
  bool found = false;
  for (auto i = static_cast<size_t>(column); i < checked.table.size(); ++i) {
    const int32_t block = checked.table[i];
    found |= shadow_->has(block) && shadow_->changed_at(block) > checked.checked_at;
  }
  return found;
}

bool SlotReads::compare(int64_t row, int64_t position, int64_t block, int64_t offset) {
  const bool is_state = group_.kind == SlotGroup::Kind::kState;
  const uint64_t expected = requests_->tags(row)[position];
  ++num_compared_;
  bool is_right = shadow_->has(block) && !(is_state && block == 0);
  if (is_right) {
    ShadowBlock& held = shadow_->block(block);
    is_right = shadow_->slot(block, offset).tag == expected && held.owner == group_.index &&
               !(shadow_->tracks_holders && held.num_holders == 0);
    if (shadow_->tracks_holders) held.is_fresh = false;
  }
  if (is_right) return true;
  found_.add({FindingKind::kWrongRead, requests_->serial(row), position, block, offset, 1},
             /*counts=*/true);
  return false;
}

}  // namespace kvcache::sanitizer
