// SPDX-License-Identifier: Apache-2.0
#include "core/manager/manager_reads.h"

#include <algorithm>

#include "core/errors.h"

namespace kvcache {

const std::vector<BlockId>& ManagerReads::blocks(int32_t row, int64_t group) const {
  owned().checks->check_on_device(row);
  p_.checks->check_group(group);
  return p_.rows->blocks(row)[group].blocks;
}

int64_t ManagerReads::num_unique_blocks(const std::vector<int32_t>& rows) const {
  for (int32_t row : rows) owned().rows->at(row);
  return owned().swap->num_unique_blocks(rows);
}

RowSwap::BlocksBack ManagerReads::num_blocks_back(const std::vector<int32_t>& rows,
                                                  const std::vector<int64_t>& num_slots) const {
  owned().checks->check_swap(rows, /*on_host=*/true);
  return p_.swap->num_blocks_back(rows, num_slots);
}

int64_t ManagerReads::num_common_prefix_blocks(int32_t row, int64_t num_running,
                                               int64_t group) const {
  owned().checks->check_on_device(row);
  p_.checks->check_group(group);
  checked_size("num_running_requests", num_running, 1);
  return p_.server->num_common_prefix_blocks(row, num_running, group);
}

void ManagerReads::find_hashes(const Hash* hashes, int64_t n, int64_t group, bool on_host,
                               BlockId* out) const {
  owned().checks->check_group(group);
  const BlockPool* pool = on_host ? p_.tiers->host_pages() : &p_.tiers->pool();
  if (pool == nullptr) {
    std::fill(out, out + n, -1);
    return;
  }
  pool->lookup(hashes, n, static_cast<uint8_t>(group), /*prefix=*/false, out);
}

const Hash* ManagerReads::hash_of(BlockId id, bool on_host, int32_t* group) const {
  if (on_host) owned().checks->check_has_host("medium is 'cpu'");
  const BlockPool& pool = on_host ? *p_.tiers->host_pages() : owned().tiers->pool();
  pool.check_id(id, "ids");
  const Hash* hash = pool.hash_of(id);
  *group = hash == nullptr ? -1 : pool.group_of(id);
  return hash;
}

}  // namespace kvcache
