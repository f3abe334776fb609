// Cached blocks on the host: what is written there, and what is loaded from there.
#include <algorithm>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

Copied Manager::content_of(BlockId id) const {
  return pool_.copied(id, groups_[pool_.group_of(id)].keeps_all);
}

// Whether the step's plan writes this cached block to the host. It is found there by later steps.
bool Manager::offload(BlockId id) {
  const Copied content = content_of(id);
  BlockId page = host_->find(content.hash, content.group);
  if (page != kNullBlock) {
    host_->retain(&page, 1);  // it stays as long as one that is written now
    offloads_.push_back({page, content, /*is_row=*/false, /*is_there=*/true});
    return false;
  }
  const auto writing = offloading_.find(content.hash);
  if (writing != offloading_.end() && (writing->second >> content.group & 1) != 0) return false;
  if (!host_->allocate(1, &page)) {
    ++tier_count_.unwritten_blocks;
    return false;
  }
  plan_.swap_out(id, page);
  add_offload(page, content, /*is_row=*/false);
  ++tier_count_.written_blocks;
  return true;
}

void Manager::add_offload(BlockId page, const Copied& content, bool is_row) {
  offloads_.push_back({page, content, is_row, /*is_there=*/false});
  offloading_[content.hash] |= uint32_t{1} << content.group;
}

void Manager::queue_offload(BlockId id) {
  if (is_queued_[static_cast<size_t>(id)]) return;
  is_queued_[static_cast<size_t>(id)] = true;
  offload_queue_.push_back(id);
}

// Whatever the mode writes earlier, what is to be on the host and is not (any more) goes there now.
void Manager::on_eviction(BlockId id) {
  if (!plan_.is_step()) return;  // no plan would carry it
  if (!num_block_hits_.empty() &&
      num_block_hits_[static_cast<size_t>(id)] < options_.num_hits_to_write) {
    return;
  }
  offload(id);
}

// What became cached, or was hit often enough, in steps before; not what was forgotten since.
void Manager::offload_queued() {
  for (auto next = offload_queue_.rbegin(); next != offload_queue_.rend(); ++next) {
    const BlockId id = *next;  // tails first: they are the older ones on the host
    is_queued_[static_cast<size_t>(id)] = false;
    if (pool_.hash_of(id) == nullptr || !offload(id) || !frees_.defers(steps_.num_steps)) continue;
    pool_.retain(&id, 1);  // the step reads it
    plan_.hold(id);
  }
  offload_queue_.clear();
}

// Makes what the step writes findable. Until now the pages were held: nothing else of the step
// could take them.
void Manager::publish_offloaded() {
  for (const Offload& write : offloads_) {
    if (!write.is_there) {
      host_->publish_copy(write.page, write.content);
      if (!in_flight_.empty()) in_flight_.back().written.push_back(write.page);
    }
    if (!write.is_row) host_->release(&write.page, 1);
  }
  offloads_.clear();
  offloading_.clear();
}

// A page of the host comes into a block of the row. Takes over one reference of the page.
void Manager::onboard(int32_t row, const CacheGroup& group, int64_t block, BlockId host,
                      BlockId device, bool is_hit) {
  plan_.swap_in(host, device);
  pool_.retain(&device, 1);
  ++loading_[static_cast<size_t>(device)];
  onboards_.push_back({steps_.num_steps, host, device, block, group.id,
                       is_hit ? rows_[row].chain : std::shared_ptr<TokenChain>()});
  safe_start_ = std::min(safe_start_, block * group.block_size);
}

// Blocks for the part of a hit that is on the host.
void Manager::onboard_hits(int32_t row) {
  RowBlocks* h = held(row);
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = h[group.id];
    for (auto b = each.num_dropped; b < static_cast<int64_t>(each.blocks.size()); ++b) {
      BlockId& id = each.blocks[static_cast<size_t>(b)];
      if (!is_host_page(id)) continue;
      const BlockId page = -id;
      pool_.allocate(1, &id);
      onboard(row, group, b, page, id, /*is_hit=*/true);
      ++tier_count_.loaded_blocks;
    }
  }
}

// For blocks that are to be written to the host once they were hit often enough.
void Manager::count_hits(const BlockId* ids, int64_t n) {
  if (num_block_hits_.empty()) return;
  for (int64_t i = 0; i < n; ++i) {
    int32_t& count = num_block_hits_[static_cast<size_t>(ids[i])];
    if (count < options_.num_hits_to_write) ++count;
    if (count == options_.num_hits_to_write) queue_offload(ids[i]);
  }
}

// Of the steps below steps_.num_completed, whose loads have arrived; or of those behind
// steps_.last_issued, whose loads came to nothing.
void Manager::end_onboards(bool arrived) {
  if (onboards_.empty()) return;
  const auto is_over = [&](const Onboard& onboard) {
    return arrived ? onboard.step_id < steps_.num_completed : onboard.step_id > steps_.last_issued;
  };
  std::vector<BlockId> pages, blocks;
  while (!onboards_.empty() && is_over(arrived ? onboards_.front() : onboards_.back())) {
    const Onboard onboard = arrived ? onboards_.front() : onboards_.back();
    arrived ? onboards_.pop_front() : onboards_.pop_back();
    const CacheGroup& group = groups_[onboard.group];
    if (arrived && onboard.chain != nullptr) {
      const int64_t last = (onboard.block + 1) * group.num_hashes - 1;
      // Nothing was heard since against what the page holds.
      if (host_->holds(onboard.host, onboard.chain->known_hashes()[static_cast<size_t>(last)],
                       group.id) &&
          pool_.hash_of(onboard.device) == nullptr) {
        publish_ids(*onboard.chain, group, onboard.block, &onboard.device, 1);
      }
    }
    --loading_[static_cast<size_t>(onboard.device)];
    blocks.push_back(onboard.device);
    pages.push_back(onboard.host);
  }
  // Tails before heads.
  if (arrived) {
    std::reverse(blocks.begin(), blocks.end());
    std::reverse(pages.begin(), pages.end());
  }
  pool_.release(blocks.data(), static_cast<int64_t>(blocks.size()));
  host_->release(pages.data(), static_cast<int64_t>(pages.size()));
}

}  // namespace kvcache
