// SPDX-License-Identifier: Apache-2.0
#include "worker/host_slots.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "worker/map_slots.h"

namespace kvcache {

HostSlots::HostSlots(const int32_t* tables, const int32_t* counts, int64_t num_rows,
                     std::vector<TableGroupView> groups, int64_t num_shared, void* slots,
                     int64_t num_slots, bool wide, bool one_memory)
    : tables_(tables),
      counts_(counts),
      num_rows_(num_rows),
      groups_(std::move(groups)),
      num_shared_(num_shared),
      slots_(static_cast<char*>(slots)),
      num_slots_(num_slots),
      wide_(wide),
      one_memory_(one_memory),
      filled_(groups_.size()),
      on_host_(groups_.size()),
      on_device_(groups_.size()) {}

bool HostSlots::overlaps(const void* values, int64_t num_bytes) const {
  const auto* begin = static_cast<const char*>(values);
  const int64_t size = static_cast<int64_t>(groups_.size()) * num_slots_ * (wide_ ? 8 : 4);
  return begin < slots_ + size && begin + num_bytes > slots_;
}

SlotMapping HostSlots::call_of(Places places, const int32_t* rows, int64_t num_rows_given,
                               const int32_t* query_start, const int64_t* positions,
                               int64_t num_tokens) const {
  SlotMapping m;  // only the entries of used groups are set
  m.groups.num_groups = static_cast<int32_t>(places.last - places.first);
  m.groups.num_rows = static_cast<int32_t>(num_rows_);
  m.groups.num_positions = INT32_MAX;
  for (int64_t i = places.first; i < places.last; ++i) {
    const TableGroupView& group = groups_[static_cast<size_t>(i)];
    m.groups.group[i - places.first] = group;
    m.groups.num_positions = std::min(m.groups.num_positions, group.num_positions());
  }
  m.tables = tables_;
  m.rows = rows;
  m.query_start = query_start;
  m.num_requests = query_start == nullptr ? 0 : num_rows_given;
  m.positions = positions;
  m.counts = counts_;
  m.num_tokens = num_tokens;
  return m;
}

std::optional<std::string> HostSlots::compute_into(int64_t place, const int32_t* rows,
                                                   int64_t num_rows_given,
                                                   const int32_t* query_start,
                                                   const int64_t* positions, int64_t num_tokens,
                                                   int64_t* out) const {
  SlotMapping m =
      call_of(places_of(place), rows, num_rows_given, query_start, positions, num_tokens);
  m.num_out = num_tokens;
  m.wide = true;
  m.out = out;
  return map_slots(m);
}

std::optional<std::string> HostSlots::compute(int64_t place, const int32_t* rows,
                                              int64_t num_rows_given, const int32_t* query_start,
                                              const int64_t* positions, int64_t num_tokens) {
  const Places places = places_of(place);
  SlotMapping m = call_of(places, rows, num_rows_given, query_start, positions, num_tokens);
  m.num_out = num_slots_;
  m.wide = wide_;
  m.out = slots_ + places.first * num_slots_ * (wide_ ? 8 : 4);
  if (auto wrong = map_slots(m, filled_.data() + places.first)) return wrong;
  for (int64_t i = places.first; i < places.last; ++i) {
    const auto at = static_cast<size_t>(i);
    filled_[at] = on_host_[at] = num_tokens;
    // Unless the device reads these slots directly, it has none of them before the commit.
    on_device_[at] = one_memory_ ? num_tokens : 0;
  }
  return std::nullopt;
}

void HostSlots::commit(int64_t place, int64_t num_tokens) {
  const Places places = places_of(place);
  for (int64_t i = places.first; i < places.last; ++i) {
    const auto at = static_cast<size_t>(i);
    // Fills all entries up to the end, including those that the caller wrote, because a captured
    // graph uses all of them.
    fill(i, std::min(num_tokens, num_slots_), num_slots_);
    filled_[at] = std::min(filled_[at], num_tokens);
    on_host_[at] = on_device_[at] = std::min(on_host_[at], num_tokens);
  }
}

void HostSlots::note_on_device(int64_t place, int64_t num_tokens) {
  const Places places = places_of(place);
  std::fill(on_device_.begin() + places.first, on_device_.begin() + places.last, num_tokens);
}

void HostSlots::begin_step() {
  std::fill(on_host_.begin(), on_host_.end(), 0);
  std::fill(on_device_.begin(), on_device_.end(), 0);
}

void HostSlots::fill(int64_t place, int64_t begin, int64_t end) {
  const int64_t item = wide_ ? 8 : 4;  // memset works because all bits of -1 are set
  std::memset(slots_ + (place * num_slots_ + begin) * item, 0xFF,
              static_cast<size_t>((end - begin) * item));
}

}  // namespace kvcache
