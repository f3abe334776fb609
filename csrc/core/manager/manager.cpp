// The manager's calls. How rows are served, swapped and forked, and what reports cause, is in
// manager_*.cpp; the work is done by the components.
#include "core/manager/manager.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "core/eviction/registry.h"
#include "core/limits.h"

namespace kvcache {

namespace {

std::unique_ptr<BlockPool> host_pages(const ManagerOptions& options) {
  if (options.num_host_blocks == 0) return nullptr;
  const Eviction& eviction = options.host_eviction;
  const int64_t n = options.num_host_blocks;
  auto policy = eviction.make ? eviction.make(n)
                              : make_host_eviction_policy(eviction.policy, eviction.options, n);
  return std::make_unique<BlockPool>(n, std::move(policy));
}

std::unique_ptr<HostTier> host_tier(const ManagerOptions& options, BlockPool* device,
                                    const std::vector<CacheGroup>* groups) {
  auto pages = host_pages(options);
  if (pages == nullptr) return nullptr;
  return std::make_unique<HostTier>(std::move(pages), device, groups, options.host_write,
                                    options.num_hits_to_write);
}

}  // namespace

Manager::Manager(const ManagerOptions& options)
    : options_(checked(options)),
      hash_block_size_(hash_block_size_of(options)),
      groups_(groups_of(options, hash_block_size_)),
      pool_(options.num_blocks, policy_of(options.eviction, options.num_blocks)),
      host_(host_tier(options, &pool_, &groups_)),
      rows_(&groups_, options.max_num_reqs),
      finder_({&pool_, host(), &groups_, hash_block_size_}, options_),
      plan_(groups_.size(), options.num_blocks),
      frees_(&pool_, &journal_.numbers(), options.fence_frees),
      rules_(&groups_, &pool_, &frees_, &journal_.numbers(), holders(), options_),
      stats_(cached_block_sizes(groups_), options.stats_window),
      publisher_({&groups_, hash_block_size_, &rows_, &pool_, host_.get(), &journal_, &stats_},
                 options_),
      growth_(row_context(), holders()),
      swap_(row_context(), options.caches_swapped_rows),
      clock_(options.track_residency || pool_.has_policy() ||
             (host_ != nullptr && host_->pages().has_policy())),
      release_(
          {&groups_, hash_block_size_, &pool_, host_.get(), &rows_, &journal_, &frees_, &clock_}),
      recovery_({row_context(), hash_block_size_, &finder_, &publisher_, &growth_, &release_}),
      checks_({&options_, &groups_, hash_block_size_, &rows_, &pool_, host_ != nullptr}),
      intake_(&rows_, &publisher_, &journal_, options.enable_caching),
      pins_(&pool_),
      candidate_(groups_.size()) {
  if (host_ != nullptr) pool_.on_eviction([this](BlockId id) { host_->on_eviction(id, &plan_); });
  if (options.record_events) {
    pool_.emit_to(&events_, Tier::kDevice);
    if (host_ != nullptr) host_->pages().emit_to(&events_, Tier::kHost);
  }
  if (options.track_residency) pool_.track_residency();
}

void Manager::set_now(int64_t ms) {
  check_caller();
  clock_.set(ms);
  notify_clock();
}

BlockHolders Manager::holders() const { return {&pool_, &frees_, host_.get(), &plan_}; }

RowContext Manager::row_context() {
  return {&groups_, &pool_, host_.get(), &rows_, &plan_, &journal_, &frees_};
}

void Manager::notify_clock() {
  const int64_t ms = clock_.now_ms();
  if (pool_.residency() != nullptr) pool_.residency()->set_now(ms);
  pool_.set_now(ms);
  if (host_ != nullptr) host_->pages().set_now(ms);
}

EventLog::Drained Manager::drain_events() {
  const Call call(this);
  return events_.drain();
}

void Manager::clear_stats() {
  const Call call(this);
  stats_.clear();
  if (host_ != nullptr) *host_->mutable_counts() = {};
  if (pool_.residency() != nullptr) pool_.residency()->clear();
}

const std::vector<BlockId>& Manager::blocks(int32_t row, int64_t group) const {
  check_reader();
  checks_.check_on_device(row);
  checks_.check_group(group);
  return rows_.blocks(row)[group].blocks;
}

const std::vector<Hash>& Manager::hashes(TokenChain& chain) {
  const Call call(this);
  return chain.hashes();
}

const PrefixHit& Manager::lookup(TokenChain& chain, bool with_host) {
  const Call call(this);
  if (chain.read_cache()) intake_.hash_ahead(chain, /*reads=*/true);
  return finder_.find(chain, /*with_partial=*/false, with_host);
}

Status Manager::would_fit(TokenChain& chain, int64_t num_tokens) {
  const Call call(this);
  checked_size("num_tokens", num_tokens, 1);
  checks_.check_new(chain);
  if (chain.read_cache()) intake_.hash_ahead(chain, /*reads=*/true);
  Status status = Status::kWait;
  for (bool with_partial : {true, false}) {
    const PrefixHit& hit = finder_.find(chain, with_partial, /*with_host=*/true);
    const int64_t stop = std::min(hit.num_tokens + num_tokens, chain.num_tokens());
    status = demand_of_new(chain, hit, {hit.num_tokens, stop, 0}, 0).status;
    if (status != Status::kWait || !hit.copies_partial()) break;
  }
  return status;
}

int64_t Manager::pin(const std::string& session, TokenChain& chain) {
  const Call call(this);
  intake_.hash_ahead(chain, /*reads=*/true);
  return pins_.pin(session, chain.known_hashes(), groups_);
}

int64_t Manager::unpin(const std::string& session) {
  const Call call(this);
  return pins_.unpin(session);
}

void Manager::evict(const BlockId* ids, int64_t n) {
  const Call call(this);
  release_.note_forgotten();
  pool_.evict(ids, n);
}

const StepPlan& Manager::step(const StepRequest& request) {
  const Call call(this);
  checks_.check_step(request);
  take_in(request);
  // From here on nothing is refused.
  journal_.begin();
  plan_.begin(steps().num_steps);
  const std::vector<bool> have_left = swap_out_rows(request);
  offload_queued();  // behind the rows, which must go there
  serve_rows(request);
  answer_swapped(request, have_left);
  serve_new(request);
  publish_step();
  release_held();
  resend_tables();
  const StepPlan& plan = plan_.end();
  journal_.issue(plan.clear_rows);
  return plan;
}

Slots Manager::allocate(const std::shared_ptr<TokenChain>& chain, int64_t num_tokens,
                        const std::vector<std::vector<BlockId>>& computed,
                        int64_t num_lookahead_tokens) {
  const Call call(this);
  checked_size("num_tokens", num_tokens, 1);
  checked_size("num_lookahead_tokens", num_lookahead_tokens, 0);
  checks_.check_has_no_state("allocate_slots");
  bool any_computed = false;
  for (const std::vector<BlockId>& ids : computed) any_computed |= !ids.empty();
  checks_.check_new(*chain);
  intake_.hash_ahead(*chain, any_computed);
  checks_.check_new(*chain);  // a digest may call back
  PrefixHit hit;
  hit.num_tokens = checks_.check_computed(*chain, computed);
  hit.blocks = computed;
  hit.on_host.resize(groups_.size());
  hit.sources.assign(groups_.size(), kNullBlock);
  ServedRow served;
  served.span = {hit.num_tokens, hit.num_tokens + num_tokens, num_lookahead_tokens};
  checks_.check_length(served.span.stop, "a new request");
  Slots slots{
      admit(&served, chain, hit, /*num_reserved=*/0, /*by_step=*/false), served.row, {}, {}};
  if (slots.status != Status::kServed) return slots;
  for (const CacheGroup& group : groups_) {
    const std::vector<BlockId>& blocks = rows_.blocks(slots.row)[group.id].blocks;
    slots.new_blocks.emplace_back(blocks.begin() + static_cast<int64_t>(computed[group.id].size()),
                                  blocks.end());
  }
  rows_.info(slots.row).num_marked = hit.num_tokens;
  publisher_.publish(slots.row);
  return slots;
}

Slots Manager::append(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens) {
  const Call call(this);
  checks_.check_append(row, num_tokens, /*least=*/1, num_lookahead_tokens);
  intake_.hash_ahead(*rows_[row].chain, /*reads=*/false);
  return append_checked(row, num_tokens, num_lookahead_tokens);
}

Slots Manager::append_known(int32_t row, const int32_t* token_ids, int64_t n,
                            int64_t num_lookahead_tokens) {
  const Call call(this);
  checks_.check_append(row, n, /*least=*/0, num_lookahead_tokens);
  const std::shared_ptr<TokenChain> chain = rows_[row].chain;
  chain->append(token_ids, n);
  Slots slots{Status::kWait, row, {}, {}};
  try {
    if (rows_[row].num_computed + n >= rows_[row].next_publish) {
      intake_.hash_ahead(*chain, /*reads=*/false);
    }
    slots = append_checked(row, n, num_lookahead_tokens);
  } catch (...) {
    chain->take_back(n);
    throw;
  }
  if (slots.status != Status::kServed) chain->take_back(n);
  return slots;
}

Slots Manager::append_checked(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens) {
  plan_.begin_direct();
  const int64_t start = rows_[row].num_computed;
  ServedRow served;
  served.row = row;
  served.span = {start, start + num_tokens, num_lookahead_tokens};
  Slots slots{extend_row(&served), row, {}, {}};
  if (slots.status != Status::kServed) return slots;
  slots.copies = plan_.direct_pairs();
  for (const CacheGroup& group : groups_) {
    const std::vector<BlockId>& blocks = rows_.blocks(row)[group.id].blocks;
    slots.new_blocks.emplace_back(blocks.begin() + served.num_before[group.id], blocks.end());
  }
  publisher_.publish(row);
  return slots;
}

void Manager::reject(int32_t row, int64_t num_tokens) {
  const Call call(this);
  rows_.at(row);
  checked_size("num_tokens", num_tokens, 0);
  checks_.check_rejected(row, num_tokens);
  rows_[row].num_computed -= num_tokens;
}

void Manager::free(int32_t row, const ReleaseFeatures& features) {
  const Call call(this);
  rows_.at(row);
  Row& r = rows_[row];
  if (!r.on_host) {
    intake_.hash_filled(row);
    publisher_.publish(row);
    release_.note_left(row);
    release_.notify_release(row, features);
  }
  release_.release_row(row, /*with_encoder=*/true);
  if (r.by_step) plan_.clear_later(row);
  plan_.forget_resend(row);
  rows_.give_up(row);
}

int64_t Manager::num_common_prefix_blocks(int32_t row, int64_t num_running, int64_t group) {
  const Call call(this);
  checks_.check_on_device(row);
  checks_.check_group(group);
  checked_size("num_running_requests", num_running, 1);
  int64_t n = 0;
  for (BlockId id : rows_.blocks(row)[group].blocks) {
    if (id == kNullBlock) break;
    if (holders().num_rows(id) != num_running) break;
    ++n;
  }
  return n;
}

void Manager::mark_computed(int32_t row, int64_t num_tokens) {
  const Call call(this);
  checks_.check_driver(row, /*by_step=*/false);
  checked_size("num_tokens", num_tokens, 0);
  Row& r = rows_[row];
  if (!r.on_host) {
    // Hashed before anything changes.
    if (std::min(r.num_computed, num_tokens) >= r.next_publish) {
      intake_.hash_ahead(*r.chain, /*reads=*/false);
    }
  }
  int64_t& num_marked = rows_.info(row).num_marked;
  num_marked = std::max(num_marked, std::min(num_tokens, r.num_computed));
  if (!r.on_host) publisher_.publish(row);
}

void Manager::access(int32_t row, double now) {
  const Call call(this);
  checks_.check_on_device(row);
  if (!pool_.has_policy()) return;
  const std::vector<BlockId> ids = rows_.tail_first(row, /*with_encoder=*/false);
  pool_.access(ids.data(), static_cast<int64_t>(ids.size()), now);
}

bool Manager::reset_prefix_cache() {
  const Call call(this);
  const auto in_use = [](const BlockPool& pool) { return pool.num_free() != pool.num_total(); };
  if (in_use(pool_) || (host_ != nullptr && in_use(host_->pages()))) return false;
  clear_cache();
  return true;
}

const TierCount& Manager::tiers() const {
  static const TierCount kNone;
  return host_ == nullptr ? kNone : host_->counts();
}

void Manager::publish_offloaded() {
  if (host_ == nullptr) return;
  const std::vector<BlockId> written = host_->publish_offloaded();
  journal_.note_written(written);
}

void Manager::clear_cache() {
  if (rows_.num_in_use() > 0) release_.note_forgotten();
  pool_.clear();
  if (host_ == nullptr) return;
  host_->pages().clear();
  host_->forget_queued();
}

void Manager::start_epoch() {
  const Call call(this);
  clear_cache();
  for (int32_t row = 0; row < rows_.size(); ++row) {
    if (!rows_.is_in_use(row)) continue;
    rows_[row].is_stale = true;
    rows_[row].next_publish = kUnbounded;
  }
}

void Manager::check_invariants() const {
  check_reader();
  pool_.check_invariants();
  if (host_ != nullptr) host_->pages().check_invariants();
  plan_.check_invariants();
  pins_.check_invariants();
  journal_.check_invariants();
  publisher_.check_invariants();
  PerBlock<int32_t> references(pool_.num_blocks());
  PerBlock<int32_t> of_host(host_ == nullptr ? 1 : host()->num_blocks());
  rows_.check_invariants(&references, &of_host);
  if (host_ != nullptr) host_->check_invariants(&references, &of_host);
  frees_.check_invariants(&references);
  const auto compare = [](const BlockPool& pool, const PerBlock<int32_t>& counted,
                          const char* what) {
    for (BlockId id = 1; id < pool.num_blocks(); ++id) {
      if (counted[id] == pool.ref_count(id)) continue;
      throw std::logic_error(std::string(what) + " " + std::to_string(id) + " has " +
                             std::to_string(pool.ref_count(id)) + " references, but " +
                             std::to_string(counted[id]) + " are held");
    }
  };
  compare(pool_, references, "block");
  if (host_ != nullptr) compare(host_->pages(), of_host, "page of the host");
}

}  // namespace kvcache
