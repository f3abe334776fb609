// SPDX-License-Identifier: Apache-2.0
#include "core/groups/rules/encoder.h"

#include "core/groups/rules/effects.h"

namespace kvcache {

const BlockId* EncoderRules::grow(Growth* growth, ServedRow* served, const CacheGroup& group,
                                  const Take& take, const BlockId* own) const {
  RowBlocks& each = growth->held(served->row, group);
  each.blocks.insert(each.blocks.end(), own, own + take.num_new);
  return own + take.num_new;
}

}  // namespace kvcache
