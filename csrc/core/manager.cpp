#include "core/manager.h"

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>

#include "core/limits.h"

namespace kvcache {

namespace {

constexpr uint16_t kGroup = 0;  // one full-attention group

// Of sizes within kMaxSize: cannot overflow.
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

ManagerOptions checked(const ManagerOptions& options) {
  checked_size("block_size", options.block_size, 1);
  checked_size("num_gpu_blocks", options.num_blocks, 2, " (the null block is counted)");
  checked_size("max_model_len", options.max_model_len, 1);
  checked_size("num_preallocate_tokens", options.num_preallocate_tokens, 0);
  checked_size("max_num_reqs", options.max_num_reqs, 0);
  return options;
}

}  // namespace

Manager::Manager(const ManagerOptions& options)
    : options_(checked(options)),
      max_blocks_(ceil_div(options.max_model_len, options.block_size)),
      num_preallocate_blocks_(ceil_div(options.num_preallocate_tokens, options.block_size)),
      pool_(options.num_blocks) {}

void Manager::check_caller() {
  const std::thread::id caller = std::this_thread::get_id();
  if (owner_ == std::thread::id()) owner_ = caller;
  if (owner_ != caller) {
    std::ostringstream text;
    text << "called from thread " << caller << ", but the manager belongs to thread " << owner_
         << ", which used it first: call it from one thread";
    throw std::runtime_error(text.str());
  }
  if (in_call_) {
    throw std::runtime_error(
        "called while another call of this manager has not returned (from within the SHA-256 "
        "fallback?): expected one call at a time");
  }
}

const Manager::Row& Manager::at(int32_t row) const {
  if (row < 0 || row >= static_cast<int64_t>(rows_.size()) || rows_[row].chain == nullptr) {
    throw std::invalid_argument("row " + std::to_string(row) + " is not in use");
  }
  return rows_[row];
}

const std::vector<Hash>& Manager::hashes(TokenChain& chain) {
  const Call call(this);
  return chain.hashes();
}

std::vector<BlockId> Manager::lookup(TokenChain& chain) {
  const Call call(this);
  if (!chain.read_cache()) return {};
  hash_ahead(chain, /*reads=*/true);
  return find(chain);
}

std::vector<BlockId> Manager::find(const TokenChain& chain) const {
  if (!options_.enable_caching || chain.num_tokens() == 0) return {};
  const std::vector<Hash>& hashes = chain.known_hashes();
  const int64_t max_blocks =
      std::min((chain.num_tokens() - 1) / options_.block_size, static_cast<int64_t>(hashes.size()));
  std::vector<BlockId> ids(static_cast<size_t>(max_blocks));
  ids.resize(static_cast<size_t>(
      pool_.lookup(hashes.data(), max_blocks, kGroup, /*prefix=*/true, ids.data())));
  return ids;
}

bool Manager::must_hash(const TokenChain& chain, bool reads) const {
  return options_.enable_caching && (reads || chain.write_cache()) && chain.has_unhashed_blocks();
}

void Manager::hash_ahead(TokenChain& chain, bool reads) const {
  if (must_hash(chain, reads)) chain.hashes();
}

void Manager::hash_ahead(const int32_t* rows, int64_t num_rows,
                         const std::vector<NewRow>& new_rows) const {
  // `at`, because the caller's array may change while a digest from Python runs.
  for (int64_t i = 0; i < num_rows; ++i) hash_ahead(*at(rows[i]).chain, /*reads=*/false);
  for (const NewRow& request : new_rows) hash_ahead(*request.chain, request.chain->read_cache());
}

void Manager::check_length(int64_t num_total, const char* what) const {
  if (num_total <= options_.max_model_len) return;
  throw std::invalid_argument(std::string(what) + " would have " + std::to_string(num_total) +
                              " tokens: expected at most max_model_len, which is " +
                              std::to_string(options_.max_model_len));
}

void Manager::check_face(int32_t row, bool by_step) const {
  if (at(row).by_step == by_step) return;
  throw std::invalid_argument("row " + std::to_string(row) + " was admitted by " +
                              (by_step ? "allocate_slots: expected append_slots to serve it"
                                       : "step: expected its row among the rows of step"));
}

bool Manager::check_step(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows,
                         const std::vector<NewRow>& new_rows) {
  bool any_to_hash = false;
  ++num_steps_;
  for (int64_t i = 0; i < num_rows; ++i) {
    check_face(rows[i], /*by_step=*/true);
    Row& row = rows_[rows[i]];
    checked_size("num_tokens", num_tokens[i], 1);
    const int64_t after = row.num_computed + num_tokens[i];
    check_length(after, "a row");
    if (row.last_step == num_steps_) {
      throw std::invalid_argument("rows names row " + std::to_string(rows[i]) + " twice");
    }
    row.last_step = num_steps_;
    any_to_hash |= may_publish(row, after) && must_hash(*row.chain, /*reads=*/false);
  }
  for (const NewRow& request : new_rows) {
    checked_size("new_num_tokens", request.num_tokens, 1);
    check_new(*request.chain);
    any_to_hash |= must_hash(*request.chain, request.chain->read_cache());
  }
  return any_to_hash;
}

void Manager::check_new(const TokenChain& chain) const {
  checked_size("the number of tokens of a new request", chain.num_tokens(), 1);
  check_length(chain.num_tokens(), "a new request");
  if (chain.block_size() == options_.block_size) return;
  throw std::invalid_argument(
      "a request hashed for block_size " + std::to_string(chain.block_size()) +
      " came to a manager with block_size " + std::to_string(options_.block_size));
}

void Manager::check_computed(const TokenChain& chain, const BlockId* computed, int64_t n) const {
  if (n == 0) return;
  const std::string what = "computed_blocks has " + std::to_string(n) + " blocks";
  if (!options_.enable_caching) {
    throw std::invalid_argument(what + ", but caching is off (enable_caching=False)");
  }
  if (!chain.read_cache()) {
    throw std::invalid_argument(what + ", but the request has read_cache=False: expected none");
  }
  const int64_t most = (chain.num_tokens() - 1) / options_.block_size;
  if (n > most) {
    throw std::invalid_argument(what + ": expected at most " + std::to_string(most) +
                                ", since the last token must run");
  }
  const std::vector<Hash>& hashes = chain.known_hashes();
  for (int64_t i = 0; i < n; ++i) {
    if (i < static_cast<int64_t>(hashes.size()) && pool_.holds(computed[i], hashes[i], kGroup)) {
      continue;
    }
    throw std::invalid_argument("computed_blocks[" + std::to_string(i) + "] is block " +
                                std::to_string(computed[i]) +
                                ", which does not (or no longer) hold block " + std::to_string(i) +
                                " of the request: look up again");
  }
}

Manager::Need Manager::need(int64_t num_held, int64_t num_tokens_after, int64_t num_tokens_ever,
                            int64_t num_lookahead, int64_t num_free) const {
  const int64_t bs = options_.block_size;
  const int64_t now = std::min(ceil_div(num_tokens_after + num_lookahead, bs), max_blocks_);
  if (now > pool_.num_total() || num_tokens_ever > pool_.num_total() * bs)
    return {Status::kNever, 0};
  const int64_t num_new = std::max<int64_t>(now - num_held, 0);
  if (num_new > num_free) return {Status::kWait, 0};
  if (num_new == 0) return {Status::kServed, 0};
  return {Status::kServed, num_new + std::min({num_preallocate_blocks_, num_free - num_new,
                                               max_blocks_ - num_held - num_new})};
}

int32_t Manager::take_row() {
  ++num_rows_;
  if (!free_rows_.empty()) {
    const int32_t row = free_rows_.top();
    free_rows_.pop();
    return row;
  }
  rows_.emplace_back();
  return static_cast<int32_t>(rows_.size()) - 1;
}

void Manager::take_blocks(Row& row, int64_t num_new) {
  if (num_new == 0) return;
  const size_t held = row.blocks.size();
  row.blocks.resize(held + static_cast<size_t>(num_new));
  pool_.allocate(num_new, row.blocks.data() + held);
}

Manager::Need Manager::grow(Row& row, int64_t num_tokens, int64_t num_lookahead) {
  const int64_t after = row.num_computed + num_tokens;
  const Need want =
      need(static_cast<int64_t>(row.blocks.size()), after, after, num_lookahead, pool_.num_free());
  if (want.status != Status::kServed) return want;
  take_blocks(row, want.num_new);
  row.num_computed = after;
  return want;
}

Slots Manager::admit(const std::shared_ptr<TokenChain>& chain, std::vector<BlockId> hits,
                     int64_t num_tokens_after, int64_t num_lookahead, bool by_step) {
  const auto num_hit = static_cast<int64_t>(hits.size());
  const int64_t known = chain->num_tokens();
  // Hits that are free stop being so when this request takes them: they cannot also be its new
  // ones.
  const Need want = need(num_hit, num_tokens_after, known, num_lookahead,
                         pool_.num_free() - pool_.count_free(hits.data(), num_hit));
  if (want.status != Status::kServed) return {want.status, -1, {}};
  if (free_rows_.empty() && options_.max_num_reqs > 0 &&
      static_cast<int64_t>(rows_.size()) >= options_.max_num_reqs) {
    return {Status::kWait, -1, {}};
  }

  Slots slots{Status::kServed, take_row(), {}};
  pool_.retain(hits.data(), num_hit);
  Row& row = rows_[slots.row];
  row.chain = chain;
  row.blocks = std::move(hits);
  row.num_computed = num_tokens_after;
  row.num_published = num_hit;
  row.by_step = by_step;
  take_blocks(row, want.num_new);
  if (chain->read_cache()) {
    stats_.num_requests += 1;
    stats_.query_tokens += known;
    stats_.hit_tokens += num_hit * options_.block_size;
  }
  return slots;
}

bool Manager::may_publish(const Row& row, int64_t num_computed) const {
  return num_computed >= (row.num_published + 1) * options_.block_size;
}

void Manager::publish(Row& row) {
  if (!may_publish(row, row.num_computed))
    return;  // most rows of a step: the chain stays untouched
  if (!options_.enable_caching || !row.chain->write_cache()) return;
  // Full of real tokens: neither lookahead slots nor tokens that are not known yet count.
  const std::vector<Hash>& hashes = row.chain->known_hashes();
  const int64_t num_full =
      std::min(row.num_computed / options_.block_size, static_cast<int64_t>(hashes.size()));
  if (num_full <= row.num_published) return;
  pool_.publish(row.blocks.data() + row.num_published, hashes.data() + row.num_published,
                num_full - row.num_published, kGroup);
  row.num_published = num_full;
}

StepDelta Manager::step(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows,
                        const std::vector<NewRow>& new_rows, int64_t num_lookahead_tokens) {
  const Call call(this);
  checked_size("num_lookahead_tokens", num_lookahead_tokens, 0);
  if (check_step(rows, num_tokens, num_rows, new_rows)) {
    hash_ahead(rows, num_rows, new_rows);
    // While a digest from Python ran, the arrays and the requests' tokens may have changed.
    check_step(rows, num_tokens, num_rows, new_rows);
  }

  StepDelta delta;
  delta.clear_rows.swap(clear_rows_);
  delta.append_splits.push_back(0);
  const size_t num_asked = static_cast<size_t>(num_rows) + new_rows.size();
  delta.rows.reserve(num_asked);
  delta.status.reserve(num_asked);
  delta.num_computed_tokens.reserve(num_asked);
  const auto answer = [&](int32_t row, Status status, int64_t num_computed, int64_t num_appended) {
    delta.rows.push_back(row);
    delta.status.push_back(static_cast<uint8_t>(status));
    delta.num_computed_tokens.push_back(static_cast<int32_t>(num_computed));
    if (num_appended == 0) return;
    const std::vector<BlockId>& blocks = rows_[row].blocks;
    delta.append_rows.push_back(row);
    delta.append_ids.insert(delta.append_ids.end(), blocks.end() - num_appended, blocks.end());
    delta.append_splits.push_back(static_cast<int32_t>(delta.append_ids.size()));
  };
  for (int64_t i = 0; i < num_rows; ++i) {
    const int64_t start = rows_[rows[i]].num_computed;
    const Need got = grow(rows_[rows[i]], num_tokens[i], num_lookahead_tokens);
    answer(rows[i], got.status, start, got.num_new);
  }
  for (const NewRow& request : new_rows) {
    std::vector<BlockId> hits;
    if (request.chain->read_cache()) hits = find(*request.chain);
    const int64_t start = static_cast<int64_t>(hits.size()) * options_.block_size;
    const int64_t after = std::min(start + request.num_tokens, request.chain->num_tokens());
    const Slots slots =
        admit(request.chain, std::move(hits), after, num_lookahead_tokens, /*by_step=*/true);
    const bool is_served = slots.status == Status::kServed;
    if (is_served) delta.clear_rows.push_back(slots.row);
    answer(slots.row, slots.status, start,
           is_served ? static_cast<int64_t>(rows_[slots.row].blocks.size()) : 0);
  }

  // Published last: what a step computes is a hit for later plans only, never within its own.
  for (size_t i = 0; i < delta.rows.size(); ++i) {
    if (delta.status[i] == static_cast<uint8_t>(Status::kServed)) publish(rows_[delta.rows[i]]);
  }
  std::sort(delta.clear_rows.begin(), delta.clear_rows.end());
  delta.clear_rows.erase(std::unique(delta.clear_rows.begin(), delta.clear_rows.end()),
                         delta.clear_rows.end());
  return delta;
}

Slots Manager::allocate(const std::shared_ptr<TokenChain>& chain, int64_t num_tokens,
                        const BlockId* computed, int64_t num_computed_blocks,
                        int64_t num_lookahead_tokens) {
  const Call call(this);
  checked_size("num_tokens", num_tokens, 1);
  checked_size("num_lookahead_tokens", num_lookahead_tokens, 0);
  hash_ahead(*chain, num_computed_blocks > 0);
  check_new(*chain);
  check_computed(*chain, computed, num_computed_blocks);
  const int64_t after = num_computed_blocks * options_.block_size + num_tokens;
  check_length(after, "a new request");
  Slots slots = admit(chain, {computed, computed + num_computed_blocks}, after,
                      num_lookahead_tokens, /*by_step=*/false);
  if (slots.status != Status::kServed) return slots;
  Row& row = rows_[slots.row];
  slots.new_blocks.assign(row.blocks.begin() + num_computed_blocks, row.blocks.end());
  publish(row);
  return slots;
}

Slots Manager::append(int32_t row, int64_t num_tokens, int64_t num_lookahead_tokens) {
  const Call call(this);
  check_face(row, /*by_step=*/false);
  checked_size("num_tokens", num_tokens, 1);
  checked_size("num_lookahead_tokens", num_lookahead_tokens, 0);
  Row& r = rows_[row];
  check_length(r.num_computed + num_tokens, "a row");
  hash_ahead(*r.chain, /*reads=*/false);
  const Need got = grow(r, num_tokens, num_lookahead_tokens);
  if (got.status != Status::kServed) return {got.status, row, {}};
  publish(r);
  return {Status::kServed, row, {r.blocks.end() - got.num_new, r.blocks.end()}};
}

void Manager::free(int32_t row) {
  const Call call(this);
  at(row);
  Row& r = rows_[row];
  // Tokens that came since the row was last served may have filled blocks.
  if (may_publish(r, r.num_computed)) hash_ahead(*r.chain, /*reads=*/false);
  publish(r);
  std::reverse(r.blocks.begin(), r.blocks.end());  // tails are evicted before heads
  pool_.release(r.blocks.data(), static_cast<int64_t>(r.blocks.size()));
  if (r.by_step) clear_rows_.push_back(row);
  r = Row{};
  free_rows_.push(row);
  --num_rows_;
}

bool Manager::reset_prefix_cache() {
  const Call call(this);
  return pool_.reset();
}

void Manager::check_invariants() const {
  pool_.check_invariants();
  std::vector<int32_t> references(static_cast<size_t>(pool_.num_blocks()), 0);
  int64_t num_rows = 0;
  for (const Row& row : rows_) {
    num_rows += row.chain != nullptr;
    for (BlockId id : row.blocks) ++references[id];
  }
  for (BlockId id = 1; id < pool_.num_blocks(); ++id) {
    if (references[id] == pool_.ref_count(id)) continue;
    throw std::logic_error("block " + std::to_string(id) + " has " +
                           std::to_string(pool_.ref_count(id)) + " references, but rows hold " +
                           std::to_string(references[id]));
  }
  if (num_rows != num_rows_) throw std::logic_error("num_rows is wrong");
}

}  // namespace kvcache
