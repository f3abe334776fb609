// Which blocks a row gets: judged first, without a change, then taken.
#include <algorithm>

#include "core/manager/manager.h"

namespace kvcache {

const PrefixHit& Manager::find(const TokenChain& chain, bool with_partial, bool with_host) {
  static const std::vector<Hash> kNone;
  const bool reads = options_.enable_caching && chain.read_cache() && chain.num_tokens() > 0;
  return finder_.find(reads ? chain.known_hashes() : kNone,
                      std::max<int64_t>(chain.num_tokens() - 1, 0), with_partial, with_host);
}

int64_t Manager::num_encoder_blocks(const CacheGroup& group, const TokenChain& chain) const {
  return ceil_div(chain.num_encoder_tokens(), group.block_size);
}

// What `held` needs so that tokens start to after - 1 have slots; into demand_.
Manager::Verdict Manager::judge(const RowBlocks* held, int64_t start, int64_t after,
                                int64_t lookahead, int64_t num_free, int64_t num_kept_free,
                                bool may_share) {
  int64_t num_new = 0;
  const bool frees_at_once = !frees_.defers(steps().last_issued);
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = held[group.id];
    const auto size = static_cast<int64_t>(each.blocks.size());
    Demand& demand = demand_[group.id];
    demand = {0, each.num_dropped, 0, 0};
    if (group.holds_state()) {
      demand.num_new = after > size * group.block_size;
      if (may_share && demand.num_new == 0) count_shared(group, each, after - 1, after, &demand);
    } else if (group.holds_tokens()) {
      if (after + lookahead > size * group.block_size) {
        const int64_t most =
            std::min(ceil_div(after + lookahead, group.block_size), group.max_blocks);
        demand.num_new = std::max<int64_t>(most - size, 0);
      }
      if (may_share) count_shared(group, each, start, after + lookahead, &demand);
      const bool is_new = held == candidate_.data();
      if (options_.computes_whole_prompt && is_new && size == each.num_dropped) {
        // The whole prompt is computed now, from its own K and V.
        demand.num_skipped =
            std::clamp<int64_t>(group.first_needed_block(after) - size, 0, demand.num_new);
        demand.num_new -= demand.num_skipped;
      }
      demand.drop_to = std::max(each.num_dropped, std::min(group.first_needed_block(start), size));
      // Blocks that leave a window make room for what comes, unless a step may still read them.
      for (int64_t b = each.num_dropped; b < demand.drop_to && frees_at_once; ++b) {
        num_free += pool_.ref_count(each.blocks[static_cast<size_t>(b)]) == 1;
      }
    }
    num_new += demand.num_new + demand.num_shared;
  }
  if (num_free - num_new < num_kept_free) return {Status::kWait};
  const int64_t kept = std::max(num_kept_free, options_.watermark_blocks);
  return {Status::kServed, std::max<int64_t>(num_free - num_new - kept, 0)};
}

// Blocks in which tokens start to stop - 1 are written, and that others hold.
void Manager::count_shared(const CacheGroup& group, const RowBlocks& held, int64_t start,
                           int64_t stop, Demand* demand) const {
  const int64_t last =
      std::min(ceil_div(stop, group.block_size), static_cast<int64_t>(held.blocks.size()));
  for (int64_t b = start / group.block_size; b < last; ++b) {
    demand->num_shared += is_shared(held.blocks[static_cast<size_t>(b)]);
  }
}

// Whether a block that may be written behind token `start` is held by others.
bool Manager::shares_from(int32_t row, int64_t start) const {
  for (const CacheGroup& group : groups_) {
    const RowBlocks& each = rows_.blocks(row)[group.id];
    const int64_t stop = static_cast<int64_t>(each.blocks.size()) * group.block_size;
    Demand demand;
    if (group.is_cacheable()) {
      count_shared(group, each, group.holds_state() ? stop - 1 : start, stop, &demand);
    }
    if (demand.num_shared > 0) return true;
  }
  return false;
}

// References of rows: not those of requests that have left, nor of loads.
int64_t Manager::num_holders(BlockId id) const {
  int64_t n = pool_.ref_count(id) - frees_.num_waiting_of(id);
  if (host_ != nullptr) n -= host_->num_onboards_into(id);
  return n;
}

