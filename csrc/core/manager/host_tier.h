// SPDX-License-Identifier: Apache-2.0
// Manages cached blocks on the host, which are offloaded from the device and onboarded when
// requests hit them.
//
// The host has its own pool of pages. A plan that offloads a block writes it to a page, which later
// plans can find. A plan that onboards a page loads it into a device block. The block arrives when
// the step is reported as done. Invariant: a page that a plan loads, and its destination block, are
// held until the block arrives, so that neither of them is reused.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/cache_stats.h"
#include "core/manager/options.h"
#include "core/manager/plan_builder.h"
#include "core/pool/block_pool.h"
#include "core/pool/per_block.h"
#include "core/secret_key.h"

namespace kvcache {

class Learned;
class LearnedCopies;

class HostTier : public BlockListener {
 public:
  struct Onboard {  // a load of a host page that has not arrived
    int64_t step_id;
    BlockId page, block;  // one reference to each is held
    int64_t column;       // index of the block in the sequence
    uint8_t group;
    std::shared_ptr<TokenChain>
        chain;  // for a hit, the block is published on arrival; otherwise null
  };

  struct Context {
    BlockPool* device;
    const std::vector<CacheGroup>* groups;
    PlanBuilder* plan;  // receives the offloads and onboards
  };
  // The object must be added to the device pool as a listener.
  HostTier(std::unique_ptr<BlockPool> pages, const Context& context, const HostWrites& writes);

  BlockPool& pages() { return *pages_; }
  const BlockPool& pages() const { return *pages_; }
  const TierCount& counts() const { return counts_; }
  TierCount* mutable_counts() { return &counts_; }

  // With write-through, published blocks are offloaded by a later plan.
  void on_publish(const Published& published) override {
    if (!writes_.is_through || published.content == nullptr) return;
    for (const BlockId id : published) queue(id);
  }
  // Blocks that a step evicts are offloaded by its plan.
  void on_forget(const Forgotten& forgotten) override;

  // Number of blocks that earlier steps published and that wait to be offloaded.
  size_t num_queued() const { return queue_.size(); }
  // Offloads the first n queued blocks. Blocks without a hash are skipped. Blocks that this step
  // fills stay queued. With `holds_blocks`, the plan holds the offloaded blocks, because nothing
  // else prevents their reuse while they are read.
  void offload_queued(size_t n, bool holds_blocks);
  // Removes the hashes of all pages, and all queued blocks.
  void clear() {
    pages_->clear();
    for (BlockId id : queue_) is_queued_[id] = 0;
    queue_.clear();
  }

  // Publishes this page of a swapped-out row, because it contains a copy of a cached block.
  void add_row_page(BlockId page, BlockId block) {
    add_offload(page, content_of(block), /*is_row=*/true);
  }

  // Publishes the pages that this step writes. The pages are held until then, so that no other
  // write of the step can use them. Returns the written pages.
  std::vector<BlockId> publish_offloaded();

  // Adds the load to the plan. Takes over one reference to the page and adds a reference to the
  // block.
  void onboard(Onboard onboard);

  // Remove and return onboards, oldest first: those of completed steps (below num_completed), which
  // have arrived, or those of aborted steps (after last_issued). Pass the result to `finish`.
  std::vector<Onboard> take_arrived(int64_t num_completed);
  std::vector<Onboard> take_aborted(int64_t last_issued);
  // Whether the page still has the content for which it was onboarded, and the block can be
  // published.
  bool may_publish(const Onboard& onboard) const;
  // Called after the block has arrived and was published.
  void note_loaded(const Onboard& onboard) {
    // With a minimum gain, the policy is not notified: evicting loaded pages first would gain hits,
    // but keeping them avoids writing them again.
    if (!writes_.min_gain) pages_->notify(Hit{{&onboard.page, 1}, Hit::By::kOtherTier});
  }
  // Releases the blocks and pages of these onboards, tails before heads.
  void finish(const std::vector<Onboard>& over);

  const std::deque<Onboard>& onboards() const { return onboards_; }  // onboards in flight
  int64_t num_onboards() const { return static_cast<int64_t>(onboards_.size()); }
  int32_t num_onboards_into(BlockId block) const { return num_onboards_[block]; }

  // Adds the references held by onboards on the device and on the host. Throws std::logic_error if
  // the counts are wrong or if offloads of a step remain.
  void check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const;

 private:
  struct Offload {
    BlockId page;
    Copied content;
    bool is_row;    // a page of a row, which remains held
    bool is_there;  // the page already existed when the block was evicted again
  };

  Copied content_of(BlockId id) const;
  double gain_of(BlockId id) const;
  bool offload(BlockId id);
  void add_offload(BlockId page, const Copied& content, bool is_row) {
    offloads_.push_back({page, content, is_row, /*is_there=*/false});
    offloading_[content.hash] |= uint32_t{1} << content.group;
  }
  void queue(BlockId id) {
    if (is_queued_[id] != 0) return;
    is_queued_[id] = 1;
    queue_.push_back(id);
  }

  std::unique_ptr<BlockPool> pages_;
  BlockPool* device_;
  const Learned* learned_;         // the device's policy; null: another
  LearnedCopies* learned_copies_;  // the policy of the pages; null: another
  const std::vector<CacheGroup>* groups_;
  PlanBuilder* plan_;
  HostWrites writes_;
  TierCount counts_;
  std::vector<BlockId> queue_;  // cached blocks that the next step offloads
  PerBlock<uint8_t> is_queued_;
  std::vector<Offload> offloads_;  // offloads of the current step
  // Maps each hash in offloads_ to its groups, as a bit mask.
  std::unordered_map<Hash, uint32_t, HashOf> offloading_;
  std::deque<Onboard> onboards_;
  PerBlock<int32_t> num_onboards_;  // references held by onboards
};

}  // namespace kvcache
