// SPDX-License-Identifier: Apache-2.0
// How page rules publish the blocks of a row. The manager implements it.
#pragma once

#include <cstdint>

#include "core/groups/cache_group.h"
#include "core/groups/row.h"
#include "core/groups/row_blocks.h"

namespace kvcache {

class Publishing {
 public:
  virtual const Row& row(int32_t row) const = 0;
  virtual const AdmissionInfo& info(int32_t row) const = 0;
  virtual RowBlocks& held(int32_t row, const CacheGroup& group) const = 0;
  // Whether a block is published under this hash of a part of a block.
  virtual bool has_part(const Hash& hash, const CacheGroup& group) const = 0;

  // Publishes the row's blocks, starting with first_block.
  virtual void publish_run(int32_t row, const CacheGroup& group, int64_t first_block,
                           const BlockId* ids, int64_t n) = 0;
  // Publishes the part of a block that ends with this hash block of the row.
  virtual void publish_part(int32_t row, const CacheGroup& group, int64_t block, int64_t hash) = 0;
  // Must be called after a change that affects the next blocks of the row (see RowTable).
  virtual void disturb(int32_t row) = 0;

 protected:
  ~Publishing() = default;
};

}  // namespace kvcache
