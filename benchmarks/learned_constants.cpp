// SPDX-License-Identifier: Apache-2.0
// Replays a trace against the eviction policy `learned` alone, in a plain pool: one request at a
// time, prompts only, whole blocks. learned_constants.py compiles it with other constants.
//
//   replay FILE BLOCK_SIZE CAPACITY...    prints the number of hit blocks for each capacity
//
// FILE contains int64 numbers: the number of requests and, for each, the time in ms, the tokens of
// the prompt, the tokens of the answer, the number of whole blocks, and their ids.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include "core/eviction/learned.h"

namespace {

using namespace kvcache;

struct Request {
  int64_t time, num_tokens, num_output_tokens;
  std::vector<int64_t> contents;
};

struct Trace {
  std::vector<Request> requests;
  std::vector<int64_t> parents;  // of each content; -1: none
};

Trace read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const auto next = [&] {
    int64_t value = 0;
    file.read(reinterpret_cast<char*>(&value), sizeof(value));
    return value;
  };
  Trace trace;
  trace.requests.resize(static_cast<size_t>(next()));
  for (Request& each : trace.requests) {
    each.time = next();
    each.num_tokens = next();
    each.num_output_tokens = next();
    each.contents.resize(static_cast<size_t>(next()));
    for (size_t i = 0; i < each.contents.size(); ++i) {
      const int64_t content = each.contents[i] = next();
      if (content >= static_cast<int64_t>(trace.parents.size())) {
        trace.parents.resize(static_cast<size_t>(content) + 1, -1);
      }
      if (i > 0) trace.parents[content] = each.contents[i - 1];
    }
  }
  return trace;
}

class Pool {
 public:
  Pool(int64_t capacity, const Trace* trace)
      : trace_(*trace),
        policy_(capacity + 1),
        blocks_(capacity + 1),
        states_(capacity + 1),
        block_of_(trace->parents.size()) {
    view_.blocks = {blocks_.data(), &epoch_};
    policy_.attach(&view_);
    for (auto id = static_cast<BlockId>(capacity); id > kNullBlock; --id) unused_.push_back(id);
  }

  // Returns the number of hit blocks.
  int64_t serve(const Request& request, int64_t block_size) {
    const auto n = static_cast<int64_t>(request.contents.size());
    if (n >= static_cast<int64_t>(blocks_.size())) return 0;  // does not fit
    view_.clock.now_ms = std::max(view_.clock.now_ms, request.time);
    std::vector<BlockId> ids;
    for (const int64_t content : request.contents) ids.push_back(block_of_[content]);
    const int64_t most = std::min(n, (request.num_tokens - 1) / block_size);
    int64_t num_hit = 0;
    while (num_hit < most && ids[num_hit] != kNullBlock) ++num_hit;
    for (const BlockId id : ids) {
      if (id == kNullBlock) continue;
      unlist(id);
      states_[id].is_held = true;
    }
    policy_.on_hit(Hit{{ids.data(), num_hit}, Hit::By::kRequest});
    compute(request, &ids);
    release(request, ids, num_hit * block_size, block_size);
    return num_hit;
  }

 private:
  struct State {
    int64_t content = -1;
    int32_t num_children = 0;
    bool is_held = false, is_candidate = false;
  };

  void unlist(BlockId id) {
    if (states_[id].is_candidate) policy_.remove(id);
    states_[id].is_candidate = false;
  }
  void list(BlockId id) {
    State& state = states_[id];
    if (state.is_candidate || state.is_held || state.num_children > 0) return;
    state.is_candidate = true;
    policy_.insert(id);
  }
  BlockId parent_of(int64_t content) const {
    const int64_t parent = trace_.parents[content];
    return parent < 0 ? kNullBlock : block_of_[parent];
  }
  void compute(const Request& request, std::vector<BlockId>* ids) {
    std::vector<BlockId> evicted, added;
    std::vector<Hash> hashes;
    for (size_t i = 0; i < ids->size(); ++i) {
      if ((*ids)[i] != kNullBlock) continue;
      if (unused_.empty()) evicted.push_back(evict());
      const BlockId id = (*ids)[i] = unused_.back();
      unused_.pop_back();
      added.push_back(id);
      hashes.push_back({});
      const uint64_t mixed = (static_cast<uint64_t>(request.contents[i]) + 1) * 0x9E3779B97F4A7C15;
      const uint64_t word = (mixed ^ mixed >> 29) * 0xBF58476D1CE4E5B9;
      std::memcpy(hashes.back().bytes, &word, sizeof(word));
    }
    flags_.assign(std::max(evicted.size(), added.size()), Forgotten::kHasHash | Forgotten::kIsLast);
    if (!evicted.empty()) {
      policy_.on_forget(Forgotten{{evicted.data(), static_cast<int64_t>(evicted.size())},
                                  Forgotten::Why::kEvicted,
                                  flags_.data(),
                                  blocks_.data()});
    }
    size_t next = 0;
    for (size_t i = 0; i < ids->size(); ++i) {
      const BlockId id = (*ids)[i];
      if (next == added.size() || id != added[next]) continue;
      states_[id] = {request.contents[i], 0, true, false};
      block_of_[request.contents[i]] = id;
      blocks_[id].hash = hashes[next++];
      blocks_[id].older = id;
      blocks_[id].epoch = epoch_;
      if (const BlockId parent = parent_of(request.contents[i])) ++states_[parent].num_children;
    }
    if (added.empty()) return;
    Content content{hashes.data(), hashes.data()};
    policy_.on_publish(
        Published{{added.data(), static_cast<int64_t>(added.size())}, 0, flags_.data(), &content});
  }
  BlockId evict() {
    const BlockId id = policy_.victim();
    unlist(id);
    const int64_t content = states_[id].content;
    block_of_[content] = kNullBlock;
    unused_.push_back(id);
    if (const BlockId parent = parent_of(content)) {
      --states_[parent].num_children;
      list(parent);
    }
    return id;
  }
  void release(const Request& request, std::vector<BlockId> ids, int64_t num_prefix_tokens,
               int64_t block_size) {
    std::reverse(ids.begin(), ids.end());
    const auto n = static_cast<int64_t>(ids.size());
    std::vector<int64_t> prefix_tokens;
    for (int64_t i = n; i > 0; --i) prefix_tokens.push_back(i * block_size);
    ReleaseFeatures features;
    features.num_prefix_tokens = num_prefix_tokens;
    features.num_output_tokens = request.num_output_tokens;
    features.tokens_per_block = block_size;
    Released released{{ids.data(), n}};
    released.prefix_tokens = prefix_tokens.data();
    released.features = &features;
    policy_.on_release(released);
    for (const BlockId id : ids) states_[id].is_held = false;
    policy_.on_idle({ids.data(), n});
    for (const BlockId id : ids) list(id);
  }

  const Trace& trace_;
  Learned policy_;
  PoolView view_;
  uint16_t epoch_ = 1;
  std::vector<Block> blocks_;
  std::vector<State> states_;
  std::vector<BlockId> block_of_;  // by content; null: not cached
  std::vector<BlockId> unused_;
  std::vector<uint8_t> flags_;
};

}  // namespace

int main(int num_args, char** args) {
  const Trace trace = read(args[1]);
  for (int i = 3; i < num_args; ++i) {
    Pool pool(std::atoll(args[i]), &trace);
    int64_t num_hit = 0;
    for (const Request& each : trace.requests) num_hit += pool.serve(each, std::atoll(args[2]));
    std::printf("%lld\n", static_cast<long long>(num_hit));
  }
  return 0;
}
