// SPDX-License-Identifier: Apache-2.0
// The block pool. It records whether each block is free, held or cached, and the hashes of cached
// blocks.
//
// Every method processes a whole batch of ids, or throws or returns failure without any change. If
// memory runs out during a change, or a listener throws after it, the pool is broken
// (soundness.h). The pool handles only block ids and 32-byte hashes, not requests, tokens or KV
// bytes. It is plain C++17 and does not use torch, CUDA or Python.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/hash.h"
#include "core/pool/block.h"
#include "core/pool/block_listener.h"
#include "core/pool/candidates.h"
#include "core/pool/content.h"
#include "core/pool/eviction_order.h"
#include "core/pool/free_list.h"
#include "core/pool/hash_index.h"
#include "core/pool/partial_index.h"
#include "core/pool/pins.h"
#include "core/pool/variants.h"
#include "core/soundness.h"
#include "core/zeroed_array.h"

namespace kvcache {

// Invalid content: the tags of its hashes, and the short tags of the roots of its chains.
struct InvalidChains {
  std::unordered_set<uint64_t> hashes;
  std::unordered_set<uint32_t> roots;
};

class BlockPool {
 public:
  // `num_blocks` includes the null block. The memory for a block's metadata is not committed until
  // the block is first used, unless a Prefault commits it. Without an order, the least recently
  // released block is evicted first. An order that is a BlockListener listens to the pool.
  explicit BlockPool(int64_t num_blocks, std::unique_ptr<EvictionOrder> order = nullptr);

  // Adds a listener, which must outlive all later calls.
  void add_listener(BlockListener* listener);

  int64_t num_blocks() const { return num_blocks_; }
  int64_t num_total() const { return num_blocks_ - 1; }  // excludes the null block
  int64_t num_free() const { return num_free_; }
  int64_t num_cached() const { return num_cached_; }
  int64_t num_evicted() const { return num_evicted_; }  // cached blocks evicted for other content
  int64_t peak_used() const { return peak_used_; }
  size_t num_bytes() const;

  bool is_cached(BlockId id) const { return is_cached(at(id, "id")); }
  int32_t ref_count(BlockId id) const { return at(id, "id").ref_count; }
  // Whether a lookup of this hash may return this block. Accepts any id.
  bool holds(BlockId id, const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    return has(id) && is_indexed(blocks_[id]) && blocks_[id].group == group &&
           blocks_[id].hash == hash && is_variant(id, variant);
  }
  // Whether a cached block's content has this variant; 0 matches any variant.
  bool is_variant(BlockId id, uint64_t variant) const {
    return variant == 0 || variants_.of(id) == variant;
  }
  uint64_t variant_of(BlockId id) const { return variants_.of(id); }

  // Returns the hash under which a block is published, or null if it is not published. Accepts any
  // id of the pool.
  const Hash* hash_of(BlockId id) const {
    return is_indexed(blocks_[id]) ? &blocks_[id].hash : nullptr;
  }
  // Throws std::invalid_argument, naming `what`, if the id is not in the pool.
  void check_id(BlockId id, const char* what) const {
    if (!has(id)) (void)at(id, what);
  }
  // The number of allocations of the block, modulo 256.
  uint8_t generation(BlockId id) const { return blocks_[id].generation; }
  // Return the group of a cached block's content, and the hashes of its partial content.
  uint8_t group_of(BlockId id) const { return blocks_[id].group; }
  std::vector<Hash> partial_hashes_of(BlockId id) const { return partial_.of(id); }
  // The number of cached blocks of a group that were evicted for other content.
  int64_t num_evicted_of(uint8_t group) const {
    return group < evicted_by_group_.size() ? evicted_by_group_[group] : 0;
  }

  // Allocates n blocks with one reference each. Returns false, without any change, if fewer blocks
  // are free. Uncached blocks are allocated first, least recently released first. They are followed
  // by cached blocks chosen by the order, which are evicted and lose their hashes. If the order has
  // no candidate, parents of held blocks are evicted, least recently released first, and
  // finally pinned blocks, least recently released first.
  bool allocate(int64_t n, BlockId* out);

