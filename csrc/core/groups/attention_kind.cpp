// SPDX-License-Identifier: Apache-2.0
#include "core/groups/attention_kind.h"

#include "core/groups/rules/tokens.h"

namespace kvcache {

const PageRules& AttentionKind::rules() const { return kTokenRules; }

}  // namespace kvcache
