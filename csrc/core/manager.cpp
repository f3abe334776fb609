#include "core/manager.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace kvcache {

namespace {

constexpr uint16_t kGroup = 0;  // one full-attention group

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void require_at_least(int64_t least, int64_t value, const char* name) {
  if (value >= least) return;
  throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ": expected " +
                              std::to_string(least) + " or more");
}

ManagerOptions checked(const ManagerOptions& options) {
  require_at_least(1, options.block_size, "block_size");
  require_at_least(2, options.num_blocks, "num_gpu_blocks (the null block counted)");
  require_at_least(1, options.max_model_len, "max_model_len");
  require_at_least(0, options.num_preallocate_tokens, "num_preallocate_tokens");
  require_at_least(0, options.max_num_reqs, "max_num_reqs");
  return options;
}

}  // namespace

Manager::Manager(const ManagerOptions& options)
    : options_(checked(options)), pool_(options.num_blocks) {}

const Manager::Row& Manager::at(int32_t row) const {
  if (row < 0 || row >= static_cast<int64_t>(rows_.size()) || rows_[row].chain == nullptr) {
    throw std::invalid_argument("row " + std::to_string(row) + " is not in use");
  }
  return rows_[row];
}

std::vector<BlockId> Manager::lookup(TokenChain& chain) const {
  if (!options_.enable_caching || chain.num_tokens() == 0) return {};
  const int64_t max_blocks = (chain.num_tokens() - 1) / options_.block_size;
  std::vector<BlockId> ids(static_cast<size_t>(max_blocks));
  ids.resize(static_cast<size_t>(
      pool_.lookup(chain.hashes().data(), max_blocks, kGroup, /*prefix=*/true, ids.data())));
  return ids;
}

void Manager::check_length(int64_t num_total, const char* what) const {
  if (num_total <= options_.max_model_len) return;
  throw std::invalid_argument(std::string(what) + " would have " + std::to_string(num_total) +
                              " tokens: expected at most max_model_len, which is " +
                              std::to_string(options_.max_model_len));
}

void Manager::check_running(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows) {
  ++num_steps_;
  for (int64_t i = 0; i < num_rows; ++i) {
    const Row& row = at(rows[i]);
    require_at_least(1, num_tokens[i], "num_tokens");
    check_length(row.num_computed + num_tokens[i], "a row");
    if (row.last_step == num_steps_) {
      throw std::invalid_argument("rows names row " + std::to_string(rows[i]) + " twice");
    }
    rows_[rows[i]].last_step = num_steps_;
  }
}

void Manager::check_new(const NewRow& request) const {
  require_at_least(1, request.num_tokens, "num_tokens");
  require_at_least(1, request.chain->num_tokens(), "the number of tokens of a new request");
  check_length(request.chain->num_tokens(), "a new request");
  if (request.chain->block_size() != options_.block_size) {
    throw std::invalid_argument(
        "a request hashed for block_size " + std::to_string(request.chain->block_size()) +
        " came to a manager with block_size " + std::to_string(options_.block_size));
  }
  if (request.computed == nullptr) return;
  check_computed(request);
  check_length(num_after(request, request.num_computed_blocks * options_.block_size),
               "a new request");
}

int64_t Manager::num_after(const NewRow& request, int64_t num_computed) const {
  // A caller that looked up by itself says exactly how many; a step takes what there is.
  if (request.computed != nullptr) return num_computed + request.num_tokens;
  return num_computed + std::min(request.num_tokens, request.chain->num_tokens() - num_computed);
}

void Manager::check_computed(const NewRow& request) const {
  const int64_t n = request.num_computed_blocks;
  if (n == 0) return;
  if (!options_.enable_caching) {
    throw std::invalid_argument("computed_blocks given, but caching is off (enable_caching=False)");
  }
  const int64_t most = (request.chain->num_tokens() - 1) / options_.block_size;
  if (n > most) {
    throw std::invalid_argument("computed_blocks has " + std::to_string(n) +
                                " blocks: expected at most " + std::to_string(most) +
                                ", since the last token must run");
  }
  const std::vector<Hash>& hashes = request.chain->hashes();
  for (int64_t i = 0; i < n; ++i) {
    if (pool_.holds(request.computed[i], hashes[i], kGroup)) continue;
    throw std::invalid_argument("computed_blocks[" + std::to_string(i) + "] is block " +
                                std::to_string(request.computed[i]) +
                                ", which does not (or no longer) hold block " + std::to_string(i) +
                                " of the request: look up again");
  }
}

