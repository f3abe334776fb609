// SPDX-License-Identifier: Apache-2.0
#include "core/manager/options.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "core/eviction/registry.h"
#include "core/groups/rules/page_rules.h"
#include "core/limits.h"

namespace kvcache {

void check_optional(const ManagerOptions& options) {
  checked_size("hash_block_size", options.hash_block_size, 0);
  if (options.hash_bytes < 1 || options.hash_bytes > static_cast<int64_t>(sizeof(Hash))) {
    throw std::invalid_argument("hash_bytes is " + std::to_string(options.hash_bytes) +
                                ": expected 1 to 32");
  }
  if (options.retention_interval >= 0) {
    checked_size("retention_interval", options.retention_interval, 0);
  }
  checked_size("num_preallocate_tokens", options.num_preallocate_tokens, 0);
  checked_size("max_num_reqs", options.max_num_reqs, 0);
  checked_size("watermark_blocks", options.watermark_blocks, 0);
  checked_size("explain_misses", options.explain_misses, 0);
  if (options.num_host_blocks != 0) {
    checked_size("num_host_blocks", options.num_host_blocks, 2, " (the null block is counted)");
  } else if (options.host_eviction.policy != Eviction{}.policy) {
    throw std::invalid_argument("host_eviction is '" + options.host_eviction.policy +
                                "': expected only with a host tier (num_host_blocks of 2 or more)");
  }
  check_host_eviction_beside(options.host_eviction.policy, options.eviction.policy);
  if (!options.host_writes.min_gain) return;
  const double gain = *options.host_writes.min_gain;
  if (!(gain >= 0 && gain <= 1)) {
    throw std::invalid_argument("min_gain_to_write is " + std::to_string(gain) +
                                ": expected 0 to 1 hits per block");
  }
  if (options.host_eviction.policy != "learned") {
    throw std::invalid_argument("min_gain_to_write is " + std::to_string(gain) +
                                ", and host_eviction is '" + options.host_eviction.policy +
                                "': expected 'learned'");
  }
}

ManagerOptions checked(const ManagerOptions& options) {
  if (options.groups.empty() || options.groups.size() > kMaxGroups) {
    throw std::invalid_argument("groups has " + std::to_string(options.groups.size()) +
                                " entries: expected 1 to " + std::to_string(kMaxGroups));
  }
  for (size_t g = 0; g < options.groups.size(); ++g) {
    const GroupOptions& group = options.groups[g];
    const PageTraits& traits = group.kind->rules().traits;
    checked_size("block_size", group.block_size, 1);
    if (!group.is_cached && traits.updates_in_place) {
      throw std::invalid_argument(
          "cached is False for a group of recurrent states: expected True, because its state would "
          "be "
          "missing after a hit in other groups; to cache nothing, set enable_caching=False");
    }
    if (!group.drafts || traits.appends) continue;
    throw std::invalid_argument("groups[" + std::to_string(g) +
                                "] has drafts=True, but its kind does not store K and V of tokens: "
                                "expected a drafter's layers in a group of another kind");
  }
  checked_size("num_gpu_blocks", options.num_blocks, 2, " (the null block is counted)");
  checked_size("max_model_len", options.max_model_len, 1);
  check_optional(options);
  ManagerOptions out = options;
  // A group with a circular buffer overwrites its tokens, so its window would be missing after a
  // hit.
  for (const GroupOptions& group : options.groups) {
    const PageTraits& traits = group.kind->rules().traits;
    if (group.is_cached && traits.follows_sequence && !traits.has_hits) out.enable_caching = false;
  }
  return out;
}

int64_t hash_block_size_of(const ManagerOptions& options) {
  int64_t largest = 0;
  for (const GroupOptions& group : options.groups) {
    largest = std::gcd(largest, group.block_size);
  }
  if (options.hash_block_size == 0) return largest;
  if (largest % options.hash_block_size == 0) return options.hash_block_size;
  throw std::invalid_argument("hash_block_size is " + std::to_string(options.hash_block_size) +
                              ": expected a divisor of every group's block size, that is, of " +
                              std::to_string(largest));
}

std::vector<CacheGroup> groups_of(const ManagerOptions& options, int64_t hash_block_size) {
  std::vector<CacheGroup> groups;
  for (const GroupOptions& each : options.groups) {
    CacheGroup group{};
    group.kind = each.kind;
    group.rules = &each.kind->rules();
    group.keeps_all = each.kind->keeps_all();
    group.is_cached = each.is_cached && group.rules->traits.has_hits;
    group.is_transferred = each.is_transferred;
    group.drafts = each.drafts;
    group.has_partial =
        group.is_cached && options.hash_block_size > 0 && hash_block_size < each.block_size;
    group.id = static_cast<uint8_t>(groups.size());
    group.block_size = each.block_size;
    group.num_hashes = each.block_size / hash_block_size;
    group.max_blocks = ceil_div(options.max_model_len, each.block_size);
    group.num_places = kUnbounded;
    if (each.kind->buffer() > 0) {
      group.max_blocks = std::min(group.max_blocks, ceil_div(each.kind->buffer(), each.block_size));
      group.num_places = group.max_blocks * each.block_size;
    }
    group.num_speculative = each.kind->num_speculative_blocks();
    group.num_prealloc = ceil_div(options.num_preallocate_tokens, each.block_size);
    groups.push_back(std::move(group));
  }
  int64_t hit_unit = 1;
  for (const CacheGroup& group : groups) {
    if (!group.is_cached) continue;
    hit_unit =
        checked_size("the least common multiple of the groups' block sizes",
                     std::lcm(hit_unit, group.has_partial ? hash_block_size : group.block_size), 1);
  }
  const int64_t interval = options.retention_interval;
  const bool is_used = std::any_of(groups.begin(), groups.end(), [](const CacheGroup& group) {
    return group.is_cached && group.kind->is_retained_by_interval();
  });
  if (interval >= 0 && !is_used) {
    throw std::invalid_argument(
        "retention_interval is " + std::to_string(interval) +
        ": expected None, because no cached group has sliding windows or recurrent states");
  }
  if (interval > 0 && interval % hit_unit != 0) {
    throw std::invalid_argument("retention_interval is " + std::to_string(interval) +
                                ": expected None, 0 or a multiple of " + std::to_string(hit_unit) +
                                ", where hits can end");
  }
  for (CacheGroup& group : groups) {
    group.hit_unit = hit_unit;
    const bool is_dense = interval < 0 || !group.kind->is_retained_by_interval();
    group.retained_every = is_dense ? hit_unit : interval;
  }
  return groups;
}

std::vector<int64_t> cached_block_sizes(const std::vector<CacheGroup>& groups) {
  std::vector<int64_t> sizes;
  for (const CacheGroup& group : groups) {
    sizes.push_back(group.is_cached ? group.block_size : 0);
  }
  return sizes;
}

std::unique_ptr<EvictionOrder> policy_of(const Eviction& eviction, int64_t num_blocks) {
  if (eviction.make) return eviction.make(num_blocks);
  return make_eviction_policy(eviction.policy, eviction.options, num_blocks);
}

}  // namespace kvcache