  // Adds a reference to each block, which must be held, or free and cached (a hit). Ids may repeat.
  void retain(const BlockId* ids, int64_t n);

  // Removes a reference from each block, in the given order (the order of eviction). Content and
  // hash remain until reallocation. Throws, without any change, on a block that is not held.
  void release(const BlockId* ids, int64_t n);

  // Publishes held blocks that are not yet published, under their hashes for `group`. Several
  // blocks may have the same hash.
  void publish(const BlockId* ids, const Content& content, int64_t n, uint8_t group);

  // Like `publish`, for one block that holds a copy of a cached block in another pool.
  void publish_copy(BlockId id, const Copied& copied);
  Copied copied(BlockId id, bool is_chain) const;  // the block must be published

  // Publishes the partial content of a held block for `find_partial`, under an additional hash.
  void publish_partial(BlockId id, const Hash& hash, const Hash& root, uint8_t group,
                       uint64_t variant = 0);

  // Sets out[i] to the oldest block published under hashes[i * stride], or -1. With `prefix`, the
  // lookup stops at the first miss, and this entry and all later ones are -1. Returns the number of
  // leading hits.
  int64_t lookup(const Hash* hashes, int64_t n, uint8_t group, bool prefix, BlockId* out,
                 int64_t stride = 1) const;

  // Returns the oldest block published under this hash, full or partial. Returns the null block if
  // there is none or its variant differs (0: any variant).
  BlockId find(const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    const BlockId id = index_.find(hash, group);
    return is_variant(id, variant) ? id : kNullBlock;
  }
  // Returns the next younger block with the same hash as this one, which `find` has returned. The
  // youngest block is followed by the oldest.
  BlockId next_of_hash(BlockId id) const { return blocks_[id].younger; }
  BlockId find_partial(const Hash& hash, uint8_t group, uint64_t variant = 0) const {
    return partial_.find(hash, group, variant);
  }

  // Removes the hash of each block, which may be held or free. Afterwards, the free blocks among
  // them are allocated first. Uncached ids are ignored.
  void evict(const BlockId* ids, int64_t n);

  void evict_group(uint8_t group);  // evicts all cached blocks of the group
  // Removes the hashes of all blocks that were computed with this adapter (ExtraKeys::adapter).
  // Blocks with partial content only remain.
  void evict_adapter(uint32_t adapter) {
    const std::vector<BlockId> ids = variants_.blocks_of(adapter);
    evict(ids.data(), static_cast<int64_t>(ids.size()));
  }
  uint32_t adapter_of(BlockId id) const { return variants_.adapter_of(id); }

  // Adds to `invalid` the chains of those given blocks that are cached.
  void add_chains(const BlockId* ids, int64_t n, InvalidChains* invalid) const;

  // Evicts invalid blocks and everything that may have been computed from them. These are all
  // blocks of chains with an invalid root, except blocks whose ancestors are all cached, in the
  // same group, and valid. The exception requires that all blocks of a chain have the same size
  // (`is_uniform`).
  void evict_derived(const InvalidChains& invalid, bool is_uniform);

  // Removes all hashes. Returns false, without any change, while any block is held.
  bool reset();
  // Removes all hashes, even while blocks are held. Held blocks stay held but are no longer cached.
  // O(1) without an order and listeners.
  void clear();

  // Adds or removes a pin for each of these cached blocks; ids may repeat. Pinned blocks are
  // evicted only if no other cached block is free. A pin ends when its block loses its hash.
  // Throws, without any change, on a block that is not cached or has too few pins.
  void pin(const BlockId* ids, int64_t n);
  void unpin(const BlockId* ids, int64_t n);
  bool is_pinned(BlockId id) const { return has_pin(at(id, "id")); }
  int64_t num_pinned() const { return pins_ ? pins_->num_pinned() : 0; }
  // Number of pinned blocks that were evicted.
  int64_t num_pins_broken() const { return pins_ ? pins_->num_broken() : 0; }

