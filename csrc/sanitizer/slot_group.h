// SPDX-License-Identifier: Apache-2.0
// The properties of a cache group that the sanitizer checks use, a view of the group's block
// tables, and the findings of the checks.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace kvcache::sanitizer {

// Kinds of findings, in the order in which a check reports them. Python reports kHeldByOther (a
// write to a block that only another request holds) and kWrongRead under other names.
enum class FindingKind : int64_t {
  kSlotMismatch,
  kStaleRow,
  kSlotBeyondPool,
  kNullBlockWrite,
  kWriteAfterFree,
  kHeldByOther,
  kTwoWriters,
  kWriteToShared,
  kReadBeyondLength,
  kWrongRead,
};

struct Finding {
  FindingKind kind;
  int64_t
      serial;  // serial number of the reading or writing request; stale rows: index in the batch
  int64_t position;
  int64_t block, offset;
  int64_t other;  // expected slot, other request, number of tokens, or number of wrong slots
};

using Findings = std::vector<Finding>;

// The findings of a check, one per kind, request and block.
class FindingList {
 public:
  // If `counts` is set, a repeated finding increments `other` of the first one.
  void add(const Finding& finding, bool counts = false) {
    // There is space before a place is added, so that no place lacks its finding.
    if (findings_.size() == findings_.capacity()) findings_.reserve(2 * findings_.size() + 8);
    const auto [it, is_new] =
        places_.try_emplace({finding.kind, finding.serial, finding.block}, findings_.size());
    if (is_new) {
      findings_.push_back(finding);
    } else if (counts) {
      ++findings_[it->second].other;
    }
  }
  // Returns the findings, sorted by kind, and clears the list.
  Findings take() {
    std::stable_sort(findings_.begin(), findings_.end(),
                     [](const Finding& a, const Finding& b) { return a.kind < b.kind; });
    places_.clear();
    return std::exchange(findings_, {});
  }
  bool empty() const { return findings_.empty(); }

 private:
  Findings findings_;
  std::map<std::tuple<FindingKind, int64_t, int64_t>, size_t> places_;
};

struct SlotGroup {
  enum class Kind { kFull, kWindow, kChunk, kCircular, kState };

  int16_t index;
  Kind kind;
  int64_t block_size;
  int64_t window, chunk;
  int64_t columns;  // number of columns of a circular table

  // The first token that a query at this position reads. For a state, this is the last token that
  // it includes.
  int64_t first_needed(int64_t position) const {
    if (kind == Kind::kWindow || kind == Kind::kCircular) {
      return std::max(position - (window - 1), int64_t{0});
    }
    if (kind == Kind::kState) return std::max(position - 1, int64_t{0});
    return kind == Kind::kChunk ? position - position % chunk : 0;
  }

  int64_t column(int64_t position) const {
    const int64_t column = position / block_size;
    return kind == Kind::kCircular ? column % columns : column;
  }
  // Table columns for tokens up to `stop`.
  int64_t width(int64_t stop) const {
    const int64_t width = (stop + block_size - 1) / block_size;
    return kind == Kind::kCircular ? std::min(columns, width) : width;
  }
};

// A block table of int32 or int64, with any strides.
struct Table {
  const char* data = nullptr;  // null: no table
  int64_t width = 0;
  int64_t row_stride = 0, column_stride = 0;  // bytes
  bool is_wide = false;

  // Ids outside the range of int32, which no block has, are clamped.
  int32_t at(int64_t row, int64_t column) const {
    const char* const entry = data + row * row_stride + column * column_stride;
    using Limits = std::numeric_limits<int32_t>;
    if (is_wide) {
      return static_cast<int32_t>(
          std::clamp<int64_t>(loaded<int64_t>(entry), Limits::min(), Limits::max()));
    }
    return loaded<int32_t>(entry);
  }
  // Whether the entries of a row, starting at column `begin`, are equal to these. May return false
  // for equal entries, which the caller must then compare one by one.
  bool equals(int64_t row, int64_t begin, const std::vector<int32_t>& entries) const {
    const auto size = static_cast<int64_t>(entries.size());
    return !is_wide && column_stride == sizeof(int32_t) && begin < size &&
           std::memcmp(data + row * row_stride + begin * column_stride, entries.data() + begin,
                       static_cast<size_t>(size - begin) * sizeof(int32_t)) == 0;
  }
  void check_width(int64_t needed) const {
    if (width >= needed) return;
    throw std::invalid_argument("block_table has " + std::to_string(width) + " columns: expected " +
                                std::to_string(needed));
  }

 private:
  template <class T>
  static T loaded(const char* entry) {
    T value;
    std::memcpy(&value, entry, sizeof(T));  // entries need not be aligned
    return value;
  }
};

}  // namespace kvcache::sanitizer