// Whether several rows hold the block. One that a row of this step has left for a copy of its own
// is held until the step ends, too.
bool Manager::is_shared(BlockId id) const {
  if (id == kNullBlock || pool_.ref_count(id) == 1) return false;
  return num_holders(id) - plan_.num_held(id) > 1;
}

// Blocks that a request holds when its last known token runs alone.
int64_t Manager::num_blocks_ever(const TokenChain& chain) const {
  int64_t num_blocks = 0;
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) {
      num_blocks += num_encoder_blocks(group, chain);
      continue;
    }
    const int64_t all = ceil_div(chain.num_tokens(), group.block_size);
    num_blocks += group.holds_state()
                      ? std::min<int64_t>(all, 2)  // and the page that it is copied from
                      : all - group.first_needed_block(chain.num_tokens() - 1);
  }
  return num_blocks;
}

void Manager::set_hit(RowBlocks* held, const CacheGroup& group, const PrefixHit& hit) {
  const std::vector<BlockId>& blocks = hit.blocks[group.id];
  held->blocks.assign(blocks.begin(), blocks.end());
  held->num_published = static_cast<int64_t>(blocks.size());
  // Where a window begins inside the hit's last block, the block lacks what lies before: of its
  // parts only those behind the hit are right for who reads them.
  const bool is_whole =
      group.first_needed_token(hit.num_tokens) <= held->num_published * group.block_size;
  held->num_partial = is_whole ? held->num_published * group.num_hashes
                               : hit.num_tokens / (group.block_size / group.num_hashes);
  held->num_dropped = std::min(group.first_needed_block(hit.num_tokens), held->num_published);
  held->num_hits = held->num_published;
  held->source = hit.sources[group.id];
  held->host_source = kNullBlock;
  if (group.holds_state() && !hit.on_host[group.id].empty()) {
    // The state is loaded into the page that goes on from it.
    held->host_source = hit.on_host[group.id].back().page;
    held->num_dropped = held->num_published;
  }
}

Manager::Verdict Manager::judge_new(const TokenChain& chain, const PrefixHit& hit, int64_t after,
                                    int64_t lookahead, int64_t num_reserved) {
  int64_t num_free = pool_.num_free(), num_blocks = 0;
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = candidate_[group.id];
    set_hit(&each, group, hit);
    // Hits that are free stop being so when this request takes them: they cannot also be its new
    // ones. Those on the host take a free one.
    for (auto b = each.num_dropped; b < static_cast<int64_t>(each.blocks.size()); ++b) {
      const BlockId id = each.blocks[static_cast<size_t>(b)];
      num_free -= id == kNullBlock || pool_.ref_count(id) == 0;
    }
    num_free -= each.source != kNullBlock && pool_.ref_count(each.source) == 0;
    num_blocks += each.num_alive();
  }
  Verdict verdict = judge(candidate_.data(), hit.num_tokens, after, lookahead, num_free,
                          options_.watermark_blocks + num_reserved);
  for (const CacheGroup& group : groups_) {
    Demand& demand = demand_[group.id];
    if (!group.is_cacheable()) {
      demand.num_new = num_encoder_blocks(group, chain);
      if (verdict.status == Status::kServed && demand.num_new > verdict.num_spare) {
        verdict.status = Status::kWait;
      }
      verdict.num_spare -= demand.num_new;
    }
    num_blocks += demand.num_new;
  }
  const int64_t most = pool_.num_total() - options_.watermark_blocks;
  if (std::max(num_blocks, num_blocks_ever(chain)) > most) return {Status::kNever};
  return rows_.has_free() ? verdict : Verdict{Status::kWait};
}

