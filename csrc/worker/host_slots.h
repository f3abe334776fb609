// SPDX-License-Identifier: Apache-2.0
// The host side of a worker's slot mappings. Computes the slot of each of a step's tokens, for all
// groups or for one group. This is plain C++ code that works on the caller's memory.
//
// Invariant: all of a group's entries after the first filled_[place] entries are -1, unless the
// caller has written to them since the last commit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "worker/slot_formula.h"

namespace kvcache {

class HostSlots {
 public:
  // `groups`: the groups with slots, in the order of their places. The first `num_shared` groups
  // have the same positions; calls for all groups process only these. `tables`: the arena of all
  // tables. `counts`: [any, num_rows], the number of entries in each row. `slots`: [groups,
  // num_slots], all -1, int64 if `wide`, otherwise int32. `one_memory`: whether the device reads
  // these slots directly instead of a copy.
  HostSlots(const int32_t* tables, const int32_t* counts, int64_t num_rows,
            std::vector<TableGroupView> groups, int64_t num_shared, void* slots, int64_t num_slots,
            bool wide, bool one_memory);

  // Passed instead of a place, to select all groups with shared positions.
  static constexpr int64_t kShared = -1;

  int64_t num_slots() const { return num_slots_; }
  // Returns whether these bytes overlap the slots.
  bool overlaps(const void* values, int64_t num_bytes) const;

  // Computes the slots of tokens at these positions, and sets the entries after them to -1. `rows`
  // has one entry per token or, with `query_start` [num_rows_given + 1], per request. If a token is
  // invalid, returns an error message and writes nothing.
  std::optional<std::string> compute(int64_t place, const int32_t* rows, int64_t num_rows_given,
                                     const int32_t* query_start, const int64_t* positions,
                                     int64_t num_tokens);
  // Computes the slots of any number of tokens in one group and writes them to the caller's
  // int64[num_tokens]. Does not change the slot mapping.
  std::optional<std::string> compute_into(int64_t place, const int32_t* rows,
                                          int64_t num_rows_given, const int32_t* query_start,
                                          const int64_t* positions, int64_t num_tokens,
                                          int64_t* out) const;
  // Limits the slots to be sent to the device to the first num_tokens tokens. Later entries become
  // -1, including values that the caller wrote.
  void commit(int64_t place, int64_t num_tokens);
  // Records that slots were computed on the device.
  void note_on_device(int64_t place, int64_t num_tokens);
  // Discards the slots of the previous step.
  void begin_step();
  // Returns the number of tokens for which the device has slots.
  int64_t num_on_device(int64_t place) const { return on_device_[static_cast<size_t>(place)]; }

 private:
  struct Places {
    int64_t first, last;
  };
  Places places_of(int64_t place) const {
    return place == kShared ? Places{0, num_shared_} : Places{place, place + 1};
  }
  // Returns the arguments of a slot mapping, except for the output.
  SlotMapping call_of(Places places, const int32_t* rows, int64_t num_rows_given,
                      const int32_t* query_start, const int64_t* positions,
                      int64_t num_tokens) const;
  void fill(int64_t place, int64_t begin, int64_t end);

  const int32_t* tables_;
  const int32_t* counts_;
  int64_t num_rows_;
  std::vector<TableGroupView> groups_;
  int64_t num_shared_;
  char* slots_;
  int64_t num_slots_;
  bool wide_, one_memory_;
  std::vector<int64_t> filled_;     // indexed by place
  std::vector<int64_t> on_host_;    // number of tokens in the last call; indexed by place
  std::vector<int64_t> on_device_;  // indexed by place
};

}  // namespace kvcache
