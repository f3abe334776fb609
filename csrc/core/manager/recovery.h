// Reports are carried out: steps are done, or rows and caches go back to what is valid, after steps
// that came to nothing and after content that turned out to be invalid.
//
// Keeps no state of its own. Invariant: a row that recomputes keeps no token that is invalid, and
// no cache finds a block that was computed from one.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/manager/invalidation.h"
#include "core/manager/publisher.h"
#include "core/manager/row_context.h"
#include "core/manager/row_release.h"
#include "core/manager/row_server.h"
#include "core/manager/step_plan.h"

namespace kvcache {

class Recovery {
 public:
  struct Parts {
    int64_t hash_block_size;
    Publisher* publisher;
    RowRelease* release;
    RowServer* server;
  };
  Recovery(const RowContext& context, const Parts& parts) : c_(context), parts_(parts) {}

  // This step and all before it are done; or, where it is not completed, it and all behind it are
  // undone. The failed blocks and pages of the host are invalid.
  Recompute report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                   const std::vector<BlockId>& failed_on_host);

  // The content of these blocks and pages of the host is invalid: it leaves both caches with all
  // that was computed from it, and the rows that used it recompute.
  Recompute invalidate(const std::vector<BlockId>& blocks, const std::vector<BlockId>& pages);

  // A receiving row's tokens are there, so many at most: it goes on behind them.
  void receive(int32_t row, int64_t num_tokens);
  // The row releases its blocks, and goes on from what the device's cache has.
  void restart(int32_t row);

  // Forgets the hashes of both tiers.
  void clear_cache();
  // The same, and what rows hold by now is never published.
  void start_epoch();

 private:
  // Undoes the step and all behind it: each row goes back to where the first of them began, and
  // what they computed leaves the device's cache. Nothing where the step was aborted before.
  Recompute abort_from(int64_t step_id);
  void complete_to(int64_t step_id);
  InvalidationContext invalidation_context() const {
    return {c_.groups, parts_.hash_block_size, c_.pool, c_.host, c_.rows, c_.journal};
  }
  void undo(const StepJournal::Step& step, Invalidation* invalid);
  using Chains = std::unordered_map<int64_t, std::shared_ptr<TokenChain>>;  // by admission
  void add_published(const StepJournal::Published& published, const Chains& left,
                     Invalidation* invalid) const;
  Recompute recompute(const Invalidation::Limits& limits);

  RowContext c_;
  Parts parts_;
};

}  // namespace kvcache