Manager::Verdict Manager::extend_row(int32_t row, int64_t num_rejected, int64_t num_tokens,
                                     int64_t lookahead) {
  Row& r = rows_[row];
  const int64_t start = r.num_computed - num_rejected;
  const int64_t after = start + num_tokens;
  safe_start_ = start;
  const Verdict verdict = r.on_host ? resume(row, start, after, lookahead)
                                    : judge(rows_.blocks(row), start, after, lookahead,
                                            pool_.num_free(), 0, r.may_share);
  if (verdict.status != Status::kServed && r.on_host) return verdict;
  if (verdict.status != Status::kServed) {
    int64_t num_blocks = 0;
    for (const CacheGroup& group : groups_) {
      const RowBlocks& each = rows_.blocks(row)[group.id];
      num_blocks += static_cast<int64_t>(each.blocks.size()) - demand_[group.id].drop_to +
                    demand_[group.id].num_new;
    }
    return {num_blocks > pool_.num_total() ? Status::kNever : Status::kWait};
  }
  if (r.on_host) move_in(row, start, nullptr);
  r.start = start;
  r.num_computed = after;
  allocate_blocks(row, start, after, verdict.num_spare);
  if (r.may_share) r.may_share = shares_from(row, start);
  if (r.has_forked) {
    // What it writes it has computed, though it began in another's block.
    for (const CacheGroup& group : groups_) {
      RowBlocks& each = rows_.blocks(row)[group.id];
      const int64_t first = (group.holds_state() ? after - 1 : start) / group.block_size;
      each.num_hits = std::min(each.num_hits, first);
    }
  }
  return verdict;
}

Slots Manager::admit(const std::shared_ptr<TokenChain>& chain, const PrefixHit& hit, int64_t after,
                     int64_t lookahead, int64_t num_reserved, bool by_step) {
  const Verdict verdict = judge_new(*chain, hit, after, lookahead, num_reserved);
  if (verdict.status != Status::kServed) return {verdict.status, -1, {}, {}};
  Slots slots{Status::kServed, rows_.take(), {}, {}};
  Row& r = rows_[slots.row];
  safe_start_ = hit.num_tokens;
  rows_.info(slots.row) = {chain->num_tokens(), hit.num_tokens, 0};
  r.chain = chain;
  r.start = hit.num_tokens;
  r.num_computed = after;
  r.by_step = by_step;
  std::swap_ranges(candidate_.begin(), candidate_.end(), rows_.blocks(slots.row));
  take_hits(slots.row, hit);
  allocate_blocks(slots.row, hit.num_tokens, after, verdict.num_spare);
  publisher_.refresh(slots.row);
  if (chain->read_cache()) {
    stats_.add(chain->num_tokens(), hit.num_tokens, hit.num_tokens - first_host_token(hit));
  }
  return slots;
}

// From here on, the hit rests on what was on the host.
int64_t Manager::first_host_token(const PrefixHit& hit) const {
  int64_t first = hit.num_tokens;
  for (const CacheGroup& group : groups_) {
    const std::vector<PrefixHit::HostBlock>& on_host = hit.on_host[group.id];
    if (!on_host.empty()) first = std::min(first, on_host.front().column * group.block_size);
  }
  return first;
}

void Manager::take_hits(int32_t row, const PrefixHit& hit) {
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    const RowBlocks& each = rows_.blocks(row)[group.id];
    const BlockId source = hit.sources[group.id];
    if (source != kNullBlock) {
      pool_.retain(&source, 1);  // nobody may get it before it was copied
      pool_.hit(&source, 1);
      plan_.hold(source);
    }
    if (hit.num_host_blocks == 0) {
      pool_.retain(each.blocks.data() + each.num_dropped, each.num_alive());
      note_hits(each.blocks.data() + each.num_dropped, each.num_alive());
      continue;
    }
    std::vector<BlockId> ids, pages;
    for (int64_t b = each.num_dropped; b < each.size(); ++b) {
      if (each[b] != kNullBlock) ids.push_back(each[b]);
    }
    for (const PrefixHit::HostBlock& on_host : hit.on_host[group.id]) {
      if (on_host.column >= each.num_dropped) pages.push_back(on_host.page);
    }
    if (each.host_source != kNullBlock) pages.push_back(each.host_source);
    pool_.retain(ids.data(), static_cast<int64_t>(ids.size()));
    note_hits(ids.data(), static_cast<int64_t>(ids.size()));
    host_->pages().retain(pages.data(), static_cast<int64_t>(pages.size()));
    host_->pages().hit(pages.data(), static_cast<int64_t>(pages.size()));
  }
  // All that is taken is held: what is onboarded evicts nothing of it.
  if (hit.num_host_blocks > 0) onboard_hits(row, hit);
}

// Blocks for the part of a hit that is on the host.
void Manager::onboard_hits(int32_t row, const PrefixHit& hit) {
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = rows_.blocks(row)[group.id];
    for (const PrefixHit::HostBlock& on_host : hit.on_host[group.id]) {
      if (on_host.column < each.num_dropped) continue;
      BlockId& id = each[on_host.column];
      pool_.allocate(1, &id);
      onboard(row, group, on_host.column, on_host.page, id, /*is_hit=*/true);
      ++host_->mutable_counts()->loaded_blocks;
    }
  }
}