Manager::Need Manager::need(int64_t num_held, int64_t num_tokens_after, int64_t num_tokens_ever,
                            int64_t num_lookahead, int64_t num_free) const {
  const int64_t bs = options_.block_size;
  const int64_t most = ceil_div(options_.max_model_len, bs);  // per request
  const int64_t now = std::min(ceil_div(num_tokens_after + num_lookahead, bs), most);
  const int64_t ever = std::max(now, ceil_div(num_tokens_ever, bs));
  if (ever > pool_.num_total()) return {Status::kNever, 0};
  const int64_t num_new = std::max<int64_t>(now - num_held, 0);
  if (num_new > num_free) return {Status::kWait, 0};
  if (num_new == 0) return {Status::kServed, 0};
  const int64_t ahead = ceil_div(options_.num_preallocate_tokens, bs);
  return {Status::kServed,
          num_new + std::min({ahead, num_free - num_new, most - num_held - num_new})};
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

void Manager::append_blocks(int32_t row, int64_t num_hit, int64_t num_new, StepDelta* delta) {
  if (num_hit + num_new == 0) return;
  std::vector<BlockId>& blocks = rows_[row].blocks;
  const size_t held = blocks.size();  // the hits are in it already
  blocks.resize(held + static_cast<size_t>(num_new));
  pool_.allocate(num_new, blocks.data() + held);
  delta->append_rows.push_back(row);
  delta->append_ids.insert(delta->append_ids.end(), blocks.end() - (num_hit + num_new),
                           blocks.end());
  delta->append_splits.push_back(static_cast<int32_t>(delta->append_ids.size()));
}

void Manager::serve_running(int32_t row, int64_t num_tokens, int64_t num_lookahead,
                            StepDelta* delta) {
  Row& r = rows_[row];
  const int64_t after = r.num_computed + num_tokens;
  const Need want =
      need(static_cast<int64_t>(r.blocks.size()), after, after, num_lookahead, pool_.num_free());
  delta->rows.push_back(row);
  delta->status.push_back(static_cast<uint8_t>(want.status));
  delta->num_computed_tokens.push_back(static_cast<int32_t>(r.num_computed));
  if (want.status != Status::kServed) return;
  append_blocks(row, 0, want.num_new, delta);
  r.num_computed = after;
}

void Manager::serve_new(const NewRow& request, int64_t num_lookahead, StepDelta* delta) {
  std::vector<BlockId> hits;
  if (request.computed != nullptr) {
    hits.assign(request.computed, request.computed + request.num_computed_blocks);
  } else if (request.chain->read_cache()) {
    hits = lookup(*request.chain);
  }
  const int64_t num_hit = static_cast<int64_t>(hits.size());
  const int64_t computed = num_hit * options_.block_size;
  const int64_t known = request.chain->num_tokens();
  const int64_t after = num_after(request, computed);

  // Hits that are free stop being so when this request takes them: they cannot also be its new
  // ones.
  Need want = need(num_hit, after, known, num_lookahead,
                   pool_.num_free() - pool_.count_free(hits.data(), num_hit));
  const bool no_row = free_rows_.empty() && options_.max_num_reqs > 0 &&
                      static_cast<int64_t>(rows_.size()) >= options_.max_num_reqs;
  if (want.status == Status::kServed && no_row) want.status = Status::kWait;
  delta->status.push_back(static_cast<uint8_t>(want.status));
  delta->num_computed_tokens.push_back(static_cast<int32_t>(computed));
  if (want.status != Status::kServed) {
    delta->rows.push_back(-1);
    return;
  }

  const int32_t row = take_row();
  delta->rows.push_back(row);
  delta->clear_rows.push_back(row);
  pool_.retain(hits.data(), num_hit);
  Row& r = rows_[row];
  r.chain = request.chain;
  r.blocks = std::move(hits);
  r.num_computed = after;
  r.num_published = num_hit;
  append_blocks(row, num_hit, want.num_new, delta);
  if (!request.chain->read_cache()) return;
  stats_.num_requests += 1;
  stats_.query_tokens += known;
  stats_.hit_tokens += computed;
}

void Manager::publish(Row& row) {
  if (!options_.enable_caching || !row.chain->write_cache()) return;
  // Full of real tokens: neither lookahead slots nor tokens that are not known yet count.
  const int64_t num_full =
      std::min(row.num_computed, row.chain->num_tokens()) / options_.block_size;
  if (num_full <= row.num_published) return;
  const Hash* hashes = row.chain->hashes().data();
  pool_.publish(row.blocks.data() + row.num_published, hashes + row.num_published,
                num_full - row.num_published, kGroup);
  row.num_published = num_full;
}

StepDelta Manager::step(const int32_t* rows, const int32_t* num_tokens, int64_t num_rows,
                        const std::vector<NewRow>& new_rows, int64_t num_lookahead_tokens) {
  require_at_least(0, num_lookahead_tokens, "num_lookahead_tokens");
  check_running(rows, num_tokens, num_rows);
  for (const NewRow& request : new_rows) {
    check_new(request);
    // Rows served before it could evict what the caller looked up.
    if (request.computed != nullptr && num_rows + static_cast<int64_t>(new_rows.size()) > 1) {
      throw std::invalid_argument("computed_blocks belong to a step of one request");
    }
  }

  StepDelta delta;
  delta.clear_rows.swap(clear_rows_);
  delta.append_splits.push_back(0);
  for (int64_t i = 0; i < num_rows; ++i) {
    serve_running(rows[i], num_tokens[i], num_lookahead_tokens, &delta);
  }
  for (const NewRow& request : new_rows) serve_new(request, num_lookahead_tokens, &delta);

  // Published last: what a step computes is a hit for later plans only, never within its own.
  for (size_t i = 0; i < delta.rows.size(); ++i) {
    if (delta.status[i] == static_cast<uint8_t>(Status::kServed)) publish(rows_[delta.rows[i]]);
  }
  std::sort(delta.clear_rows.begin(), delta.clear_rows.end());
  delta.clear_rows.erase(std::unique(delta.clear_rows.begin(), delta.clear_rows.end()),
                         delta.clear_rows.end());
  return delta;
}

void Manager::free(int32_t row) {
  at(row);
  Row& r = rows_[row];
  std::reverse(r.blocks.begin(), r.blocks.end());  // tails are evicted before heads
  pool_.release(r.blocks.data(), static_cast<int64_t>(r.blocks.size()));
  r = Row{};
  free_rows_.push(row);
  clear_rows_.push_back(row);
  --num_rows_;
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
