// Cached blocks on the host: what is written there, and what is loaded from there.
#include <algorithm>
#include <utility>

#include "core/manager/manager.h"

namespace kvcache {

Copied Manager::content_of(BlockId id) const {
  return pool_.copied(id, groups_[pool_.group_of(id)].keeps_all);
}

// Whether the step's plan writes this cached block to the host. It is found there by later steps.
bool Manager::write_to_host(BlockId id) {
  const Copied content = content_of(id);
  BlockId page = host_->find(content.hash, content.group);
  if (page != kNullBlock) {
    host_->retain(&page, 1);  // it stays as long as one that is written now
    writes_.push_back({page, content, /*is_row=*/false, /*is_there=*/true});
    return false;
  }
  const auto writing = writing_.find(content.hash);
  if (writing != writing_.end() && (writing->second >> content.group & 1) != 0) return false;
  if (!host_->allocate(1, &page)) {
    ++tiers_.unwritten_blocks;
    return false;
  }
  delta_->swap_out.insert(delta_->swap_out.end(), {id, page});
  add_write(page, content, /*is_row=*/false);
  ++tiers_.written_blocks;
  return true;
}

void Manager::add_write(BlockId page, const Copied& content, bool is_row) {
  writes_.push_back({page, content, is_row, /*is_there=*/false});
  writing_[content.hash] |= uint32_t{1} << content.group;
}

void Manager::write_later(BlockId id) {
  if (is_pending_[static_cast<size_t>(id)]) return;
  is_pending_[static_cast<size_t>(id)] = true;
  pending_writes_.push_back(id);
}

// Whatever the mode writes earlier, what is to be on the host and is not (any more) goes there now.
void Manager::on_eviction(BlockId id) {
  if (delta_ == nullptr) return;  // no plan would carry it
  if (!num_block_hits_.empty() &&
      num_block_hits_[static_cast<size_t>(id)] < options_.num_hits_to_write) {
    return;
  }
  write_to_host(id);
}

// What became cached, or was hit often enough, in steps before; not what was forgotten since.
void Manager::write_pending() {
  for (auto next = pending_writes_.rbegin(); next != pending_writes_.rend(); ++next) {
    const BlockId id = *next;  // tails first: they are the older ones on the host
    is_pending_[static_cast<size_t>(id)] = false;
    if (pool_.hash_of(id) == nullptr || !write_to_host(id) || !is_fenced(num_steps_)) continue;
    pool_.retain(&id, 1);  // the step reads it
    borrow(id);
  }
  pending_writes_.clear();
}

// Makes what the step writes findable. Until now the pages were held: nothing else of the step
// could take them.
void Manager::end_writes() {
  for (const Write& write : writes_) {
    if (!write.is_there) {
      host_->publish_copy(write.page, write.content);
      if (!in_flight_.empty()) in_flight_.back().written.push_back(write.page);
    }
    if (!write.is_row) host_->release(&write.page, 1);
  }
  writes_.clear();
  writing_.clear();
}

// A page of the host comes into a block of the row. Takes over one reference of the page.
void Manager::load(int32_t row, const CacheGroup& group, int64_t block, BlockId host,
                   BlockId device, bool is_hit) {
  delta_->swap_in.insert(delta_->swap_in.end(), {host, device});
  pool_.retain(&device, 1);
  ++loading_[static_cast<size_t>(device)];
  loads_.push_back({num_steps_, host, device, block, group.id,
                    is_hit ? rows_[row].chain : std::shared_ptr<TokenChain>()});
  safe_start_ = std::min(safe_start_, block * group.block_size);
}

// Blocks for the part of a hit that is on the host.
void Manager::load_hits(int32_t row) {
  Held* h = held(row);
  for (const CacheGroup& group : groups_) {
    Held& each = h[group.id];
    for (auto b = each.num_dropped; b < static_cast<int64_t>(each.blocks.size()); ++b) {
      BlockId& id = each.blocks[static_cast<size_t>(b)];
      if (!is_host_page(id)) continue;
      const BlockId page = -id;
      pool_.allocate(1, &id);
      load(row, group, b, page, id, /*is_hit=*/true);
      ++tiers_.loaded_blocks;
    }
  }
}

// For blocks that are to be written to the host once they were hit often enough.
void Manager::count_hits(const BlockId* ids, int64_t n) {
  if (num_block_hits_.empty()) return;
  for (int64_t i = 0; i < n; ++i) {
    int32_t& count = num_block_hits_[static_cast<size_t>(ids[i])];
    if (count < options_.num_hits_to_write) ++count;
    if (count == options_.num_hits_to_write) write_later(ids[i]);
  }
}

// Of the steps below num_completed_, whose loads have arrived; or of those behind last_issued_,
// whose loads came to nothing.
void Manager::end_loads(bool arrived) {
  if (loads_.empty()) return;
  const auto is_over = [&](const Load& load) {
    return arrived ? load.step_id < num_completed_ : load.step_id > last_issued_;
  };
  std::vector<BlockId> pages, blocks;
  while (!loads_.empty() && is_over(arrived ? loads_.front() : loads_.back())) {
    const Load load = arrived ? loads_.front() : loads_.back();
    arrived ? loads_.pop_front() : loads_.pop_back();
    const CacheGroup& group = groups_[load.group];
    if (arrived && load.chain != nullptr) {
      const int64_t last = (load.block + 1) * group.num_hashes - 1;
      // Nothing was heard since against what the page holds.
      if (host_->holds(load.host, load.chain->known_hashes()[static_cast<size_t>(last)],
                       group.id) &&
          pool_.hash_of(load.device) == nullptr) {
        publish_ids(*load.chain, group, load.block, &load.device, 1);
      }
    }
    --loading_[static_cast<size_t>(load.device)];
    blocks.push_back(load.device);
    pages.push_back(load.host);
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
