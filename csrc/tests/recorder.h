// SPDX-License-Identifier: Apache-2.0
// An eviction order that evicts the oldest candidate first, and records its notifications.
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/pool/block_listener.h"
#include "core/pool/eviction_order.h"

namespace kvcache::test {

// `kinds`: the notifications to record; empty: all.
struct Recorder : EvictionOrder, BlockListener {
  using Lines = std::vector<std::string>;
  explicit Recorder(Lines* log, Lines kinds = {}) : log(log), kinds(std::move(kinds)) {}
  Lines *log, kinds;
  std::deque<BlockId> candidates;

  template <class... T>
  void note(const std::string& kind, const T&... values) {
    if (!kinds.empty() && std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) return;
    std::string line = kind;
    const auto add = [&](const auto& value) {
      if constexpr (std::is_convertible_v<decltype(value), std::string>) {
        line += value;
      } else {
        line += " " + std::to_string(value);
      }
    };
    (add(values), ...);
    log->push_back(line);
  }
  template <class T>
  static std::string text(const T* values, int64_t n) {
    std::string out;
    for (int64_t i = 0; i < n; ++i) out += " " + std::to_string(values[i]);
    return out;
  }
  void insert(BlockId id) override {
    note("insert", id);
    candidates.push_back(id);
  }
  void remove(BlockId id) override {
    note("remove", id);
    candidates.erase(std::find(candidates.begin(), candidates.end(), id));
  }
  BlockId victim() override { return candidates.empty() ? kNullBlock : candidates.front(); }
  void on_publish(const Published& p) override {
    for (int64_t i = 0; i < p.n; ++i) {
      note(p.hash(i) == nullptr ? "part" : "publish", p.ids[i], int{p.group});
    }
  }
  void on_hit(const Hit& hit) override {
    note(hit.by == Hit::By::kRequest ? "hit" : "retain", text(hit.ids, hit.n));
  }
  void on_release(const Released& r) override {
    if (r.access.number > 0) {
      return note("access", text(r.ids, r.n), ", time", static_cast<int64_t>(r.access.now),
                  r.access.number);
    }
    if (r.hit_ends != nullptr) {
      return note("ends", text(r.ids, r.n), " of", text(r.hit_ends, r.n));
    }
    if (r.features == nullptr) return note("released", text(r.ids, r.n));
    const ReleaseFeatures& f = *r.features;
    note("release", text(r.ids, r.n), ", tokens", text(r.prefix_tokens, r.n), ", prefix",
         f.num_prefix_tokens, ", new", f.num_new_blocks, ", output", f.num_output_tokens, ", time",
         f.logical_time, f.wall_ms, ", of", f.tokens_per_block,
         f.is_swapped_out ? ", swapped" : "");
    for (int64_t i = 0; i < f.num_retention; ++i) {
      const Retention& each = f.retention[i];
      note("retention", each.first, each.stop, each.priority, each.ttl_ms);
    }
  }
  void on_idle(const Blocks& blocks) override {
    for (BlockId id : blocks) note("idle", id);
  }
  void on_forget(const Forgotten& f) override {
    using Why = Forgotten::Why;
    if (f.why == Why::kReset) note("reset", f.n);
    for (int64_t i = 0; i < f.n; ++i) {
      if (f.why == Why::kFreed) {
        note("freed", f.ids[i]);
      } else {
        note("forget", f.ids[i], int{f.hash(i) != nullptr}, int{f.group(i)},
             int{f.why == Why::kEvicted});
      }
    }
  }
};

}  // namespace kvcache::test
