// SPDX-License-Identifier: Apache-2.0
// Eviction policies by name.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/pool/eviction_order.h"

namespace kvcache {

std::vector<std::string> eviction_names();

// Policies for a host pool, where accesses and priorities are not tracked.
std::vector<std::string> host_eviction_names();

// Creates a policy for a pool of `num_blocks`; null for "lru", which the pool implements. Throws
// std::invalid_argument for an unknown name or option, or a value out of range.
std::unique_ptr<EvictionOrder> make_eviction_policy(const std::string& name,
                                                    const std::map<std::string, double>& options,
                                                    int64_t num_blocks);

// Creates a policy for a host pool, given the device's policy (null: the pool's built-in LRU).
// Error messages name the option `host_eviction`. Never returns null.
std::unique_ptr<EvictionOrder> make_host_eviction_policy(
    const std::string& name, const std::map<std::string, double>& options, int64_t num_blocks,
    const EvictionOrder* device);

// These functions throw the same errors as the functions above, without creating a policy.
void check_host_eviction(const std::string& name, const std::map<std::string, double>& options);
void check_host_eviction_beside(const std::string& host, const std::string& device);

}  // namespace kvcache
