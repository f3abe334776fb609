// SPDX-License-Identifier: Apache-2.0
#include "core/manager/options.h"

#include <algorithm>
#include <numeric>

#include "core/errors.h"
#include "core/eviction/registry.h"
#include "core/groups/rules/engine_state.h"
#include "core/groups/rules/page_rules.h"

namespace kvcache {

namespace {

// Checks the options of the host tier.
void check_host(const ManagerOptions& options) {
  const std::string& host_eviction = options.host_eviction.policy;
  if (options.num_host_blocks != 0) {
    checked_size("num_host_blocks", options.num_host_blocks, 2, " (the null block is counted)");
  } else if (host_eviction != Eviction{}.policy) {
    throw_invalid("host_eviction is '", host_eviction,
                  "': expected only with a host tier (num_host_blocks of 2 or more)");
  }
  check_host_eviction_beside(host_eviction, options.eviction.policy);
  if (!options.host_writes.min_gain) return;
  const double gain = *options.host_writes.min_gain;
  if (!(gain >= 0 && gain <= 1)) {
    throw_invalid("min_gain_to_write is ", gain, ": expected 0 to 1 hits per block");
  }
  if (host_eviction == "learned") return;
  throw_invalid("min_gain_to_write is ", gain, ", and host_eviction is '", host_eviction,
                "': expected 'learned'");
}

void check_group(const GroupOptions& group, size_t number) {
  const PageTraits& traits = group.kind->rules().traits;
  checked_size("block_size", group.block_size, 1);
  if (!group.is_cached && traits.updates_in_place) {
    throw_invalid(
        "cached is False for a group of recurrent states: expected True, because its state would "
        "be missing after a hit in other groups; to cache nothing, set enable_caching=False");
  }
  if (group.drafts && !traits.appends) {
    throw_invalid("groups[", number,
                  "] has drafts=True, but its kind does not store K and V of tokens: expected a "
                  "drafter's layers in a group of another kind");
  }
}

}  // namespace

void check_optional(const ManagerOptions& options) {
  checked_size("hash_block_size", options.hash_block_size, 0);
  if (options.hash_bytes < 1 || options.hash_bytes > static_cast<int64_t>(sizeof(Hash))) {
    throw_invalid("hash_bytes is ", options.hash_bytes, ": expected 1 to 32");
  }
  if (options.retention_interval >= 0) {
    checked_size("retention_interval", options.retention_interval, 0);
  }
  checked_size("num_preallocate_tokens", options.num_preallocate_tokens, 0);
  checked_size("max_num_reqs", options.max_num_reqs, 0);
  checked_size("watermark_blocks", options.watermark_blocks, 0);
  checked_size("explain_misses", options.explain_misses, 0);
  check_host(options);
}

ManagerOptions checked(const ManagerOptions& options) {
  if (options.groups.empty() || options.groups.size() > kMaxGroups) {
    throw_invalid("groups has ", options.groups.size(), " entries: expected 1 to ", kMaxGroups);
  }
  ManagerOptions out = options;
  for (size_t g = 0; g < options.groups.size(); ++g) {
    const GroupOptions& group = options.groups[g];
    const PageTraits& traits = group.kind->rules().traits;
    check_group(group, g);
    // A group with a circular buffer overwrites its tokens, so its window would be missing after a
    // hit.
    if (group.is_cached && traits.follows_sequence && !traits.has_hits) out.enable_caching = false;
  }
  checked_size("num_gpu_blocks", options.num_blocks, 2, " (the null block is counted)");
  checked_size("max_model_len", options.max_model_len, 1);
  check_optional(options);
  return out;
}

int64_t hash_block_size_of(const ManagerOptions& options) {
  int64_t largest = 0;
  for (const GroupOptions& group : options.groups) {
    largest = std::gcd(largest, group.block_size);
  }
  if (options.hash_block_size == 0) return largest;
  if (largest % options.hash_block_size == 0) return options.hash_block_size;
  throw_invalid("hash_block_size is ", options.hash_block_size,
                ": expected a divisor of every group's block size, that is, of ", largest);
}

namespace {

// Returns the group without the fields that depend on all groups.
CacheGroup group_of(const GroupOptions& each, const ManagerOptions& options, size_t id,
                    int64_t hash_block_size) {
  CacheGroup group{};
  group.kind = each.kind;
  group.rules = &each.kind->rules();
  group.keeps_all = each.kind->keeps_all();
  group.is_cached = each.is_cached && group.rules->traits.has_hits;
  group.is_transferred = each.is_transferred;
  group.drafts = each.drafts;
  group.num_speculative = each.kind->num_speculative_blocks();
  group.has_partial =
      group.is_cached && options.hash_block_size > 0 && hash_block_size < each.block_size;
  if (options.engine_copies_states && group.num_speculative > 0) {
    group.rules = &kEngineStateRules;
    if (group.has_partial) {
      throw_invalid("hash_block_size is ", hash_block_size, ", and groups[", id,
                    "] has num_speculative_blocks: expected its block size, ", each.block_size,
                    ", because engine_copies_states is set");
    }
  }
  group.id = static_cast<uint8_t>(id);
  group.block_size = each.block_size;
  group.num_hashes = each.block_size / hash_block_size;
  group.max_blocks = ceil_div(options.max_model_len, each.block_size);
  group.num_places = kUnbounded;
  if (each.kind->buffer() > 0) {
    group.max_blocks = std::min(group.max_blocks, ceil_div(each.kind->buffer(), each.block_size));
    group.num_places = group.max_blocks * each.block_size;
  }
  group.num_prealloc = ceil_div(options.num_preallocate_tokens, each.block_size);
  return group;
}

// The number of tokens at whose multiples hits of all cached groups can end.
int64_t hit_unit_of(const std::vector<CacheGroup>& groups, int64_t hash_block_size) {
  int64_t unit = 1;
  for (const CacheGroup& group : groups) {
    if (!group.is_cached) continue;
    unit = checked_size("the least common multiple of the groups' block sizes",
                        std::lcm(unit, group.has_partial ? hash_block_size : group.block_size), 1);
  }
  return unit;
}

void check_retention(int64_t interval, const std::vector<CacheGroup>& groups, int64_t hit_unit) {
  if (interval < 0) return;
  const bool is_used = std::any_of(groups.begin(), groups.end(), [](const CacheGroup& group) {
    return group.is_cached && group.kind->is_retained_by_interval();
  });
  if (!is_used) {
    throw_invalid(
        "retention_interval is ", interval,
        ": expected None, because no cached group has sliding windows or recurrent states");
  }
  if (interval % hit_unit == 0) return;
  throw_invalid("retention_interval is ", interval, ": expected None, 0 or a multiple of ",
                hit_unit, ", where hits can end");
}

}  // namespace

std::vector<CacheGroup> groups_of(const ManagerOptions& options, int64_t hash_block_size) {
  std::vector<CacheGroup> groups;
  for (const GroupOptions& each : options.groups) {
    groups.push_back(group_of(each, options, groups.size(), hash_block_size));
  }
  const int64_t hit_unit = hit_unit_of(groups, hash_block_size);
  check_retention(options.retention_interval, groups, hit_unit);
  for (CacheGroup& group : groups) {
    const bool is_dense = options.retention_interval < 0 || !group.kind->is_retained_by_interval();
    group.hit_unit = hit_unit;
    group.retained_every = is_dense ? hit_unit : options.retention_interval;
  }
  return groups;
}

}  // namespace kvcache
