// The block pool: which block is free, held, cached, and under which hash.
//
// Arrays in, arrays out: every method serves a whole batch, and either serves it whole or throws /
// says no with nothing changed. Where memory runs out for a policy, an event or a partial hash in
// the midst of a change, the pool is broken (soundness.h). Knows block ids and 32-byte hashes; no
// requests, no tokens, no bytes of KV. Plain C++17: no torch, no CUDA, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/eviction/eviction_policy.h"
#include "core/eviction/pins.h"
#include "core/hash.h"
#include "core/pool/block.h"
#include "core/pool/candidates.h"
#include "core/pool/content.h"
#include "core/pool/event_log.h"
#include "core/pool/eviction_listener.h"
#include "core/pool/free_list.h"
#include "core/pool/hash_index.h"
#include "core/pool/partial_index.h"
#include "core/pool/residency.h"
#include "core/pool/variants.h"
#include "core/secret_key.h"
#include "core/soundness.h"
#include "core/zeroed_array.h"

namespace kvcache {

// Invalid content by the tags of its hashes, and the roots of its chains by short ones.
struct InvalidChains {
  std::unordered_set<uint64_t> hashes;
  std::unordered_set<uint32_t> roots;
};

class BlockPool {
 public:
  // `num_blocks` counts the null block. Memory is zero pages until a block is first used. Without a
  // policy the least recently released goes first.
  explicit BlockPool(int64_t num_blocks, std::unique_ptr<EvictionPolicy> policy = nullptr);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_total() const { return num_blocks_ - 1; }  // the null block never counts
  int64_t num_free() const { return num_free_; }
  int64_t num_cached() const { return num_cached_; }
  int64_t num_evicted() const { return num_evicted_; }  // cached blocks taken for other content
  int64_t peak_used() const { return peak_used_; }
  size_t num_bytes() const;

  bool is_cached(BlockId id) const { return is_cached(at(id, "id")); }
  int32_t ref_count(BlockId id) const { return at(id, "id").ref_count; }
  // Whether a lookup of this hash may answer this block. Any id may be asked.
  bool holds(BlockId id, const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    return id > kNullBlock && id < num_blocks_ && is_indexed(blocks_[id]) &&
           blocks_[id].group == group && blocks_[id].hash == hash && is_variant(id, variant);
  }
  // Whether a cached block's content is of this variant; 0: of any.
  bool is_variant(BlockId id, uint64_t variant) const {
    return variant == 0 || variants_.of(id) == variant;
  }
  uint64_t variant_of(BlockId id) const { return variants_.of(id); }

  // The hash that the block is published under; null where it is not. Any id of the pool may be
  // asked.
  const Hash* hash_of(BlockId id) const {
    return is_indexed(blocks_[id]) ? &blocks_[id].hash : nullptr;
  }
  // Throws std::invalid_argument that names `what` where the id is none of the pool.
  void check_id(BlockId id, const char* what) const { (void)at(id, what); }
  // Another number whenever the block is handed out anew (of 256, so for a while).
  uint8_t generation(BlockId id) const { return blocks_[id].generation; }
  // The group of a cached block's content, and the hashes of what it holds partially.
  uint8_t group_of(BlockId id) const { return blocks_[id].group; }
  std::vector<Hash> partial_hashes_of(BlockId id) const { return partial_.of(id); }
  // Cached blocks of a group that were taken for other content.
  int64_t num_evicted_of(uint8_t group) const {
    return group < evicted_by_group_.size() ? evicted_by_group_[group] : 0;
  }

  // n blocks with one reference each into `out`; false, and nothing changed, when fewer are free.
  // Uncached blocks first, least recently released first; then cached ones (evicted: they lose
  // their hash), as the policy says; where it has no candidate, parents of held blocks, least
  // recently released first; then pinned ones, least recently released first.
  bool allocate(int64_t n, BlockId* out);

  // One more reference each; the block must be held, or free and cached (a hit). An id may repeat.
  void retain(const BlockId* ids, int64_t n);

  // One reference less each, in the order given (which is the order of eviction). Content and hash
  // stay until the block is taken. Throws on a block that is not held, with nothing changed.
  void release(const BlockId* ids, int64_t n);

  // Makes held blocks that are not yet, findable under their hashes for `group`. Two blocks may
  // share a hash.
  void publish(const BlockId* ids, const Content& content, int64_t n, uint8_t group);

  // Says again, in events, that blocks with this content are cached, because a request hits them.
  void announce(const Content& content, int64_t n, uint8_t group);

  // As `publish` for one block that holds what a cached block of another pool does. Whether it is
  // the first under its hash.
  void publish_copy(BlockId id, const Copied& copied);
  Copied copied(BlockId id, bool is_chain) const;  // of a block that is found under a hash

