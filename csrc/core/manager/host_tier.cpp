// SPDX-License-Identifier: Apache-2.0
#include "core/manager/host_tier.h"

#include <algorithm>
#include <utility>

#include "core/errors.h"
#include "core/eviction/learned.h"
#include "core/eviction/learned_copies.h"

namespace kvcache {

HostTier::HostTier(std::unique_ptr<BlockPool> pages, const Context& context,
                   const HostWrites& writes)
    : pages_(std::move(pages)),
      device_(context.device),
      learned_(dynamic_cast<const Learned*>(device_->order())),
      learned_copies_(dynamic_cast<LearnedCopies*>(pages_->order())),
      groups_(context.groups),
      plan_(context.plan),
      writes_(writes),
      is_queued_(device_->num_blocks()),
      num_onboards_(device_->num_blocks()) {}

Copied HostTier::content_of(BlockId id) const {
  const Copied content = device_->copied(id, (*groups_)[device_->group_of(id)].keeps_all);
  if (learned_copies_ != nullptr) {
    learned_copies_->expect(content.hash, content.group, learned_->released_as(id));
  }
  return content;
}

double HostTier::gain_of(BlockId id) const {
  if (learned_copies_ == nullptr) return 1;
  return learned_copies_->gain_of_copy(learned_->released_as(id),
                                       /*evicts=*/!pages_->has_uncached());
}

// Writes this cached block to the host. Returns whether the plan contains the write.
bool HostTier::offload(BlockId id) {
  const Copied content = content_of(id);
  BlockId page = pages_->find(content.hash, content.group);
  if (page != kNullBlock) {
    pages_->retain(&page, 1);  // holds the page until the pages that this plan writes are published
    offloads_.push_back({page, content, /*is_row=*/false, /*is_there=*/true});
    return false;
  }
  const auto offloading = offloading_.find(content.hash);
  if (offloading != offloading_.end() && (offloading->second >> content.group & 1) != 0) {
    return false;
  }
  if (writes_.min_gain && gain_of(id) < *writes_.min_gain) {
    ++counts_.declined_blocks;
    return false;
  }
  if (!pages_->allocate(1, &page)) {
    ++counts_.unwritten_blocks;
    return false;
  }
  plan_->swap_out(id, page);
  add_offload(page, content, /*is_row=*/false);
  ++counts_.written_blocks;
  return true;
}

void HostTier::on_forget(const Forgotten& forgotten) {
  // Outside of steps, no plan can contain the write.
  if (forgotten.why != Forgotten::Why::kEvicted || !plan_->is_step()) return;
  for (int64_t i = 0; i < forgotten.n; ++i) {
    if (forgotten.is_last(i)) offload(forgotten.ids[i]);
  }
}

void HostTier::offload_queued(size_t n, bool holds_blocks) {
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

std::vector<BlockId> HostTier::publish_offloaded() {
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
  if (learned_copies_ != nullptr) learned_copies_->expect_none();
  return written;
}

void HostTier::onboard(Onboard onboard) {
  plan_->swap_in(onboard.page, onboard.block);
  device_->retain(&onboard.block, 1);
  ++num_onboards_[onboard.block];
  onboards_.push_back(std::move(onboard));
}

std::vector<HostTier::Onboard> HostTier::take_arrived(int64_t num_completed) {
  std::vector<Onboard> over;
  while (!onboards_.empty() && onboards_.front().step_id < num_completed) {
    over.push_back(std::move(onboards_.front()));
    onboards_.pop_front();
  }
  return over;
}

std::vector<HostTier::Onboard> HostTier::take_aborted(int64_t last_issued) {
  std::vector<Onboard> over;
  while (!onboards_.empty() && onboards_.back().step_id > last_issued) {
    over.push_back(std::move(onboards_.back()));
    onboards_.pop_back();
  }
  std::reverse(over.begin(), over.end());
  return over;
}

bool HostTier::may_publish(const Onboard& onboard) const {
  if (onboard.chain == nullptr) return false;
  const int64_t last = (*groups_)[onboard.group].hash_index(onboard.column);
  const Hash& hash = onboard.chain->known_hash(last);
  return pages_->holds(onboard.page, hash, onboard.group) &&
         device_->hash_of(onboard.block) == nullptr;
}

void HostTier::finish(const std::vector<Onboard>& over) {
  std::vector<BlockId> blocks, pages;
  for (auto each = over.rbegin(); each != over.rend(); ++each) {
    --num_onboards_[each->block];
    blocks.push_back(each->block);
    pages.push_back(each->page);
  }
  device_->release(blocks.data(), static_cast<int64_t>(blocks.size()));
  pages_->release(pages.data(), static_cast<int64_t>(pages.size()));
}

void HostTier::check_invariants(PerBlock<int32_t>* device, PerBlock<int32_t>* host) const {
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

}  // namespace kvcache