// A page of the host comes into a block of the row. Takes over one reference of the page.
void Manager::onboard(int32_t row, const CacheGroup& group, int64_t column, BlockId page,
                      BlockId block, bool is_hit) {
  host_->onboard(&plan_, {steps().num_steps, page, block, column, group.id,
                          is_hit ? rows_[row].chain : std::shared_ptr<TokenChain>()});
  safe_start_ = std::min(safe_start_, column * group.block_size);
}

void Manager::note_hits(const BlockId* ids, int64_t n) {
  if (n == 0) return;
  pool_.hit(ids, n);
  if (host_ != nullptr) host_->on_hit(ids, n);
}

// Does what `judge` found, in demand_, to be possible.
void Manager::allocate_blocks(int32_t row, int64_t start, int64_t after, int64_t num_spare) {
  RowBlocks* h = rows_.blocks(row);
  int64_t num_new = 0;
  for (const CacheGroup& group : groups_) {
    Demand& demand = demand_[group.id];
    RowBlocks& each = h[group.id];
    sizes_[group.id] = static_cast<int64_t>(each.blocks.size());
    if (demand.num_skipped > 0) {
      each.blocks.resize(each.blocks.size() + static_cast<size_t>(demand.num_skipped), kNullBlock);
      each.num_dropped = static_cast<int64_t>(each.blocks.size());
    }
    const auto size = static_cast<int64_t>(each.blocks.size());
    if (demand.drop_to > h[group.id].num_dropped) drop(row, group, demand.drop_to);
    if (demand.num_new > 0 && group.holds_tokens()) {
      const int64_t more =
          std::min({group.num_prealloc, num_spare, group.max_blocks - size - demand.num_new});
      demand.num_new += more;
      num_spare -= more;
    }
    num_new += demand.num_new + demand.num_shared;
  }
  if (num_new == 0) return;
  taken_.resize(static_cast<size_t>(num_new));
  pool_.allocate(num_new, taken_.data());
  const BlockId* next = taken_.data();
  for (const CacheGroup& group : groups_) {
    RowBlocks& each = h[group.id];
    if (demand_[group.id].num_shared > 0) copy_on_write(row, group, start, after, &next);
    const int64_t n = demand_[group.id].num_new;
    if (n == 0) continue;
    if (group.holds_state()) {
      move_state(row, group, start, after, *next);
    } else {
      each.blocks.insert(each.blocks.end(), next, next + n);
    }
    next += n;
    if (each.source != kNullBlock) {
      plan_.copy(each.source, each[sizes_[group.id]]);
      note_dropped(row, group, sizes_[group.id], each.source);  // had, and not kept
      safe_start_ = std::min(safe_start_, sizes_[group.id] * group.block_size);
      each.source = kNullBlock;
    }
  }
}

// The row's own blocks in place of those that it writes and others hold. What they hold of it is
// copied; where that is nothing, they are only replaced.
void Manager::copy_on_write(int32_t row, const CacheGroup& group, int64_t start, int64_t after,
                            const BlockId** next) {
  RowBlocks& each = rows_.blocks(row)[group.id];
  const int64_t first = (group.holds_state() ? after - 1 : start) / group.block_size;
  int64_t num_left = demand_[group.id].num_shared;
  for (int64_t b = first; num_left > 0; ++b) {
    BlockId& id = each.blocks[static_cast<size_t>(b)];
    if (!is_shared(id)) continue;
    --num_left;
    const BlockId shared = std::exchange(id, *(*next)++);
    each.num_hits = std::min(each.num_hits, b);
    plan_.replace(row, group.id, b, id);
    if (group.holds_state() || b * group.block_size < start) {
      note_dropped(row, group, b, shared);  // had, and not kept
      safe_start_ = std::min(safe_start_, b * group.block_size);
      plan_.copy(shared, id);
      if (plan_.is_step()) {
        plan_.hold(shared);  // until it is copied
        continue;
      }
    }
    frees_.release_or_defer(&shared, 1);
  }
}

