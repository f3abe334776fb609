// Cached blocks on the host: offloaded from the device, onboarded for those that hit them.
//
// The host has a pool of pages of its own. A plan that offloads a block writes it to a page, which
// is found by later plans; a plan that onboards a page reads it into a block of the device, until a
// report says that it has arrived.
// Invariant: a page that a plan reads, and the block that it is read into, are held until then, so
// that neither is reused.
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
#include "core/manager/step_fills.h"
#include "core/pool/block_pool.h"
#include "core/pool/eviction_listener.h"
#include "core/pool/per_block.h"
#include "core/secret_key.h"

namespace kvcache {

struct HostWrites {
  HostWrite mode = HostWrite::kBack;
  int64_t num_hits = 2;    // kSelective
  double min_gain = 0.05;  // kLearned
};

class HostTier : public EvictionListener {
 public:
  struct Onboard {  // of a page, until a report says that it has arrived
    int64_t step_id;
    BlockId page, block;  // one reference each
    int64_t column;       // block of the sequence
    uint8_t group;
    std::shared_ptr<TokenChain> chain;  // of a hit: the block is found once it has arrived
  };

  struct Context {
    BlockPool* device;
    const std::vector<CacheGroup>* groups;
    PlanBuilder* plan;  // which offloads and onboards go into
  };
  // To be made the listener of the device's pool.
  HostTier(std::unique_ptr<BlockPool> pages, const Context& context, const HostWrites& writes);

  BlockPool& pages() { return *pages_; }
  const BlockPool& pages() const { return *pages_; }
  const TierCount& counts() const { return counts_; }
  TierCount* mutable_counts() { return &counts_; }

  // Events of the device's pool: blocks were published or hit, or are, within a step, about to be
  // taken for other content. As the mode has it, they are offloaded, by this plan or a later one.
  void on_published(const BlockId* ids, int64_t n);
  void on_hit(const BlockId* ids, int64_t n) {
    if (!num_hits_.empty()) count_hits(ids, n);
  }
  void on_eviction(BlockId id) override;

  // Offloads the first n blocks of those that became cached, or were hit often enough, in steps
  // before; not what was forgotten since, and not yet what this step fills. With `holds_blocks` the
  // plan holds them, as nothing else protects what it reads.
  size_t num_queued() const { return queue_.size(); }
  void offload_queued(size_t n, bool holds_blocks, const StepFills& fills = {});
  // Forgets every hash, and what is queued.
  void clear();

  // A page of a swapped row holds what this cached block does: it is found there, too.
  void add_row_page(BlockId page, BlockId block);

  // Makes findable what this step writes. Until now the pages were held: nothing else of the step
  // could take them. The pages that are new under their hash.
  std::vector<BlockId> publish_offloaded();

  // The plan reads a page into a block. Takes over one reference of the page, and adds one to the
  // block.
  void onboard(Onboard onboard);

  // Onboards that have arrived, as their steps are below num_completed; or that never will, as
  // their steps came behind the last one issued. Oldest first; to be handed to `finish`.
  std::vector<Onboard> take_arrived(int64_t num_completed);
  std::vector<Onboard> take_aborted(int64_t last_issued);
  // Whether the page still holds what it was onboarded for, and the block may be published.
  bool may_publish(const Onboard& onboard) const;
  void note_loaded(const Onboard& onboard);  // it has arrived, and its block was published
  // Releases blocks and pages, tails before heads.
  void finish(const std::vector<Onboard>& over);

  const std::deque<Onboard>& onboards() const { return onboards_; }  // under way
  int64_t num_onboards() const { return static_cast<int64_t>(onboards_.size()); }
  int32_t num_onboards_into(BlockId block) const { return num_onboards_[block]; }

  // Adds what onboards hold to the references, of the device and of the host. Throws
  // std::logic_error where their count differs, or a step has left something behind.
  void check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const;

 private:
  struct Offload {
    BlockId page;
    Copied content;
    bool is_row;    // a row's page: it stays held
    bool is_there;  // written before, and found there when the block was evicted again
  };

  Copied content_of(BlockId id) const;
  bool offload(BlockId id);
  void add_offload(BlockId page, const Copied& content, bool is_row);
  void queue(BlockId id);
  void count_hits(const BlockId* ids, int64_t n);

  std::unique_ptr<BlockPool> pages_;
  BlockPool* device_;
  const std::vector<CacheGroup>* groups_;
  PlanBuilder* plan_;
  HostWrites writes_;
  TierCount counts_;
  std::vector<BlockId> queue_;  // cached blocks that the next step offloads
  PerBlock<uint8_t> is_queued_;
  PerBlock<int32_t> num_hits_;     // kSelective: of cached blocks; else empty
  std::vector<Offload> offloads_;  // of the step that is being made
  std::unordered_map<Hash, uint32_t, HashOf> offloading_;  // the same; bit g is group g
  std::deque<Onboard> onboards_;
  PerBlock<int32_t> num_onboards_;  // references that onboards hold
};

}  // namespace kvcache