  // What the pool shows to its order, and may show to listeners.
  const PoolView& view() const { return view_; }
  void set_taker(Taker taker) { view_.taker = taker; }
  // Whether a block is free that is not cached.
  bool has_uncached() const {
    return uncached_free_.head() != kNullBlock || next_fresh_ < num_blocks_;
  }
  const EvictionOrder* order() const { return candidates_ ? &candidates_->order() : nullptr; }
  EvictionOrder* order() { return candidates_ ? &candidates_->order() : nullptr; }
  bool has_listeners() const { return !listeners_.empty(); }

  // Notify the listeners of what only the caller knows (block_listener.h). Throw, without any
  // change, if an id, a number or a range is invalid, or if a hit block is not cached or a copy not
  // held.
  void notify(const Hit& hit);
  void notify(const Released& released);
  // The content of this cached and held copy was released and evicted once more in the other pool.
  void notify_copied_again(BlockId id, const Copied& copied);

  // Sets the clock of the order. It never goes back.
  void set_now(int64_t ms) { view_.clock.now_ms = std::max(view_.clock.now_ms, ms); }
  // Starts an access, to be passed on with the blocks that the request releases. Throws if `now` is
  // not finite.
  Access begin_access(double now);

  // Makes the pool share the soundness state of the object that contains it.
  void share(Soundness* soundness) { soundness_ = soundness; }
  void check_sound() const { soundness_->check(); }

  // Traverses the pool and throws std::logic_error if an invariant is violated. O(num_blocks).
  void check_invariants() const;

 private:
  Soundness::Change change(const char* call) {
    check_caller(call);
    return {soundness_, call};
  }
  // Calls that prepare a change in the pool call this first.
  void check_caller(const char* call) const {
    if (is_notifying_) fail_in_listener(call);
  }
  [[noreturn]] static void fail_in_listener(const char* call);  // a listener made this call
  const Block& at(BlockId id, const char* what) const;
  bool is_cached(const Block& block) const { return block.epoch == epoch_; }
  bool is_indexed(const Block& block) const {
    return is_cached(block) && block.older != kNullBlock;
  }
  bool has(BlockId id) const { return id > kNullBlock && id < num_blocks_; }
  // Adds the references back that `release` has removed from these blocks.
  void undo_release(const BlockId* ids, int64_t n);
  // Returns why a block cannot be published, or null.
  const char* obstacle_to_publish(BlockId id, uint8_t group) const;
  // Marks the blocks, or throws without any change if one of them cannot be published.
  void check_publish(const BlockId* ids, int64_t n, uint8_t group);
  // The place in a chain at which the next block of a batch is published.
  struct Cursor {
    Candidates::Parent parent;
    bool has_parent;  // whether eviction treats the next block as a child of `parent`
    uint32_t root;    // short tag of the chain's first hash; unused if each block is a chain
  };
  Cursor begin_of(const Content& content, uint8_t group) const;
  // Publishes the i-th block of the content, and moves the cursor after it. Returns whether no
  // other block has the same hash.
  bool publish_one(BlockId id, const Content& content, int64_t i, uint8_t group, uint64_t key,
                   Cursor* at);
  // Makes a block cached, but not yet indexed. `parent`, `root`: see Lineage.
  void set_cached(BlockId id, uint8_t group, uint64_t parent, uint32_t root);
  // Whether the block and all its ancestors are cached and valid (see `evict_derived`).
  bool is_untouched(BlockId id, const std::unordered_set<uint64_t>& invalid,
                    std::unordered_map<uint64_t, BlockId>* by_hash) const;
  FreeList& list_of(const Block& block) { return is_cached(block) ? cached_free_ : uncached_free_; }
  void note_use();  // updates `peak_used_`

  // Takes up to n free blocks that are not cached. Returns their number.
  int64_t take_uncached(int64_t n, BlockId* out);
  // Take the next n blocks to evict out of `cached_free_`. Without candidates and pins, these are
  // its first blocks.
  void take_oldest(int64_t n, BlockId* out);
  void take_chosen(int64_t n, BlockId* out);
  // Removes a block from the index. `key`: the key of its hash. Returns its flags for
  // `tell_forgotten`, which completes this.
  uint8_t forget_hashes(BlockId id, uint64_t key);
  // The same, and removes it from the candidates and removes its pins.
  uint8_t forget(BlockId id, bool evicted);
  // Makes `flags_` large enough for n blocks.
  void reserve_flags(int64_t n) {
    if (flags_.size() < static_cast<size_t>(n)) flags_.resize(static_cast<size_t>(n));
  }

