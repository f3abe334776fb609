// SPDX-License-Identifier: Apache-2.0
// Each call checks its input, appends and hashes tokens, and delegates the work to a component.
#include "core/manager/manager.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "core/errors.h"

namespace kvcache {

namespace {

bool copies_hits(const std::vector<CacheGroup>& groups) {
  return std::none_of(groups.begin(), groups.end(), [](const CacheGroup& group) {
    const PageTraits& traits = group.rules->traits;
    return traits.updates_in_place || (traits.appends && !group.is_cached);
  });
}

// Returns the tokens per block, by group; 0 for a group that is not cached.
std::vector<int64_t> cached_block_sizes(const std::vector<CacheGroup>& groups) {
  std::vector<int64_t> sizes;
  for (const CacheGroup& group : groups) {
    sizes.push_back(group.is_cached ? group.block_size : 0);
  }
  return sizes;
}

}  // namespace

Manager::Manager(const ManagerOptions& options)
    : setup_(options),
      prefault_(setup_.options.prefault),
      rows_(&setup_.groups, setup_.options.max_num_reqs),
      steps_(setup_.groups.size(), setup_.options.num_blocks),
      tiers_(&setup_, &steps_),
      context_{&setup_.groups, setup_.hash_block_size, &tiers_.pool(),    tiers_.host(),
               &rows_,         &steps_.plan(),         &steps_.journal(), &tiers_.frees()},
      stats_(cached_block_sizes(setup_.groups)),
      finder_({&tiers_.pool(), tiers_.host_pages(), &setup_.groups, &setup_.ends,
               setup_.hash_block_size},
              setup_.options),
      misses_(setup_.options.explain_misses == 0
                  ? nullptr
                  : std::make_unique<MissReasons>(context_, &setup_.ends, setup_.options)),
      copies_hits_(copies_hits(setup_.groups)),
      publisher_(context_, &stats_, setup_.options),
      checks_(&setup_, context_),
      intake_(context_, &publisher_, &checks_),
      release_(context_, &tiers_.clock()),
      swap_(context_, &publisher_, &release_),
      server_(context_,
              {&finder_, &setup_.ends, &publisher_, &swap_, &intake_, &stats_, misses_.get(),
               tiers_.compared()},
              setup_.options),
      recovery_(context_, &publisher_, &release_, &server_),
      pins_(&tiers_.pool()),
      reads_(
          {&setup_, &guard_, &rows_, &steps_, &tiers_, &checks_, &swap_, &server_, misses_.get()}) {
  tiers_.share(&guard_.soundness());
  if (misses_ != nullptr) tiers_.record_lost(misses_->lost());
  prefault_.commit();
}

void Manager::set_now(int64_t ms) {
  guard_.check_caller();
  tiers_.set_now(ms);
}

EventLog::Drained Manager::drain_events() {
  const Call call(this);
  return tiers_.drain_events();
}

void Manager::clear_stats() {
  const Call call(this);
  stats_.clear();
  tiers_.clear_counts();
  if (misses_ != nullptr) misses_->clear();
}

const HashList& Manager::hashes(TokenChain& chain) {
  const Call call(this);
  return chain.hashes();
}

const PrefixHit& Manager::lookup(TokenChain& chain, bool with_host, bool with_partial,
                                 std::optional<bool> read_cache, int64_t most_tokens) {
  const Call call(this);
  const bool reads = chain.reads(read_cache);
  if (reads) intake_.hash_ahead(chain, /*reads=*/true);
  return finder_.find(chain, with_partial && copies_hits_, with_host, reads, most_tokens);
}

MissReport Manager::explain(const std::shared_ptr<TokenChain>& chain, int32_t row) {
  const Call call(this);
  if (misses_ == nullptr) {
    throw_invalid("explain_misses is None: expected a manager with this option");
  }
  if (row >= 0) return misses_->of_row(row);
  NewRow asked;
  asked.chain = chain;
  if (asked.reads()) intake_.hash_ahead(*chain, /*reads=*/true);
  const PrefixHit& hit =
      finder_.find(*chain, /*with_partial=*/true, /*with_host=*/true, asked.reads());
  return misses_->of_new(asked,
                         {hit.num_tokens, hit.num_tokens, hit.num_shared_tokens, hit.num_tokens});
}

std::vector<BlockId> Manager::take_copies() {
  const Call call(this);
  const Soundness::Change change = this->change("take_copies");
  return tiers_.frees().take_copies();
}

Status Manager::would_fit(const NewRow& asked, bool whole) {
  const Call call(this);
  checks_.check_counts(asked);
  if (whole && asked.external.is_delayed) {
    throw_invalid("whole and external.delayed are both set: expected at most one of them");
  }
  checks_.check_new(*asked.chain);
  if (asked.external.num_tokens == 0) checks_.check_new_places(asked, /*start=*/0);
  if (asked.reads()) intake_.hash_ahead(*asked.chain, /*reads=*/true);
  external_hits({asked});
  return server_.would_fit(asked, whole);
}

Status Manager::would_extend(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens) {
  const Call call(this);
  rows_.at(row);
  checks_.check_not_receiving(row);
  checked_size("num_tokens", num_tokens, 1);
  checked_size("num_lookahead_tokens", num_lookahead_tokens, 0);
  checks_.check_length(rows_[row].num_computed + num_tokens, "a row");
  checks_.check_drafts(row, rows_[row].num_computed, num_tokens, rows_[row].chain->num_tokens());
  checks_.check_places(rows_[row].num_computed, num_tokens + num_lookahead_tokens, "a row");
  return server_.would_extend(row, num_tokens, num_lookahead_tokens);
}

int64_t Manager::checkpoint_tokens(TokenChain& chain, int32_t row, int64_t num_tokens) {
  const Call call(this);
  checked_size("num_tokens", num_tokens, 1);
  const int64_t num_known = chain.num_tokens();
  // Calls outside of steps copy no states, so their hits consist of whole blocks.
  const bool by_step = row >= 0 ? rows_.at(row).by_step() : !setup_.options.engine_copies_states;
  int64_t start = 0, num_shared = 0, num_prompt = num_known;
  if (row >= 0) {
    start = rows_[row].num_computed;
    num_shared = rows_.info(row).num_shared;
    num_prompt = std::min(rows_.info(row).num_prompt, num_known);
  } else {
    checks_.check_new(chain);
    if (chain.read_cache()) intake_.hash_ahead(chain, /*reads=*/true);
    const PrefixHit& hit = finder_.find(chain, by_step, /*with_host=*/by_step, chain.read_cache());
    start = hit.num_tokens;
    num_shared = hit.num_shared_tokens;
  }
  const int64_t stop = std::max(start, std::min(start + num_tokens, num_known));
  if (!setup_.options.enable_caching || !chain.write_cache()) return stop - start;
  const int64_t last = setup_.ends.of_prompt(chain, num_prompt, by_step);
  const int64_t last_known = setup_.ends.of_prompt(chain, num_known, by_step);
  return setup_.ends.end_of_step({start, stop, by_step}, {num_shared, last, last_known}) - start;
}

int64_t Manager::pin(const std::string& session, TokenChain& chain) {
  const Call call(this);
  intake_.hash_ahead(chain, /*reads=*/true);
  const HashList& hashes = chain.known_hashes();
  return pins_.pin(session, hashes.data(), hashes.size(), setup_.groups);
}

int64_t Manager::unpin(const std::string& session) {
  const Call call(this);
  return pins_.unpin(session);
}

void Manager::evict(const BlockId* ids, int64_t n) {
  const Call call(this);
  const std::unordered_set<BlockId> evicted(ids, ids + n);
  recovery_.note_evicted([&evicted](BlockId id) { return evicted.count(id) > 0; });
  tiers_.pool().evict(ids, n);
}

const StepPlan& Manager::step(const StepRequest& request) {
  const Call call(this);
  checks_.check_step(request);
  const std::vector<int64_t> hits = external_hits(request.new_rows);
  intake_.take_in(request);
  if (misses_ != nullptr) misses_->release_dropped();
  pool().set_taker(Taker::kOther);
  // After this point, nothing is rejected.
  const Soundness::Change change = this->change("step");
  steps_.begin();
  steps_.plan().set_parts(request.num_rows, request.num_swap_out_rows);
  const std::vector<bool> have_left = swap_.leave(request);
  const size_t num_queued = tiers_.num_queued();
  server_.serve_rows(request);
  swap_.answer(request, have_left);
  server_.serve_new(request, hits);
  // Blocks are offloaded after rows have been served, because rows have priority.
  tiers_.offload_queued(num_queued);
  server_.publish_served();
  publisher_.publish_offloaded();
  tiers_.release_read();
  recovery_.give_again();
  return steps_.end(rows_);
}

// The lengths of the hits before external tokens, for requests that have external tokens.
std::vector<int64_t> Manager::external_hits(const std::vector<NewRow>& requests) {
  std::vector<int64_t> hits;
  for (size_t i = 0; i < requests.size(); ++i) {
    const NewRow& asked = requests[i];
    if (asked.external.num_tokens == 0) continue;
    intake_.hash_ahead(*asked.chain, asked.reads());
    hits.resize(requests.size());
    hits[i] = server_.num_hit_tokens(asked);
    checks_.check_external(asked, hits[i], /*ends_inside=*/false);
    checks_.check_new_places(asked, hits[i] + asked.external.num_tokens);
  }
  return hits;
}

// Returns the hit that consists of these blocks, which the caller has looked up. If it ends inside
// a block, the last block of each group is the source of the copy.
PrefixHit Manager::hit_of(const NewRow& asked, const std::vector<std::vector<BlockId>>& computed) {
  const bool is_empty = std::all_of(computed.begin(), computed.end(),
                                    [](const std::vector<BlockId>& ids) { return ids.empty(); });
  intake_.hash_ahead(*asked.chain, /*reads=*/!is_empty);
  if (!is_empty && copies_hits_ && asked.reads() && computed.size() == setup_.groups.size()) {
    const PrefixHit& hit =
        finder_.find(*asked.chain, /*with_partial=*/true, /*with_host=*/false, /*reads=*/true);
    if (hit.ends_inside(setup_.groups) && hit.has_ids(setup_.groups, computed)) return hit;
  }
  const int64_t num_tokens = checks_.check_computed(*asked.chain, computed, asked.reads());
  return PrefixHit::of_device(num_tokens, computed);
}

Slots Manager::admit(const NewRow& asked, const std::vector<std::vector<BlockId>>& computed) {
  const Call call(this);
  checks_.check_counts(asked);
  if (!setup_.options.engine_copies_states) checks_.check_has_no_state("admit");
  checks_.check_new(*asked.chain, /*least_tokens=*/0);  // tokens may arrive later
  PrefixHit hit = hit_of(asked, computed);
  hit.num_shared_tokens = asked.num_shared;
  const int64_t num_external = asked.external.num_tokens;
  checks_.check_external(asked, hit.num_tokens, hit.ends_inside(setup_.groups));
  checks_.check_new_places(asked, num_external == 0 ? 0 : hit.num_tokens + num_external);
  if (misses_ != nullptr) misses_->release_dropped();
  const Soundness::Change change = this->change("admit");
  return server_.allocate(asked, hit);
}

int64_t Manager::finish_receiving(int32_t row, int64_t num_tokens) {
  const Call call(this);
  checks_.check_receive(row, num_tokens);
  intake_.hash_ahead(*rows_[row].chain, /*reads=*/true);
  const Soundness::Change change = this->change("finish_receiving");
  recovery_.receive(row, rows_.info(row).num_hit + num_tokens);
  return rows_[row].num_computed;
}

Slots Manager::extend(const RowAsk& ask, bool lists_new) {
  const Call call(this);
  take_in(&ask, 1);
  const Soundness::Change change = this->change("extend");
  return server_.serve(ask, lists_new);
}

std::vector<Slots> Manager::advance(const std::vector<RowAsk>& asks) {
  const Call call(this);
  take_in(asks.data(), asks.size());
  const Soundness::Change change = this->change("advance");
  std::vector<Slots> slots;
  slots.reserve(asks.size());
  for (const RowAsk& ask : asks) slots.push_back(server_.serve(ask));
  return slots;
}

// Checks the requests and takes in their token ids.
void Manager::take_in(const RowAsk* asks, size_t n) {
  if (tiers_.frees().awaits_copies()) {  // these copies fill blocks that rows need to continue
    throw_invalid(
        "hits of admit end inside blocks, and their copies were not taken: expected a call to "
        "take_copies before requests continue");
  }
  rows_.begin_call();
  for (size_t i = 0; i < n; ++i) checks_.check_ask(asks[i]);
  intake_.take_in(asks, n);
}

void Manager::reject(int32_t row, int64_t num_tokens) {
  const Call call(this);
  rows_.at(row);
  checked_size("num_tokens", num_tokens, 0);
  checks_.check_only_drafts(row, num_tokens);
  rows_[row].take_back(num_tokens);
}

Slots Manager::fork(int32_t row, const std::shared_ptr<TokenChain>& child) {
  const Call call(this);
  rows_.at(row);
  intake_.hash_filled(row);
  checks_.check_fork(row, *child);  // also computes all hashes that the new row will have
  const Soundness::Change change = this->change("fork");
  return server_.fork(row, child);
}

std::optional<std::vector<BlockId>> Manager::swap_out(const std::vector<int32_t>& rows) {
  const Call call(this);
  checks_.check_has_host("swap_out was called");
  checks_.check_swap(rows, /*on_host=*/false);
  for (int32_t row : rows) intake_.hash_filled(row);
  const Soundness::Change change = this->change("swap_out");
  pool().set_taker(Taker::kOther);
  return swap_.swap_out(rows);
}

std::optional<std::vector<BlockId>> Manager::swap_in(const std::vector<int32_t>& rows) {
  const Call call(this);
  checks_.check_has_host("swap_in was called");
  checks_.check_swap(rows, /*on_host=*/true);
  const Soundness::Change change = this->change("swap_in");
  pool().set_taker(Taker::kOther);
  return swap_.swap_in(rows);
}

void Manager::free(const int32_t* rows, int64_t n, const ReleaseFeatures& features,
                   const KeptNames& kept) {
  if (guard_.is_broken()) return;
  const Call call(this);
  checks_.check_leaving(rows, n, kept);
  for (int64_t i = 0; i < n; ++i) {
    if (!rows_[rows[i]].is_on_host()) intake_.hash_filled(rows[i]);
  }
  const Soundness::Change change = this->change("free");
  for (int64_t i = 0; i < n; ++i) {
    const Row& r = rows_[rows[i]];
    stats_.note_had(r.chain.get(), r.is_receiving() ? rows_.info(rows[i]).num_hit : r.num_computed);
    if (!r.is_on_host()) publisher_.publish(rows[i]);
    release_.leave(rows[i], features, kept.empty() ? nullptr : &kept[static_cast<size_t>(i)]);
  }
}

void Manager::release_kept(const std::string& name) {
  const Call call(this);
  checks_.check_kept(name);
  const Soundness::Change change = this->change("release_blocks");
  tiers_.frees().release_kept(name);
}

void Manager::hold(const BlockId* ids, int64_t n) {
  const Call call(this);
  checks_.check_holdable(ids, n);
  const Soundness::Change change = this->change("hold_blocks");
  tiers_.frees().hold({ids, n});
}

void Manager::release_held(const BlockId* ids, int64_t n) {
  const Call call(this);
  checks_.check_holds(ids, n);
  const Soundness::Change change = this->change("release_blocks");
  tiers_.frees().release_held({ids, n});
}

void Manager::mark_computed(int32_t row, int64_t num_tokens) {
  const CallGuard::Scope scope(&guard_);
  checks_.check_driver(row, /*by_step=*/false);
  checked_size("num_tokens", num_tokens, 0);
  const Row& r = rows_[row];
  int64_t& num_marked = rows_.info(row).num_marked;
  const int64_t num_reached = std::min(num_tokens, r.num_computed);
  const bool publishes = !r.is_on_host() && publisher_.may_publish(row);
  if (publishes) {  // most decode steps fill no block
    tiers_.read_clock();
    if (num_reached >= r.next_publish) intake_.hash_ahead(*r.chain, /*reads=*/false);
  }
  const Soundness::Change change = this->change("mark_blocks_as_computed");
  num_marked = std::max(num_marked, num_reached);
  if (publishes) publisher_.publish(row);
}

void Manager::access(int32_t row, double now) {
  const CallGuard::Scope scope(&guard_);
  checks_.check_on_device(row);
  rows_.info(row).access = tiers_.pool().begin_access(now);
}

// Checks all arguments before anything changes.
Recompute Manager::report(int64_t step_id, bool completed, const std::vector<BlockId>& failed,
                          const std::vector<BlockId>& failed_on_host) {
  const Call call(this);
  checks_.check_report(step_id, completed, failed, failed_on_host);
  // Most reports invalidate nothing and need no hashes.
  const bool is_invalid = !completed || !failed.empty() || !failed_on_host.empty();
  if (is_invalid) intake_.hash_rows();
  const Soundness::Change change = this->change(completed ? "report" : "abort");
  if (is_invalid) tiers_.note_invalid();
  return recovery_.report(step_id, completed, failed, failed_on_host);
}

Recompute Manager::invalidate(const BlockId* ids, int64_t n) {
  const Call call(this);
  // Makes a copy, because a signal handler may modify the caller's array while rows are hashed.
  const std::vector<BlockId> invalid(ids, ids + n);
  checks_.check_ids(invalid, "ids");
  intake_.hash_rows();
  const Soundness::Change change = this->change("invalidate");
  tiers_.note_invalid();
  return recovery_.invalidate(invalid, {});
}

bool Manager::reset_prefix_cache() {
  const Call call(this);
  if (tiers_.any_held()) return false;
  const Soundness::Change change = this->change("reset_prefix_cache");
  recovery_.clear_cache();
  return true;
}

bool Manager::reset_group(int64_t group) {
  const Call call(this);
  checks_.check_group(group);
  for (int32_t row : rows_.in_use()) {
    if (rows_.blocks(row)[group].num_alive() > 0) return false;
  }
  if (tiers_.host() != nullptr && tiers_.host()->num_onboards() > 0) return false;
  const auto id = static_cast<uint8_t>(group);
  recovery_.note_evicted([&](BlockId block) { return tiers_.pool().group_of(block) == id; });
  const Soundness::Change change = this->change("reset_prefix_cache");
  tiers_.pool().evict_group(id);
  if (tiers_.host_pages() != nullptr) tiers_.host_pages()->evict_group(id);
  return true;
}

void Manager::start_epoch() {
  const Call call(this);
  const Soundness::Change change = this->change("start_epoch");
  recovery_.start_epoch();
  tiers_.start_epoch();
}

void Manager::forget_adapter(std::string_view name) {
  const Call call(this);
  const Soundness::Change change = this->change("forget_adapter");
  recovery_.forget_adapter(ExtraKeys::adapter_of(name));
}

void Manager::check_invariants() const {
  guard_.check_reader();
  steps_.check_invariants();
  pins_.check_invariants();
  publisher_.check_invariants();
  server_.check_invariants();
  PerBlock<int32_t> device(pool().num_blocks());
  PerBlock<int32_t> host_pages(host() == nullptr ? 1 : host()->num_blocks());
  rows_.check_invariants(&device, &host_pages);
  tiers_.check_invariants(std::move(device), std::move(host_pages));
}

}  // namespace kvcache
