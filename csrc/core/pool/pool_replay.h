// SPDX-License-Identifier: Apache-2.0
// Replays requests on a pool, like a manager with one full-attention group that serves one request
// at a time.
#pragma once

#include <cstdint>

#include "core/hash.h"
#include "core/pool/block_pool.h"

namespace kvcache {

// A request. Either all of its blocks or only a sample of them are replayed. Its blocks are
// consecutive: first full blocks, then possibly a partial block, which is never cached.
struct ReplayedRequest {
  int64_t num_blocks;    // blocks of the whole request
  int64_t first;         // index of its first block among the blocks of all requests
  int64_t num_held;      // blocks that are replayed
  int64_t num_full;      // number of full blocks among them
  int64_t num_hittable;  // number of blocks among them that can be hits
  int64_t num_output_tokens;
  int64_t start_ms, end_ms;
  int64_t tokens_per_block;  // ReleaseFeatures::tokens_per_block
};

struct ReplayedHits {
  int64_t num_hits = 0;
  int64_t num_hittable = 0;  // hittable blocks of the served requests
};

// Serves the requests in order. Requests of more than `most_blocks` blocks are rejected. If a
// sample exceeds the pool, only its first blocks are replayed. `hashes` and `ends` have one entry
// per block; `ends` is the number of tokens up to the end of the block. No block of the pool may be
// held.
ReplayedHits replay_requests(BlockPool* pool, const ReplayedRequest* requests, int64_t n,
                             const Hash* hashes, const int64_t* ends, int64_t most_blocks);

}  // namespace kvcache
