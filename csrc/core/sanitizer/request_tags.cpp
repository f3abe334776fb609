// SPDX-License-Identifier: Apache-2.0
#include "core/sanitizer/request_tags.h"

namespace kvcache::sanitizer {

uint64_t token_hash(uint64_t value, uint64_t position) {
  uint64_t x = value * 0xD6E8FEB86659FD93 + position * 0x9E3779B97F4A7C15;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

int64_t RequestTags::add(int64_t serial, uint64_t seed) {
  if (free_.empty()) {
    free_.push_back(num_rows());
    requests_.emplace_back();
  }
  const int64_t row = free_.back();
  free_.pop_back();
  at(row).serial = serial;
  restart(row, seed);
  return row;
}

void RequestTags::remove(int64_t row) {
  num_tags_ -= static_cast<int64_t>(at(row).tags.size());
  at(row) = {};
  free_.push_back(row);
}

void RequestTags::restart(int64_t row, uint64_t seed) {
  Request& request = at(row);
  num_tags_ += 1 - static_cast<int64_t>(request.tags.size());
  request.tags.assign(1, seed);
  request.num_in_sequence = 0;
}

void RequestTags::put(const TokenRanges& ranges, const uint64_t* hashes, const int64_t* parents) {
  for (int64_t r = 0; r < ranges.size; ++r) {
    Request& request = at(ranges.rows[r]);
    const int64_t start = ranges.starts[r], count = ranges.counts[r];
    const auto size = static_cast<size_t>(start + count + 1);
    num_tags_ += static_cast<int64_t>(size) - static_cast<int64_t>(request.tags.size());
    const size_t num_before = request.tags.size();
    request.tags.resize(size);
    for (size_t i = num_before; i < size - static_cast<size_t>(count); ++i) {
      request.tags[i] = token_hash(++num_unknown_, ~uint64_t{0}) | 1;
    }
    uint64_t* const before = request.tags.data() + start;
    int64_t in_sequence = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t parent = parents == nullptr ? i - 1 : parents[i];
      before[i + 1] = before[parent + 1] + hashes[i];
      in_sequence += in_sequence == i && parent == i - 1;
    }
    if (start <= request.num_in_sequence) request.num_in_sequence = start + in_sequence;
    hashes += count;
    if (parents != nullptr) parents += count;
  }
}

void token_hashes(const TokenRanges& ranges, const int64_t* values, uint64_t key,
                  const int64_t* parents, uint64_t* out) {
  std::vector<int64_t> positions;
  for (int64_t r = 0; r < ranges.size; ++r) {
    const int64_t start = ranges.starts[r], count = ranges.counts[r];
    if (parents != nullptr) {
      positions.resize(static_cast<size_t>(count) + 1);
      positions[0] = start - 1;  // position of the last token before the new ones
    }
    for (int64_t i = 0; i < count; ++i) {
      int64_t position = start + i;
      if (parents != nullptr) {
        position = positions[static_cast<size_t>(parents[i] + 1)] + 1;
        positions[static_cast<size_t>(i) + 1] = position;
      }
      out[i] = token_hash(static_cast<uint64_t>(values[i]) + key, static_cast<uint64_t>(position));
    }
    values += count;
    out += count;
    if (parents != nullptr) parents += count;
  }
}

}  // namespace kvcache::sanitizer