  // Between pools of two tiers, for the policy: what this cached and held block is a copy of was
  // released again, and evicted; what it holds is in the other pool again; how many
  // hits a copy of that is worth, beyond what its space is (eviction_policy.h).
  void copy_again(BlockId id, const Copied& copied);
  void notify_load(BlockId id);
  double gain_of_copy(const Copied& copied);

  // Makes what a held block holds so far findable by `find_partial`, under one hash more.
  void publish_partial(BlockId id, const Hash& hash, const Hash& root, uint8_t group,
                       uint64_t variant = 0);

  // out[i]: the oldest block published under hashes[i * stride], or -1. With `prefix`, everything
  // from the first miss on is -1 and is not looked at. Returns the number of leading hits.
  int64_t lookup(const Hash* hashes, int64_t n, uint8_t group, bool prefix, BlockId* out,
                 int64_t stride = 1) const;

  // The oldest block published under this hash, whole or partially filled; or the null block, also
  // where its content is of another variant (0: any will do).
  BlockId find(const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    const BlockId id = index_.find(hash, group);
    return is_variant(id, variant) ? id : kNullBlock;
  }
  BlockId find_partial(const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    return partial_.find(hash, group, variant);
  }

  // Forgets the hash of each block, held or free; free ones are then taken first. Uncached ids are
  // left as they are.
  void evict(const BlockId* ids, int64_t n);

  void evict_group(uint8_t group);  // all blocks of it

  // Adds the chains of these blocks, where they are cached.
  void add_chains(const BlockId* ids, int64_t n, InvalidChains* invalid) const;

  // Evicts what is invalid and all that may have been computed from it: every block of a chain with
  // such a root, but for those whose ancestors are all cached, in the same group, and none of them
  // is invalid. That exception holds where a chain's blocks are all of one size (`is_uniform`).
  void evict_derived(const InvalidChains& invalid, bool is_uniform);

  // Forgets every hash; false, and nothing changed, while any block is held.
  bool reset();
  // The same while blocks are held: they stay so, and are not cached any more. O(1).
  void clear();

  // One pin more, or less, for each of these cached blocks; an id may repeat. Pinned blocks are
  // evicted only when no other cached block is free. A pin ends with its block's hash. Throws on a
  // block that is not cached, or not pinned as often, with nothing changed.
  void pin(const BlockId* ids, int64_t n);
  void unpin(const BlockId* ids, int64_t n);
  bool is_pinned(BlockId id) const { return has_pin(at(id, "id")); }
  int64_t num_pinned() const { return pins_ ? pins_->num_pinned() : 0; }
  int64_t num_pins_broken() const { return pins_ ? pins_->num_broken() : 0; }  // pinned, evicted

  // Notifies the policy (eviction_policy.h); without one nothing happens.
  bool has_policy() const { return candidates_ != nullptr; }
  const EvictionPolicy* policy() const { return has_policy() ? &candidates_->policy() : nullptr; }
  void hit(const BlockId* ids, int64_t n) {
    if (has_policy()) notify_hit(ids, n);
  }
  void notify_release(const BlockId* ids, const int64_t* prefix_tokens, int64_t n,
                      const ReleaseFeatures& features) {
    if (has_policy()) notify_policy_release(ids, prefix_tokens, n, features);
  }
  void notify_released(const BlockId* ids, int64_t n) {
    if (!has_policy()) return;
    const Soundness::Change change = this->change("release");
    candidates_->policy().on_released(ids, n);
  }
  // The access that begins now, for `access` of the blocks that had it, at any time later. Throws
  // where `now` is not finite.
  Access begin_access(double now);
  void access(const BlockId* ids, int64_t n, const Access& access) {
    if (access.number > 0 && has_policy()) notify_access(ids, n, access);
  }
  void set_now(int64_t ms) {
    if (!has_policy()) return;
    const Soundness::Change change = this->change("set_now");
    candidates_->policy().set_now(ms);
  }

  // What the policy has learned, see eviction_policy.h; none without one.
  std::vector<double> learned() const {
    return has_policy() ? candidates_->policy().learned() : std::vector<double>{};
  }
  void learn(const std::vector<double>& numbers) {
    if (!has_policy()) return;
    const Soundness::Change change = this->change("learn");
    candidates_->policy().learn(numbers);
  }

  // The log that stored, removed and cleared hashes go to, and the tier that they are said of.
  void emit_to(EventLog* events, Tier tier) {
    events_ = events;
    tier_ = tier;
  }

  // Hears of evictions from now on; null: nothing does. Must live as long as the pool is called.
  void set_eviction_listener(EvictionListener* listener) { eviction_listener_ = listener; }

