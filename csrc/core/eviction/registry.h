// Eviction policies by name.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/eviction/eviction_policy.h"

namespace kvcache {

std::vector<std::string> eviction_names();

// A policy for a pool of `num_blocks`; null for "lru", which is the pool's own. Throws
// std::invalid_argument for a name or an option that there is not, or a value out of its range.
std::unique_ptr<EvictionPolicy> make_eviction_policy(const std::string& name,
                                                     const std::map<std::string, double>& options,
                                                     int64_t num_blocks);

}  // namespace kvcache
