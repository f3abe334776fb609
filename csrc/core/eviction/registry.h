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

// Those that can serve a pool on the host, which is notified of no accesses and priorities.
std::vector<std::string> host_eviction_names();

// A policy for a pool of `num_blocks`; null for "lru", which is the pool's own. Throws
// std::invalid_argument for a name or an option that there is not, or a value out of its range.
std::unique_ptr<EvictionPolicy> make_eviction_policy(const std::string& name,
                                                     const std::map<std::string, double>& options,
                                                     int64_t num_blocks);

// The same for a pool on the host, beside that policy of the device's (null: the pool's own); the
// errors name `host_eviction`. Never null.
std::unique_ptr<EvictionPolicy> make_host_eviction_policy(
    const std::string& name, const std::map<std::string, double>& options, int64_t num_blocks,
    const EvictionPolicy* device);

// Throw the same errors, and make none.
void check_host_eviction(const std::string& name, const std::map<std::string, double>& options);
void check_host_eviction_beside(const std::string& host, const std::string& device);

}  // namespace kvcache