  // The state of an object that this pool is a part of is its own from now on.
  void share(Soundness* soundness) { soundness_ = soundness; }
  void check_sound() const { soundness_->check(); }

  // How long cached blocks stay, once they are tracked.
  void track_residency();
  Residency* residency() { return residency_.get(); }

  // Walks the whole pool and throws std::logic_error where an invariant does not hold.
  // O(num_blocks).
  void check_invariants() const;

 private:
  Soundness::Change change(const char* call) { return {soundness_, call}; }
  const Block& at(BlockId id, const char* what) const;
  Block& at(BlockId id, const char* what) {
    return const_cast<Block&>(std::as_const(*this).at(id, what));
  }
  bool is_cached(const Block& block) const { return block.epoch == epoch_; }
  bool is_indexed(const Block& block) const {
    return is_cached(block) && block.older != kNullBlock;
  }
  void notify_eviction(BlockId id) {
    // Alone in the ring of its hash: nothing is found under it once the block is gone.
    if (eviction_listener_ == nullptr) return;
    const Block& block = blocks_[id];
    if (is_indexed(block) && block.younger == id) eviction_listener_->on_eviction(id);
  }
  void take_evicted(int64_t n, BlockId* out);
  void check_publish(const BlockId* ids, int64_t n, uint8_t group);
  void set_cached(BlockId id, uint8_t group, uint64_t parent, uint32_t root);
  bool is_untouched(BlockId id, const std::unordered_set<uint64_t>& invalid,
                    std::unordered_map<uint64_t, BlockId>* by_hash) const;
  void forget(BlockId id, bool evicted = false);  // drops all its hashes, and its place
  void forget_hashes(BlockId id, uint32_t tag);   // `tag`: what the index knows its hash by
  FreeList& list_of(const Block& block) {
    if (!is_cached(block)) return uncached_free_;
    return pins_ && pins_->is_passed(id_of(block)) ? passed_ : cached_free_;
  }
  void note_use();

  // block_pool_eviction.cpp: what a pool does that has a policy, or ever had a pin.
  BlockId id_of(const Block& block) const { return static_cast<BlockId>(&block - blocks_.data()); }
  bool has_pin(const Block& block) const { return pins_ && pins_->has(id_of(block)); }
  void check_ids(const BlockId* ids, int64_t n) const;
  void check_copy(BlockId id) const;
  void notify_hit(const BlockId* ids, int64_t n);
  void notify_policy_release(const BlockId* ids, const int64_t* prefix_tokens, int64_t n,
                             const ReleaseFeatures& features);
  void notify_access(const BlockId* ids, int64_t n, const Access& access);
  BlockId parent_of_first(const Content& content, uint8_t group) const;
  void notify_published(BlockId id, BlockId parent, bool has_parent);
  std::vector<CacheTree::Member> published() const;
  void update_changed();
  void notify_idle(BlockId last);
  void take_chosen(int64_t n, BlockId* out);
  BlockId least_recently_released();
  void unlist(BlockId id);
  void update_candidate(BlockId id);
  void forget_place(BlockId id, bool evicted);
  void clear_places();
  void check_places() const;

  int64_t num_blocks_;
  ZeroedArray<Block> blocks_;
  ZeroedArray<Link> links_;
  struct Lineage {  // tags of hashes of the block's chain, in 12 bytes
    uint32_t parent_upper, parent_lower, root;

    uint64_t parent() const { return uint64_t{parent_upper} << 32 | parent_lower; }
    void set_parent(uint64_t tag) {
      parent_upper = static_cast<uint32_t>(tag >> 32);
      parent_lower = static_cast<uint32_t>(tag);
    }
  };
  ZeroedArray<Lineage> lineage_;  // of cached blocks
  HashIndex index_;
  FreeList uncached_free_, cached_free_;
  FreeList passed_;  // pinned blocks that eviction met: released before all of `cached_free_`
  BlockId next_fresh_ = 1;  // blocks from here on were never used; they are free and in no list
  int64_t num_free_;
  int64_t num_cached_ = 0;
  int64_t num_evicted_ = 0;
  std::vector<int64_t> evicted_by_group_;
  int64_t peak_used_ = 0;
  uint16_t epoch_ = 1;
  PartialIndex partial_;
  Variants variants_;  // of blocks that are in the index
  EventLog* events_ = nullptr;
  Tier tier_ = Tier::kDevice;
  EvictionListener* eviction_listener_ = nullptr;
  std::unique_ptr<Residency> residency_;
  bool is_plain_;  // no policy, and no block was ever pinned
  std::unique_ptr<Candidates> candidates_;
  std::vector<BlockId> changed_;  // scratch
  std::unique_ptr<Pins> pins_;
  Soundness own_{"pool"};
  Soundness* soundness_ = &own_;
};

}  // namespace kvcache
