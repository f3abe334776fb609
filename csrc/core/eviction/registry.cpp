// SPDX-License-Identifier: Apache-2.0
#include "core/eviction/registry.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>

#include "core/errors.h"
#include "core/eviction/last_access.h"
#include "core/eviction/learned.h"
#include "core/eviction/learned_copies.h"
#include "core/eviction/least_recent.h"
#include "core/eviction/priority.h"

namespace kvcache {

namespace {

struct Option {
  const char* name;
  double standard, least, most;  // integers
};

struct Policy {
  const char* name;
  std::vector<Option> options;  // for the device; no policy has options on the host
  bool serves_host;  // can serve the host tier, which tracks neither accesses nor priorities
};

constexpr int32_t kDefaultPriority = 35;

const Policy kPolicies[] = {
    {"last_access", {}, false},
    {"learned", {}, true},
    {"lru", {}, true},
    {"priority", {{"default_priority", kDefaultPriority, 0, 100}}, false},
};

using Values = std::map<std::string, double>;  // options by name

// The name of the argument that selects the policy of a tier.
const char* argument_for(Tier tier) { return tier == Tier::kDevice ? "eviction" : "host_eviction"; }

bool can_serve(Tier tier, const Policy& policy) {
  return tier == Tier::kDevice || policy.serves_host;
}

std::vector<std::string> names_for(Tier tier) {
  std::vector<std::string> names;
  for (const Policy& policy : kPolicies) {
    if (can_serve(tier, policy)) names.emplace_back(policy.name);
  }
  return names;
}

const Policy& policy_of(Tier tier, const std::string& name) {
  const auto* policy = std::find_if(std::begin(kPolicies), std::end(kPolicies),
                                    [&](const Policy& each) { return name == each.name; });
  const bool is_known = policy != std::end(kPolicies);
  if (is_known && can_serve(tier, *policy)) return *policy;
  std::string names;
  for (const std::string& each : names_for(tier)) names += (names.empty() ? "" : ", ") + each;
  throw_invalid(argument_for(tier), " is '", name, "': expected one of ", names,
                is_known ? " (the host tier tracks neither accesses nor priorities)" : "");
}

void check_option(Tier tier, const Policy& policy, const std::string& name, double value) {
  std::ostringstream text;
  text << argument_for(tier) << " '" << policy.name << "': option '" << name << "' is " << value
       << ": expected ";
  if (policy.options.empty() || tier == Tier::kHost) {
    throw std::invalid_argument(text.str() + "no options");
  }
  const auto option = std::find_if(policy.options.begin(), policy.options.end(),
                                   [&](const Option& each) { return name == each.name; });
  if (option == policy.options.end()) {
    text << "one of the options ";
    for (const Option& each : policy.options) {
      text << (&each == &policy.options.front() ? "'" : ", '") << each.name << "'";
    }
    throw std::invalid_argument(text.str());
  }
  if (value >= option->least && value <= option->most && value == std::floor(value)) return;
  text << "an integer from " << option->least << " to " << option->most;
  throw std::invalid_argument(text.str());
}

// Returns the values of all options of a policy.
Values checked_values(Tier tier, const std::string& name, const Values& options) {
  const Policy& policy = policy_of(tier, name);
  for (const auto& [option, value] : options) check_option(tier, policy, option, value);
  Values values = options;
  for (const Option& each : policy.options) values.try_emplace(each.name, each.standard);
  return values;
}

int64_t checked_blocks(int64_t num_blocks) {
  return checked_size("num_blocks", num_blocks, 2, " (the null block is counted)");
}

}  // namespace

std::vector<std::string> eviction_names() { return names_for(Tier::kDevice); }

std::vector<std::string> host_eviction_names() { return names_for(Tier::kHost); }

std::unique_ptr<EvictionOrder> make_eviction_policy(const std::string& name,
                                                    const std::map<std::string, double>& options,
                                                    int64_t num_blocks) {
  const Values values = checked_values(Tier::kDevice, name, options);
  const int64_t n = checked_blocks(num_blocks);
  if (name == "last_access") return std::make_unique<LastAccess>(n);
  if (name == "learned") return std::make_unique<WithPriorities<Learned>>(n, kDefaultPriority);
  if (name == "priority") {
    const auto priority = static_cast<int32_t>(values.at("default_priority"));
    return std::make_unique<WithPriorities<LeastRecent>>(n, priority);
  }
  require(name == "lru", "a policy is listed, and nothing creates it");
  return nullptr;
}

void check_host_eviction(const std::string& name, const std::map<std::string, double>& options) {
  checked_values(Tier::kHost, name, options);
}

void check_host_eviction_beside(const std::string& host, const std::string& device) {
  policy_of(Tier::kHost, host);
  if (host != "learned" || host == device) return;
  throw_invalid("host_eviction is '", host, "', and eviction is '", device, "': expected '", host,
                "' for both, because the host learns from releases on the device");
}

std::unique_ptr<EvictionOrder> make_host_eviction_policy(
    const std::string& name, const std::map<std::string, double>& options, int64_t num_blocks,
    const EvictionOrder* device) {
  check_host_eviction(name, options);
  const int64_t n = checked_blocks(num_blocks);
  if (name == "lru") return std::make_unique<LeastRecent>(n);
  const auto* learned = dynamic_cast<const Learned*>(device);
  if (learned == nullptr) check_host_eviction_beside(name, "another");
  return std::make_unique<LearnedCopies>(n, learned->reuse());
}

}  // namespace kvcache
