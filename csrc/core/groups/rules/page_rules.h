// SPDX-License-Identifier: Apache-2.0
// The rules for a group's pages: how rows allocate, write, share and release pages with one kind of
// content.
//
// Each kind of content has one file with one stateless object. All differences between kinds of
// content are methods or traits of this class. The default methods apply to pages that store the
// tokens of the sequence, block by block. The components that serve, publish and
// release rows call the rules. Rules change rows through `Growth` and `Publishing`.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/errors.h"
#include "core/groups/cache_group.h"
#include "core/groups/row.h"
#include "core/groups/row_blocks.h"
#include "core/groups/shared_blocks.h"
#include "core/hashing/token_chain.h"

namespace kvcache {

class Growth;
class Publishing;
struct ServedRow;

// Properties of a kind of content that do not depend on a row.
struct PageTraits {
  bool follows_sequence;  // blocks grow with the sequence; otherwise admission allocates them
  bool has_hits;          // blocks can be prefix hits
  bool appends;  // block b stores the tokens that start at b * block_size, each written once
  bool updates_in_place;  // a page stores a summary of all tokens up to the end of a step
};

// The tokens [start, stop) for which slots are allocated, followed by `lookahead` slots for drafts.
struct Span {
  int64_t start, stop, lookahead;
  // For states: tokens at the end that may be rejected, and accepted drafts of the previous step.
  int64_t num_drafts = 0, num_accepted = 0;
  // Tokens before `start` that may still be rejected, so that the step may begin earlier.
  int64_t num_undecided = 0;

  int64_t first_start() const { return start - num_undecided; }
};

struct GroupDemand {
  int64_t num_new;      // blocks to add after the held blocks
  int64_t drop_to;      // blocks below this column are dropped
  int64_t num_shared;   // shared blocks that the row writes and therefore replaces with its own
  int64_t num_skipped;  // columns after the held blocks that stay null
  // Blocks at the end to release, because the row lacks blocks in other groups.
  int64_t num_surplus;
  bool moves;  // for states: the state continues in a new page

  // Whether the rules change these blocks when the row is served.
  bool changes(const RowBlocks& held) const {
    return num_new + num_shared + num_skipped > 0 || drop_to > held.num_dropped || held.keeps_state;
  }
};

// The state that is read to compute demands.
struct DemandBasis {
  const BlockPool* pool;
  const SharedBlocks* holders;
  bool frees_at_once;  // dropped blocks are free immediately, because no step can still read them
};

// The tokens and conditions for which a row's demand is computed. `skip_for`: the first token of a
// new row. Blocks before the first block that this token reads stay null.
struct DemandFor {
  Span span;
  int64_t skip_for;
  bool may_share;  // other rows may hold blocks that this row writes
  bool gives_up;   // the row uses as few blocks as possible
};

class PageRules {
 public:
  constexpr explicit PageRules(const PageTraits& of) : traits(of) {}

  // Blocks to allocate at admission, regardless of the number of computed tokens.
  virtual int64_t num_upfront(const CacheGroup&, const TokenChain&) const { return 0; }

  // Adds to `needs` the blocks that a running or new row needs, and to `num_free` the number of
  // blocks that it drops.
  virtual void demand(const DemandBasis& on, const CacheGroup& group, const RowBlocks& held,
                      const DemandFor& asked, GroupDemand* needs, int64_t* num_free) const = 0;

  // The demand of a row that releases all blocks it can, because it lacks blocks in other groups.
  struct LeastDemand {
    int64_t num_surplus;  // released blocks at the end, which contain no slot of the span
    int64_t num_freed;    // number of released blocks that become free
    int64_t num_blocks;   // blocks that the row holds afterwards, none of them shared
  };
  virtual LeastDemand least_demand(const DemandBasis&, const CacheGroup&, const RowBlocks& held,
                                   const Span&, const GroupDemand& needs) const {
    return {0, 0, held.size() - needs.drop_to + needs.num_new};
  }

  // The demand of one chunk of a prompt. `first` is the prompt's first chunk, and `held` is the hit
  // with which the row starts.
  struct ChunkDemand {
    int64_t num_held;     // blocks of the row after the chunk
    int64_t num_new;      // number of these blocks that are not from the hit
    int64_t num_dropped;  // leading blocks of the hit that the row has dropped after the chunk
  };
  virtual ChunkDemand chunk_demand(const CacheGroup& group, const RowBlocks& held,
                                   const Span& first, const Span& span) const = 0;

  // Whether other rows hold a block in which the row may write token `start` or later tokens.
  virtual bool shares_from(const SharedBlocks& holders, const CacheGroup& group,
                           const RowBlocks& held, int64_t start) const = 0;

  // Returns the number of tokens, including lookahead, up to which a row can be served without
  // changing these blocks, or 0 if unknown. The row continues after num_computed tokens and shares
  // no block.
  virtual int64_t quiet_until(const CacheGroup&, const RowBlocks&, int64_t num_computed) const = 0;

  // Called if a new row continues at the end of a hit whose last block is this host page.
  virtual void take_host_page(RowBlocks*, BlockId /*page*/) const {}