void Manager::drop(int32_t row, const CacheGroup& group, int64_t drop_to) {
  RowBlocks& each = rows_.blocks(row)[group.id];
  dropped_.clear();
  for (int64_t b = each.num_dropped; b < drop_to; ++b) {
    BlockId& id = each.blocks[static_cast<size_t>(b)];
    dropped_.push_back(id);
    note_dropped(row, group, b, id);
    id = kNullBlock;
    plan_.replace(row, group.id, b, kNullBlock);
  }
  each.num_dropped = drop_to;
  frees_.release_or_defer(dropped_.data(), static_cast<int64_t>(dropped_.size()));
}

void Manager::move_state(int32_t row, const CacheGroup& group, int64_t start, int64_t after,
                         BlockId page) {
  RowBlocks& each = rows_.blocks(row)[group.id];
  if (each.host_source != kNullBlock) {
    onboard(row, group, (after - 1) / group.block_size, each.host_source, page, /*is_hit=*/false);
    each.host_source = kNullBlock;
    each.num_dropped = (after - 1) / group.block_size;
  } else if (start > 0) {
    const BlockId source = each.blocks.back();
    plan_.copy(source, page);
    state_moves_.push_back({row, group.id, static_cast<int64_t>(each.blocks.size()) - 1, start});
  } else {
    plan_.zero(page);
    each.num_dropped = (after - 1) / group.block_size;
  }
  each.blocks.resize(static_cast<size_t>((after - 1) / group.block_size), kNullBlock);
  each.blocks.push_back(page);
}

void Manager::serve_rows(const StepRequest& request) {
  for (int64_t i = 0; i < request.num_rows; ++i) {
    const int32_t row = request.rows[i];
    const int64_t rejected = request.num_rejected == nullptr ? 0 : request.num_rejected[i];
    const int64_t start = rows_[row].num_computed - rejected;
    const int64_t lookahead =
        request.lookahead == nullptr ? request.num_lookahead : request.lookahead[i];
    const Status status = extend_row(row, rejected, request.num_tokens[i], lookahead).status;
    if (status != Status::kServed) take_back_ids_of(request, i);
    answer(row, status, start, /*is_new=*/false);
  }
}

void Manager::serve_new(const StepRequest& request) {
  for (size_t i = 0; i < request.new_rows.size(); ++i) {
    const NewRow& asked = request.new_rows[i];
    const int64_t lookahead = request.lookahead == nullptr
                                  ? request.num_lookahead
                                  : request.lookahead[request.num_rows + static_cast<int64_t>(i)];
    Slots slots{Status::kWait, -1, {}, {}};
    int64_t start = 0;
    // A hit inside a block takes that block and the copy: without it, less may do.
    for (bool with_partial : {true, false}) {
      const PrefixHit* hit = &find(*asked.chain, with_partial, /*with_host=*/true);
      if (hit->num_host_blocks > asked.max_host_blocks) {
        hit = &find(*asked.chain, with_partial, /*with_host=*/false);
      }
      start = hit->num_tokens;
      const int64_t after = std::min(start + asked.num_tokens, asked.chain->num_tokens());
      slots = admit(asked.chain, *hit, after, lookahead, request.num_reserved_blocks,
                    /*by_step=*/true);
      if (slots.status != Status::kWait || !hit->copies_partial()) break;
    }
    if (slots.status == Status::kServed) plan_.clear(slots.row);
    answer(slots.row, slots.status, start, /*is_new=*/true);
  }
}

// Publishes what the step's rows have filled, and lets go of the pages that states have left.
void Manager::end_state_moves() {
  for (const StateMove& move : state_moves_) {
    publisher_.publish_state(move.row, groups_[move.group], move.num_tokens);
  }
  for (const StepJournal::Served& served : journal_.last().rows) publisher_.publish(served.row);
  for (const StateMove& move : state_moves_) {
    RowBlocks& each = rows_.blocks(move.row)[move.group];
    BlockId& id = each.blocks[static_cast<size_t>(move.block)];
    note_dropped(move.row, groups_[move.group], move.block, id);
    frees_.release_or_defer(&id, 1, steps().num_steps);
    id = kNullBlock;
    each.num_dropped = static_cast<int64_t>(each.blocks.size()) - 1;
    // A row that is new tells its whole table, this entry included.
    plan_.replace(move.row, move.group, move.block, kNullBlock);
  }
  state_moves_.clear();
}

}  // namespace kvcache
