// SPDX-License-Identifier: Apache-2.0
// What callers can read of a manager. No call changes anything.
//
// Calls that name a row throw std::invalid_argument if it is not in use. Calls that use components
// of the manager throw if another thread uses it (see CallGuard); the others only if it is broken.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/errors.h"
#include "core/groups/cache_group.h"
#include "core/manager/cache_tiers.h"
#include "core/manager/call_guard.h"
#include "core/manager/miss_reasons.h"
#include "core/manager/options.h"
#include "core/manager/request_checks.h"
#include "core/manager/row_server.h"
#include "core/manager/row_swap.h"
#include "core/manager/row_table.h"
#include "core/manager/steps.h"

namespace kvcache {

class ManagerReads {
 public:
  struct Parts {
    const ManagerSetup* setup;
    const CallGuard* guard;
    const RowTable* rows;
    const Steps* steps;
    const CacheTiers* tiers;
    const RequestChecks* checks;
    const RowSwap* swap;
    const RowServer* server;
    const MissReasons* misses;  // null: off
  };
  explicit ManagerReads(const Parts& parts) : p_(parts) {}

  int64_t hash_block_size() const { return p_.setup->hash_block_size; }
  int64_t hash_bytes() const { return p_.setup->options.hash_bytes; }
  const std::vector<CacheGroup>& groups() const { return p_.setup->groups; }

  // Rows.
  int64_t num_rows() const { return sound().rows->num_in_use(); }
  const Row& row(int32_t row) const { return sound().rows->at(row); }
  int64_t num_external(int32_t row) const {  // number of external tokens of a receiving row
    return this->row(row).num_computed - p_.rows->info(row).num_hit;
  }
  const std::vector<BlockId>& blocks(int32_t row, int64_t group) const {
    owned().checks->check_on_device(row);
    p_.checks->check_group(group);
    return p_.rows->blocks(row)[group].blocks;
  }
  const std::vector<int64_t>& quiet_until() const { return owned().rows->quiet_until(); }
  // Whether the next plan sends the complete table of the row.
  bool must_resend(int32_t row) const {
    p_.rows->at(row);
    return p_.steps->plan().must_resend(row);
  }
  // Returns the number of distinct blocks with KV that these rows hold. All rows must be on the
  // same tier.
  int64_t num_unique_blocks(const std::vector<int32_t>& rows) const {
    for (int32_t row : rows) owned().rows->at(row);
    return owned().swap->num_unique_blocks(rows);
  }
  // See RowSwap. `num_slots`: one number per row, at least 0.
  RowSwap::BlocksBack num_blocks_back(const std::vector<int32_t>& rows,
                                      const std::vector<int64_t>& num_slots) const {
    owned().checks->check_swap(rows, /*on_host=*/true);
    return p_.swap->num_blocks_back(rows, num_slots);
  }
  // Returns how many leading blocks of the row in this group are held by exactly num_running rows.
  int64_t num_common_prefix_blocks(int32_t row, int64_t num_running, int64_t group) const {
    owned().checks->check_on_device(row);
    p_.checks->check_group(group);
    checked_size("num_running_requests", num_running, 1);
    return p_.server->num_common_prefix_blocks(row, num_running, group);
  }

  // Cached content. Sets out[i] to the group's oldest block published under hashes[i], or to -1 if
  // there is none. Searches the host tier if `on_host`, and the device otherwise.
  void find_hashes(const Hash* hashes, int64_t n, int64_t group, bool on_host, BlockId* out) const {
    owned().checks->check_group(group);
    const BlockPool* pool = on_host ? p_.tiers->host_pages() : &p_.tiers->pool();
    if (pool == nullptr) {
      std::fill(out, out + n, -1);
      return;
    }
    pool->lookup(hashes, n, static_cast<uint8_t>(group), /*prefix=*/false, out);
  }
  // The hash under which a block is published, with its group in `*group`; null if it is not
  // published.
  const Hash* hash_of(BlockId id, bool on_host, int32_t* group) const {
    if (on_host) owned().checks->check_has_host("medium is 'cpu'");
    const BlockPool& pool = on_host ? *p_.tiers->host_pages() : owned().tiers->pool();
    pool.check_id(id, "ids");
    const Hash* hash = pool.hash_of(id);
    *group = hash == nullptr ? -1 : pool.group_of(id);
    return hash;
  }

  // Steps and counts.
  const StepNumbers& steps() const { return sound().steps->numbers(); }
  int64_t num_fenced() const { return sound().tiers->frees().num_waiting(); }
  int64_t num_kept() const { return sound().tiers->frees().num_kept(); }
  int64_t num_loading() const {  // number of blocks being loaded from the host
    return sound().tiers->host() == nullptr ? 0 : p_.tiers->host()->num_onboards();
  }
  int64_t num_epochs() const { return p_.tiers->num_epochs(); }  // calls of Manager::start_epoch
  // Calls of Manager::report and Manager::invalidate that found content to be invalid.
  int64_t num_invalidations() const { return p_.tiers->num_invalidations(); }
  const TierCount& tiers() const { return p_.tiers->counts(); }
  const EventLog::Drained& events() const { return owned().tiers->events(); }  // not yet drained
  // Totals of missed tokens by reason; null without `ManagerOptions::explain_misses`.
  const MissReport::Counts* missed() const {
    return p_.misses == nullptr ? nullptr : &p_.misses->total();
  }

 private:
  const Parts& sound() const {
    p_.guard->check_sound();
    return p_;
  }
  const Parts& owned() const {
    p_.guard->check_reader();
    return p_;
  }

  Parts p_;
};

}  // namespace kvcache
