// SPDX-License-Identifier: Apache-2.0
#include "sanitizer/request_tags.h"

namespace kvcache::sanitizer {

uint64_t token_hash(uint64_t value, uint64_t position) {
  uint64_t x = value * 0xD6E8FEB86659FD93 + position * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

int64_t RequestTags::add(int64_t serial, uint64_t seed) {
  if (free_.empty()) {
    // There is space for all rows, so that removing one needs no memory.
    if (free_.capacity() <= requests_.size()) free_.reserve(2 * requests_.size() + 8);
    requests_.emplace_back();
    free_.push_back(num_rows() - 1);
  }
  const int64_t row = free_.back();
  restart(row, seed);
  at(row).serial = serial;
  free_.pop_back();
  return row;
}

void RequestTags::remove(int64_t row) {
  at(row) = {};
  free_.push_back(row);
}

void RequestTags::restart(int64_t row, uint64_t seed) {
  Request& request = at(row);
  request.tags.assign(1, seed);
  request.num_in_sequence = 0;
}

void RequestTags::put(const TokenRanges& ranges, const uint64_t* hashes) {
  for (int64_t r = 0; r < ranges.size; ++r) {
    Request& request = at(ranges.rows[r]);
    const int64_t start = ranges.starts[r], count = ranges.counts[r];
    const auto size = static_cast<size_t>(start + count + 1);
    const size_t num_before = request.tags.size();
    request.tags.resize(size);
    for (size_t i = num_before; i < size - static_cast<size_t>(count); ++i) {
      request.tags[i] = token_hash(++num_unknown_, ~uint64_t{0}) | 1;
    }
    uint64_t* const before = request.tags.data() + start;
    for (int64_t i = 0; i < count; ++i) before[i + 1] = before[i] + hashes[i];
    if (start <= request.num_in_sequence) request.num_in_sequence = start + count;
    hashes += count;
  }
}

void token_hashes(const TokenRanges& ranges, const int64_t* values, uint64_t key, uint64_t* out) {
  for (int64_t r = 0; r < ranges.size; ++r) {
    const int64_t start = ranges.starts[r], count = ranges.counts[r];
    for (int64_t i = 0; i < count; ++i) {
      out[i] = token_hash(static_cast<uint64_t>(values[i]) + key, static_cast<uint64_t>(start + i));
    }
    values += count;
    out += count;
  }
}

}  // namespace kvcache::sanitizer
