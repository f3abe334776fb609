// Which blocks a row gets: judged first, without a change, then taken.
#include <algorithm>

#include "core/manager.h"

namespace kvcache {

const PrefixHit& Manager::find(const TokenChain& chain, bool with_parts) {
  static const std::vector<Hash> kNone;
  const bool reads = options_.enable_caching && chain.read_cache() && chain.num_tokens() > 0;
  return finder_.find(reads ? chain.known_hashes() : kNone,
                      std::max<int64_t>(chain.num_tokens() - 1, 0), with_parts);
}

int64_t Manager::num_encoder_blocks(const CacheGroup& group, const TokenChain& chain) const {
  return ceil_div(chain.num_encoder_tokens(), group.block_size);
}

// What `held` needs so that tokens start to after - 1 have slots; into demand_.
Manager::Verdict Manager::judge(const Held* held, int64_t start, int64_t after, int64_t lookahead,
                                int64_t num_free, int64_t num_kept_free) {
  int64_t num_new = 0;
  const bool frees_at_once = !is_fenced(last_issued_);
  for (const CacheGroup& group : groups_) {
    const Held& each = held[group.id];
    const auto size = static_cast<int64_t>(each.blocks.size());
    Demand& demand = demand_[group.id];
    demand = {0, each.num_dropped};
    if (group.holds_state()) {
      demand.num_new = after > size * group.block_size;
    } else if (group.holds_tokens()) {
      if (after + lookahead > size * group.block_size) {
        const int64_t most =
            std::min(ceil_div(after + lookahead, group.block_size), group.max_blocks);
        demand.num_new = std::max<int64_t>(most - size, 0);
      }
      demand.drop_to = std::max(each.num_dropped, std::min(group.first_needed_block(start), size));
      // Blocks that leave a window make room for what comes, unless a step may still read them.
      for (int64_t b = each.num_dropped; b < demand.drop_to && frees_at_once; ++b) {
        num_free += pool_.ref_count(each.blocks[static_cast<size_t>(b)]) == 1;
      }
    }
    num_new += demand.num_new;
  }
  if (num_free - num_new < num_kept_free) return {Status::kWait};
  const int64_t kept = std::max(num_kept_free, options_.watermark_blocks);
  return {Status::kServed, std::max<int64_t>(num_free - num_new - kept, 0)};
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

void Manager::set_hit(Held* held, const CacheGroup& group, const PrefixHit& hit) {
  const std::vector<BlockId>& blocks = hit.blocks[group.id];
  held->blocks.assign(blocks.begin(), blocks.end());
  held->num_published = static_cast<int64_t>(blocks.size());
  // Where a window begins inside the hit's last block, the block lacks what lies before: of its
  // parts only those behind the hit are right for who reads them.
  const bool is_whole =
      group.first_needed_token(hit.num_tokens) <= held->num_published * group.block_size;
  held->num_parts = is_whole ? held->num_published * group.num_hashes
                             : hit.num_tokens / (group.block_size / group.num_hashes);
  held->num_dropped = std::min(group.first_needed_block(hit.num_tokens), held->num_published);
  held->num_hits = held->num_published;
  held->source = hit.sources[group.id];
  held->num_copied = held->source == kNullBlock ? 0 : hit.num_tokens;
}

Manager::Verdict Manager::judge_new(const TokenChain& chain, const PrefixHit& hit, int64_t after,
                                    int64_t lookahead, int64_t num_reserved) {
  int64_t num_free = pool_.num_free(), num_blocks = 0;
  for (const CacheGroup& group : groups_) {
    Held& each = candidate_[group.id];
    set_hit(&each, group, hit);
    // Hits that are free stop being so when this request takes them: they cannot also be its new
    // ones.
    num_free -= pool_.count_free(each.blocks.data() + each.num_dropped, each.num_alive());
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
  if (free_rows_.empty() && options_.max_num_reqs > 0 &&
      static_cast<int64_t>(rows_.size()) >= options_.max_num_reqs) {
    return {Status::kWait};
  }
  return verdict;
}

Manager::Verdict Manager::grow(int32_t row, int64_t num_rejected, int64_t num_tokens,
                               int64_t lookahead) {
  Row& r = rows_[row];
  const int64_t start = r.num_computed - num_rejected;
  const int64_t after = start + num_tokens;
  const Verdict verdict = judge(held(row), start, after, lookahead, pool_.num_free(), 0);
  if (verdict.status != Status::kServed) {
    int64_t num_blocks = 0;
    for (const CacheGroup& group : groups_) {
      const Held& each = held(row)[group.id];
      num_blocks += static_cast<int64_t>(each.blocks.size()) - demand_[group.id].drop_to +
                    demand_[group.id].num_new;
    }
    return {num_blocks > pool_.num_total() ? Status::kNever : Status::kWait};
  }
  r.start = start;
  r.num_computed = after;
  supply(row, start, after, verdict.num_spare);
  return verdict;
}

Slots Manager::admit(const std::shared_ptr<TokenChain>& chain, const PrefixHit& hit, int64_t after,
                     int64_t lookahead, int64_t num_reserved, bool by_step) {
  const Verdict verdict = judge_new(*chain, hit, after, lookahead, num_reserved);
  if (verdict.status != Status::kServed) return {verdict.status, -1, {}};
  Slots slots{Status::kServed, take_row(), {}};
  Row& r = rows_[slots.row];
  r.chain = chain;
  r.start = hit.num_tokens;
  r.num_computed = after;
  r.admission = ++num_admissions_;
  r.by_step = by_step;
  std::swap_ranges(candidate_.begin(), candidate_.end(), held(slots.row));
  take_hits(held(slots.row), hit);
  supply(slots.row, hit.num_tokens, after, verdict.num_spare);
  r.next_publish = next_publish(r, held(slots.row));
  if (chain->read_cache()) stats_.add(chain->num_tokens(), hit.num_tokens);
  return slots;
}

int32_t Manager::take_row() {
  ++num_rows_;
  if (!free_rows_.empty()) {
    const int32_t row = free_rows_.top();
    free_rows_.pop();
    return row;
  }
  rows_.emplace_back();
  held_.resize(held_.size() + groups_.size());
  return static_cast<int32_t>(rows_.size()) - 1;
}

int64_t Manager::num_written(int32_t row, const CacheGroup& group) const {
  return std::min(static_cast<int64_t>(held(row)[group.id].blocks.size()),
                  ceil_div(rows_[row].num_computed, group.block_size));
}

void Manager::take_hits(Held* held, const PrefixHit& hit) {
  for (const CacheGroup& group : groups_) {
    if (!group.is_cacheable()) continue;
    const Held& each = held[group.id];
    pool_.retain(each.blocks.data() + each.num_dropped, each.num_alive());
    const BlockId source = hit.sources[group.id];
    if (source == kNullBlock) continue;
    pool_.retain(&source, 1);  // nobody may get it before it was copied
    borrowed_.push_back(source);
  }
}

// Does what `judge` found, in demand_, to be possible.
void Manager::supply(int32_t row, int64_t start, int64_t after, int64_t num_spare) {
  Held* h = held(row);
  int64_t num_new = 0;
  for (const CacheGroup& group : groups_) {
    Demand& demand = demand_[group.id];
    const auto size = static_cast<int64_t>(h[group.id].blocks.size());
    sizes_[group.id] = size;
    if (demand.drop_to > h[group.id].num_dropped) drop(row, group, demand.drop_to);
    if (demand.num_new > 0 && group.holds_tokens()) {
      const int64_t more =
          std::min({group.num_prealloc, num_spare, group.max_blocks - size - demand.num_new});
      demand.num_new += more;
      num_spare -= more;
    }
    num_new += demand.num_new;
  }
  if (num_new == 0) return;
  taken_.resize(static_cast<size_t>(num_new));
  pool_.allocate(num_new, taken_.data());
  const BlockId* next = taken_.data();
  for (const CacheGroup& group : groups_) {
    Held& each = h[group.id];
    const int64_t n = demand_[group.id].num_new;
    if (n == 0) continue;
    if (group.holds_state()) {
      move_state(row, group, start, after, *next);
    } else {
      each.blocks.insert(each.blocks.end(), next, next + n);
    }
    next += n;
    if (each.source != kNullBlock) {
      delta_->copy.insert(delta_->copy.end(),
                          {each.source, each.blocks[static_cast<size_t>(sizes_[group.id])]});
      note_dropped(row, group, sizes_[group.id], each.source);  // had, and not kept
      each.source = kNullBlock;
    }
  }
}

void Manager::drop(int32_t row, const CacheGroup& group, int64_t drop_to) {
  Held& each = held(row)[group.id];
  dropped_.clear();
  for (int64_t b = each.num_dropped; b < drop_to; ++b) {
    BlockId& id = each.blocks[static_cast<size_t>(b)];
    dropped_.push_back(id);
    note_dropped(row, group, b, id);
    id = kNullBlock;
    if (delta_ != nullptr && !rows_[row].must_resend) {
      std::vector<int32_t>& replace = delta_->groups[group.id].replace;
      replace.insert(replace.end(), {row, static_cast<int32_t>(b), kNullBlock});
    }
  }
  each.num_dropped = drop_to;
  give_back(dropped_.data(), static_cast<int64_t>(dropped_.size()));
}

void Manager::move_state(int32_t row, const CacheGroup& group, int64_t start, int64_t after,
                         BlockId page) {
  Held& each = held(row)[group.id];
  if (start > 0) {
    const BlockId source = each.blocks.back();
    delta_->copy.insert(delta_->copy.end(), {source, page});
    state_moves_.push_back({row, group.id, static_cast<int64_t>(each.blocks.size()) - 1, start});
  } else {
    delta_->zero.push_back(page);
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
    const Status status = grow(row, rejected, request.num_tokens[i], lookahead).status;
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
    Slots slots{Status::kWait, -1, {}};
    int64_t start = 0;
    // A hit inside a block takes that block and the copy: without it, less may do.
    for (bool with_parts : {true, false}) {
      const PrefixHit& hit = find(*asked.chain, with_parts);
      start = hit.num_tokens;
      const int64_t after = std::min(start + asked.num_tokens, asked.chain->num_tokens());
      slots = admit(asked.chain, hit, after, lookahead, request.num_reserved_blocks,
                    /*by_step=*/true);
      if (slots.status != Status::kWait || !copies_parts(hit)) break;
    }
    if (slots.status == Status::kServed) delta_->clear_rows.push_back(slots.row);
    answer(slots.row, slots.status, start, /*is_new=*/true);
  }
}

bool Manager::copies_parts(const PrefixHit& hit) {
  return std::any_of(hit.sources.begin(), hit.sources.end(),
                     [](BlockId source) { return source != kNullBlock; });
}

// Publishes what the step's rows have filled, and lets go of the pages that states have left.
void Manager::end_state_moves() {
  for (const StateMove& move : state_moves_) {
    publish_state(rows_[move.row], groups_[move.group], &held(move.row)[move.group],
                  move.num_tokens);
  }
  for (const Step::Served& served : in_flight_.back().rows) publish(served.row);
  for (const StateMove& move : state_moves_) {
    Held& each = held(move.row)[move.group];
    BlockId& id = each.blocks[static_cast<size_t>(move.block)];
    note_dropped(move.row, groups_[move.group], move.block, id);
    give_back(&id, 1, num_steps_);
    id = kNullBlock;
    each.num_dropped = static_cast<int64_t>(each.blocks.size()) - 1;
    if (rows_[move.row].must_resend) continue;
    // A row that is new tells its whole table, this entry included.
    std::vector<int32_t>& replace = delta_->groups[move.group].replace;
    replace.insert(replace.end(), {move.row, static_cast<int32_t>(move.block), kNullBlock});
  }
  state_moves_.clear();
}

}  // namespace kvcache
