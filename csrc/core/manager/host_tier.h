// SPDX-License-Identifier: Apache-2.0
// Manages cached blocks on the host, which are offloaded from the device and onboarded when
// requests hit them.
//
// A plan that offloads a block writes it to a host page, which later plans can find. A plan that
// onboards a page loads it into a device block, which arrives when the step is reported as done.
// Invariant: the page and the block are held until then, so that neither of them is reused.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/errors.h"
#include "core/eviction/learned.h"
#include "core/eviction/learned_copies.h"
#include "core/groups/cache_group.h"
#include "core/hashing/token_chain.h"
#include "core/manager/cache_stats.h"
#include "core/manager/options.h"
#include "core/manager/plan_builder.h"
#include "core/pool/block_pool.h"
#include "core/pool/per_block.h"
#include "core/secret_key.h"

namespace kvcache {

class HostTier : public BlockListener {
 public:
  struct Onboard {  // a load of a host page that has not arrived
    int64_t step_id;
    BlockId page, block;  // one reference to each is held
    int64_t column;       // index of the block in the sequence
    uint8_t group;
    std::shared_ptr<TokenChain> chain;  // of a hit, which is published on arrival; otherwise null
  };

  struct Context {
    BlockPool* device;
    const std::vector<CacheGroup>* groups;
    PlanBuilder* plan;  // receives the offloads and onboards
  };
  // The object must be added to the device pool as a listener.
  HostTier(std::unique_ptr<BlockPool> pages, const Context& context, const HostWrites& writes)
      : pages_(std::move(pages)),
        device_(context.device),
        learned_(dynamic_cast<const Learned*>(device_->order())),
        learned_copies_(dynamic_cast<LearnedCopies*>(pages_->order())),
        groups_(context.groups),
        plan_(context.plan),
        writes_(writes),
        is_queued_(device_->num_blocks()),
        num_onboards_(device_->num_blocks()) {}

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
  void on_forget(const Forgotten& forgotten) override {
    // Outside of steps, no plan can contain the write.
    if (forgotten.why != Forgotten::Why::kEvicted || !plan_->is_step()) return;
    for (int64_t i = 0; i < forgotten.n; ++i) {
      if (forgotten.is_last(i)) offload(forgotten.ids[i]);
    }
  }

  // Number of blocks that earlier steps published and that wait to be offloaded.
  size_t num_queued() const { return queue_.size(); }
  // Offloads the first n queued blocks. Blocks without a hash are skipped. Blocks that this step
  // fills stay queued. With `holds_blocks`, the plan holds the offloaded blocks, because nothing
  // else prevents their reuse while they are read.
  void offload_queued(size_t n, bool holds_blocks) {
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(n);
    const std::vector<BlockId> first(queue_.begin(), end);
    queue_.erase(queue_.begin(), end);
    for (auto next = first.rbegin(); next != first.rend(); ++next) {
      const BlockId id = *next;  // tails first, so that the host evicts them first
      is_queued_[id] = 0;
      if (device_->hash_of(id) == nullptr || !offload(id) || !holds_blocks) continue;
      device_->retain(&id, 1);
      plan_->hold(id);
    }
  }
  // Removes the hashes of all pages, and all queued blocks.
  void clear() {
    pages_->clear();
    for (BlockId id : queue_) is_queued_[id] = 0;
    queue_.clear();
  }

  // Publishes this page of a swapped-out row, because it contains a copy of a cached block.
  void add_row_page(BlockId page, BlockId block) {
    note_copy(page, block);
    add_offload(page, content_of(block), /*is_row=*/true);
  }

  // Publishes the pages that this step writes. The pages are held until then, so that no other
  // write of the step can use them. Returns the written pages.
  std::vector<BlockId> publish_offloaded() {
    std::vector<BlockId> written;
    for (const Offload& each : offloads_) {
      if (each.is_there) {
        if (pages_->hash_of(each.page) != nullptr) {
          pages_->notify_copied_again(each.page, each.content);
        }
      } else {
        pages_->publish_copy(each.page, each.content);
        written.push_back(each.page);
      }
      if (!each.is_row) pages_->release(&each.page, 1);
    }
    offloads_.clear();
    offloading_.clear();
    return written;
  }

  // Adds the load to the plan. Takes over one reference to the page and adds a reference to the
  // block.
  void onboard(Onboard onboard) {
    plan_->swap_in(onboard.page, onboard.block);
    device_->retain(&onboard.block, 1);
    ++num_onboards_[onboard.block];
    onboards_.push_back(std::move(onboard));
  }