  // The new blocks to allocate to a row, which cover at least its demand.
  struct Take {
    int64_t num_new, num_shared;
    bool moves;  // for states
  };
  // Drops the blocks that a served row no longer needs. Blocks to preallocate beyond the demand are
  // subtracted from `num_spare`.
  virtual Take prepare(Growth*, const ServedRow&, const CacheGroup&, const GroupDemand& needs,
                       int64_t* /*num_spare*/) const {
    return {needs.num_new, needs.num_shared, needs.moves};
  }
  // Adds the blocks `own` to the row; returns the first block that was not used.
  virtual const BlockId* grow(Growth* growth, ServedRow* served, const CacheGroup& group,
                              const Take& take, const BlockId* own) const = 0;
  // Called before the row releases its surplus blocks.
  virtual void give_up(Growth*, ServedRow*, const CacheGroup&, const GroupDemand&) const {}

  // The column of the block in which the first token of the span is written.
  virtual int64_t first_written(const CacheGroup& group, const Span& span) const {
    return span.start / group.block_size;
  }
  // Accepts the drafts of the row's last step up to span.start.
  virtual void accept_drafts(Growth*, int32_t /*row*/, const CacheGroup&, const Span&) const {}
  // Removes the blocks that a fork does not share from its copy of the parent's blocks.
  virtual void fork(RowBlocks*) const {}

  // Returns the first token that depends on the block in this column. If the block's content is
  // invalid, this token and all later ones are invalid.
  virtual int64_t first_token(const CacheGroup& group, const RowBlocks&, int64_t /*num_computed*/,
                              int64_t column) const {
    return column * group.block_size;
  }

  // Returns the number of blocks that contain KV, including dropped blocks. All remaining blocks
  // are for lookahead.
  virtual int64_t num_written(const CacheGroup& group, const RowBlocks& held,
                              int64_t num_computed) const {
    return std::min(held.size(), ceil_div(num_computed, group.block_size));
  }

  // Returns the columns below num_written that contain computed tokens. Pages for drafts are
  // excluded.
  struct Columns {
    int64_t first, stop;
  };
  virtual Columns computed(const RowBlocks& held, int64_t num_written, int64_t /*drafts*/) const {
    return {held.num_dropped, num_written};
  }

  // The number of tokens with slots in these blocks, or kMaxSize if the blocks set no limit.
  virtual int64_t num_slots(const CacheGroup&, const RowBlocks&) const { return kMaxSize; }

  // Whether the row holds all blocks that it needs to recompute the token at `num_tokens`: the
  // blocks that the token reads, and the block to which its KV is written.
  virtual bool can_resume(const CacheGroup& group, const RowBlocks& held, const AdmissionInfo& info,
                          int64_t num_tokens) const = 0;
  // Returns how many of its first `limit` tokens, all of which are valid, a row can keep.
  virtual int64_t resume_point(const CacheGroup&, const RowBlocks&, int64_t limit) const {
    return limit;
  }
  // first_computed returns the first block that contains a token that the row computed after its
  // first `limit` tokens. num_valid returns the number of leading tokens up to which a block stays
  // valid.
  virtual int64_t first_computed(const CacheGroup& group, const RowBlocks& held,
                                 int64_t limit) const {
    return std::max<int64_t>(held.num_hits, limit / group.block_size);
  }
  virtual int64_t num_valid(const CacheGroup& group, int64_t block, int64_t limit) const {
    return std::max(limit, block * group.block_size);
  }

  // Publishes the blocks within the first num_hashed hash blocks that have been filled since the
  // last call. Called for cached groups only.
  virtual void publish(Publishing*, int32_t /*row*/, const CacheGroup&,
                       int64_t /*num_hashed*/) const {}
  // Publishes a page that the row leaves. The page contains the state after num_tokens tokens.
  virtual void publish_left(Publishing*, int32_t /*row*/, const CacheGroup&, int64_t /*num_tokens*/,
                            BlockId) const {}
  // Whether a partly filled block that ends at a hash boundary may be published.
  virtual bool publishes_part(const AdmissionInfo&, int64_t /*num_tokens*/) const { return true; }

  // Removes the blocks that do not move to the host. Called before the row's other blocks move.
  // Returns the removed blocks that contain computed tokens.
  virtual std::vector<BlockId> leave_device(const Row&, const CacheGroup&, RowBlocks*) const {
    return {};
  }
  // The host pages, starting at column `first`, that a swapped-out row needs for the span.
  // is_onboarded: whether each of these pages is loaded into a separate block.
  struct Returning {
    int64_t first;
    bool is_onboarded;
  };
  virtual Returning returning(const CacheGroup&, const RowBlocks& held, const Span&) const {
    return {held.num_dropped, true};
  }
  // Whether a row that returns from the host and continues at token `start` may share the block in
  // this column with a row that has just loaded it. By default, true if the row does not write the
  // block next.
  virtual bool may_share_onboard(const CacheGroup& group, int64_t column, int64_t start) const {
    return (column + 1) * group.block_size <= start;
  }

  const PageTraits traits;

 protected:
  ~PageRules() = default;
};

// The number of drafts per step that every group of states can reject; 0 without such groups.
inline int64_t max_drafts(const std::vector<CacheGroup>& groups) {
  int64_t most = -1;
  for (const CacheGroup& group : groups) {
    if (!group.rules->traits.updates_in_place) continue;
    most = most < 0 ? group.num_speculative : std::min(most, group.num_speculative);
  }
  return std::max<int64_t>(most, 0);
}

// Whether any group limits the number of tokens for which a row has slots at one time.
inline bool has_bound(const std::vector<CacheGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const CacheGroup& group) { return group.num_places != kUnbounded; });
}

// Whether any group's pages are updated in place.
inline bool has_states(const std::vector<CacheGroup>& groups) {
  return std::any_of(groups.begin(), groups.end(),
                     [](const CacheGroup& group) { return group.rules->traits.updates_in_place; });
}

}  // namespace kvcache