  // Defined in block_pool_listeners.cpp. An exception of a listener is kept until
  // `rethrow_listener_failure`, which is called when the change is complete.
  template <class Event>
  void tell(void (BlockListener::*method)(const Event&), const Event& event);
  // Also removes the partial hashes and the variants of the blocks. Their flags are in `flags_`.
  void tell_forgotten(Forgotten::Why why, const Blocks& blocks);
  void tell_released(BlockId last_cached, BlockId last_uncached);
  void rethrow_listener_failure();

  // Operations of a pool that has an order, or that had a pin.
  BlockId id_of(const Block& block) const { return static_cast<BlockId>(&block - blocks_.data()); }
  bool has_pin(const Block& block) const { return pins_ && pins_->has(id_of(block)); }
  // Removes one pin per listed id, or throws without any change if a block has too few pins.
  void take_pins(const BlockId* ids, int64_t n);
  void check_copy(BlockId id) const;
  void check_released(const Released& released) const;
  // Adds a published block to the candidates (candidates.h); null: without a parent.
  void add_place(BlockId id, uint64_t key, const Candidates::Parent* parent);
  // Updates blocks that have become leaves, or are no longer leaves, because another block was
  // added or removed.
  void update_changed() {
    for (const BlockId other : changed_) update_candidate(other);
  }
  BlockId first_unpinned();
  void unlist(BlockId id);  // removes a free block from its list
  void update_candidates(const BlockId* ids, int64_t n);
  void update_candidate(BlockId id);
  void clear_places();  // removes all candidates and pins
  // Parts of `check_invariants`. `check_lists` returns, by block, whether it is in a free list.
  std::vector<char> check_lists() const;
  void check_block(BlockId id, bool is_listed) const;
  void check_places() const;

  int64_t num_blocks_;
  ZeroedArray<Block> blocks_;
  ZeroedArray<Link> links_;
  struct Lineage {  // 12 bytes: the key of the parent, and the short tag of the chain's first hash
    uint32_t parent_upper, parent_lower, root;

    uint64_t parent() const { return uint64_t{parent_upper} << 32 | parent_lower; }
    void set_parent(uint64_t key) {
      parent_upper = static_cast<uint32_t>(key >> 32);
      parent_lower = static_cast<uint32_t>(key);
    }
  };
  ZeroedArray<Lineage> lineage_;  // lineage of cached blocks
  HashIndex index_;
  FreeList uncached_free_, cached_free_;
  // All blocks of `cached_free_` up to this one are pinned. Null: none is known to be.
  BlockId last_passed_ = kNullBlock;
  // Blocks with this id or a higher id were never used; they are free and in no list.
  BlockId next_fresh_ = 1;
  int64_t num_free_;
  int64_t num_cached_ = 0;
  int64_t num_evicted_ = 0;
  std::vector<int64_t> evicted_by_group_;
  int64_t peak_used_ = 0;
  uint16_t epoch_ = 1;
  PartialIndex partial_;
  Variants variants_;  // variants of indexed blocks
  // Whether there is neither an order nor a listener, and no block was ever pinned.
  bool is_plain_ = true;
  std::vector<BlockListener*> listeners_;
  bool is_notifying_ = false;
  std::exception_ptr failure_;
  std::vector<BlockId> batch_;  // scratch
  std::vector<uint8_t> flags_;  // scratch: flags of the blocks of a batch, for listeners
  PoolView view_;
  std::unique_ptr<Candidates> candidates_;
  std::vector<BlockId> changed_;  // scratch
  std::unique_ptr<Pins> pins_;
  Soundness own_{"pool"};
  Soundness* soundness_ = &own_;
};

}  // namespace kvcache