  // Remove and return onboards, oldest first: those of completed steps (below num_completed), which
  // have arrived, or those of aborted steps (after last_issued). Pass the result to `finish`.
  std::vector<Onboard> take_arrived(int64_t num_completed) {
    std::vector<Onboard> over;
    while (!onboards_.empty() && onboards_.front().step_id < num_completed) {
      over.push_back(std::move(onboards_.front()));
      onboards_.pop_front();
    }
    return over;
  }
  std::vector<Onboard> take_aborted(int64_t last_issued) {
    std::vector<Onboard> over;
    while (!onboards_.empty() && onboards_.back().step_id > last_issued) {
      over.push_back(std::move(onboards_.back()));
      onboards_.pop_back();
    }
    std::reverse(over.begin(), over.end());
    return over;
  }
  // Whether the page still has the content for which it was onboarded, and the block can be
  // published.
  bool may_publish(const Onboard& onboard) const {
    if (onboard.chain == nullptr) return false;
    const int64_t last = (*groups_)[onboard.group].hash_index(onboard.column);
    const Hash& hash = onboard.chain->known_hash(last);
    return pages_->holds(onboard.page, hash, onboard.group) &&
           device_->hash_of(onboard.block) == nullptr;
  }
  // Called after the block has arrived and was published.
  void note_loaded(const Onboard& onboard) {
    // With a minimum gain, the policy is not notified: evicting loaded pages first would gain hits,
    // but keeping them avoids writing them again.
    if (!writes_.min_gain) pages_->notify(Hit{{&onboard.page, 1}, Hit::By::kOtherTier});
  }
  // Releases the blocks and pages of these onboards, tails before heads.
  void finish(const std::vector<Onboard>& over) {
    std::vector<BlockId> blocks, pages;
    for (auto each = over.rbegin(); each != over.rend(); ++each) {
      --num_onboards_[each->block];
      blocks.push_back(each->block);
      pages.push_back(each->page);
    }
    device_->release(blocks.data(), static_cast<int64_t>(blocks.size()));
    pages_->release(pages.data(), static_cast<int64_t>(pages.size()));
  }

  const std::deque<Onboard>& onboards() const { return onboards_; }  // onboards in flight
  int64_t num_onboards() const { return static_cast<int64_t>(onboards_.size()); }
  int32_t num_onboards_into(BlockId block) const { return num_onboards_[block]; }

  // Adds the references held by onboards on the device and on the host. Throws std::logic_error if
  // the counts are wrong or if offloads of a step remain.
  void check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const {
    PerBlock<int32_t> counted(device_->num_blocks());
    for (const Onboard& each : onboards_) {
      ++(*device)[each.block];
      ++(*host)[each.page];
      ++counted[each.block];
    }
    for (BlockId id = 1; id < device_->num_blocks(); ++id) {
      require(counted[id] == num_onboards_[id], "the count of blocks held by onboards is wrong");
    }
    require(offloads_.empty() && offloading_.empty(), "a step has left offloads unpublished");
  }

 private:
  struct Offload {
    BlockId page;
    Copied content;
    bool is_row;    // a page of a row, which remains held
    bool is_there;  // the page already existed when the block was evicted again
  };

  Copied content_of(BlockId id) const {
    return device_->copied(id, (*groups_)[device_->group_of(id)].keeps_all);
  }
  // The held page contains a copy of the block, or will contain one.
  void note_copy(BlockId page, BlockId block) {
    if (learned_copies_ != nullptr) learned_copies_->copy(page, learned_->segment_of(block));
  }
  double gain_of(BlockId id) const {
    if (learned_copies_ == nullptr) return 1;
    return learned_copies_->gain_of_copy(learned_->segment_of(id),
                                         /*evicts=*/!pages_->has_uncached());
  }
  // Writes this cached block to the host. Returns whether the plan contains the write.
  bool offload(BlockId id) {
    const Copied content = content_of(id);
    BlockId page = pages_->find(content.hash, content.group);
    if (page != kNullBlock) {
      pages_->retain(&page, 1);  // until the pages that this plan writes are published
      note_copy(page, id);
      offloads_.push_back({page, content, /*is_row=*/false, /*is_there=*/true});
      return false;
    }
    const auto groups = offloading_.find(content.hash);
    const bool is_offloading =
        groups != offloading_.end() && (groups->second >> content.group & 1) != 0;
    if (is_offloading) return false;
    if (writes_.min_gain && gain_of(id) < *writes_.min_gain) {
      ++counts_.declined_blocks;
      return false;
    }
    if (!pages_->allocate(1, &page)) {
      ++counts_.unwritten_blocks;
      return false;
    }
    plan_->swap_out(id, page);
    note_copy(page, id);
    add_offload(page, content, /*is_row=*/false);
    ++counts_.written_blocks;
    return true;
  }
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
