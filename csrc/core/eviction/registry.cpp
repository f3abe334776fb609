// SPDX-License-Identifier: Apache-2.0
#include "core/eviction/registry.h"

#include <algorithm>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <utility>

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
  double standard, least, most;
  bool is_integer = false;
};

using Values = std::map<std::string, double>;  // all options of a policy

struct Entry {
  const char* name;
  std::vector<Option> options;
  bool serves_host;  // can serve the host tier, which tracks neither accesses nor priorities
  std::unique_ptr<EvictionOrder> (*make)(int64_t num_blocks, const Values& values);
  // Creates the host's policy from the device's policy. Set only for policies that the host can use
  // only if the device uses them too. Such policies have no options on the host.
  std::unique_ptr<EvictionOrder> (*make_beside)(int64_t num_blocks,
                                                const EvictionOrder* device) = nullptr;
};

const Entry kEntries[] = {
    {"last_access",
     {},
     false,
     [](int64_t num_blocks, const Values&) -> std::unique_ptr<EvictionOrder> {
       return std::make_unique<LastAccess>(num_blocks);
     }},
    {"learned",
     {{"tenant_share", 1, 0, 1}, {"state_share", 1, 0, 1}},
     true,
     [](int64_t num_blocks, const Values& values) -> std::unique_ptr<EvictionOrder> {
       return std::make_unique<Learned>(num_blocks, values.at("tenant_share"),
                                        values.at("state_share"));
     },
     [](int64_t num_blocks, const EvictionOrder* device) -> std::unique_ptr<EvictionOrder> {
       const auto* learned = dynamic_cast<const Learned*>(device);
       if (learned == nullptr) return nullptr;
       return std::make_unique<LearnedCopies>(num_blocks, learned->reuse());
     }},
    {"lru",
     {},
     true,
     [](int64_t, const Values&) -> std::unique_ptr<EvictionOrder> { return nullptr; }},
    {"priority",
     {{"default_priority", 35, 0, 100, true}},
     false,
     [](int64_t num_blocks, const Values& values) -> std::unique_ptr<EvictionOrder> {
       return std::make_unique<Priority>(num_blocks,
                                         static_cast<int32_t>(values.at("default_priority")));
     }},
};

// The pool for which a policy is chosen, and the name of the argument.
struct Target {
  const char* argument;
  bool is_host;

  bool takes(const Entry& entry) const { return entry.serves_host || !is_host; }
};

constexpr Target kDevicePool{"eviction", false};
constexpr Target kHostPool{"host_eviction", true};

std::vector<std::string> names_for(const Target& target) {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) {
    if (target.takes(entry)) names.emplace_back(entry.name);
  }
  return names;
}

const Entry& entry_of(const Target& target, const std::string& name) {
  bool is_known = false;
  for (const Entry& entry : kEntries) {
    if (name != entry.name) continue;
    if (target.takes(entry)) return entry;
    is_known = true;
  }
  std::string names;
  for (const std::string& each : names_for(target)) names += (names.empty() ? "" : ", ") + each;
  throw std::invalid_argument(
      std::string(target.argument) + " is '" + name + "': expected one of " + names +
      (is_known ? " (the host tier tracks neither accesses nor priorities)" : ""));
}

void check_option(const Target& target, const Entry& entry, const std::string& name, double value) {
  std::ostringstream text;
  text << target.argument << " '" << entry.name << "': option '" << name << "' is " << value
       << ": expected ";
  if (entry.options.empty() || (target.is_host && entry.make_beside != nullptr)) {
    throw std::invalid_argument(text.str() + "no options");
  }
  const auto option = std::find_if(entry.options.begin(), entry.options.end(),
                                   [&](const Option& each) { return name == each.name; });
  if (option == entry.options.end()) {
    text << "one of the options ";
    for (const Option& each : entry.options) {
      text << (&each == &entry.options.front() ? "'" : ", '") << each.name << "'";
    }
    throw std::invalid_argument(text.str());
  }
  if (value >= option->least && value <= option->most &&
      (!option->is_integer || value == std::floor(value))) {
    return;
  }
  text << (option->is_integer ? "an integer from " : "") << option->least << " to " << option->most;
  throw std::invalid_argument(text.str());
}

// A registered policy with the values of its options.
struct Choice {
  Choice(const Target& target, const std::string& name, const Values& options)
      : entry(entry_of(target, name)), values(options) {
    for (const auto& [option, value] : options) check_option(target, entry, option, value);
    for (const Option& each : entry.options) values.try_emplace(each.name, each.standard);
  }

  const Entry& entry;
  Values values;
};

int64_t checked_blocks(int64_t num_blocks) {
  return checked_size("num_blocks", num_blocks, 2, " (the null block is counted)");
}

}  // namespace

std::vector<std::string> eviction_names() { return names_for(kDevicePool); }

std::vector<std::string> host_eviction_names() { return names_for(kHostPool); }

std::unique_ptr<EvictionOrder> make_eviction_policy(const std::string& name,
                                                    const std::map<std::string, double>& options,
                                                    int64_t num_blocks) {
  const Choice choice(kDevicePool, name, options);
  return choice.entry.make(checked_blocks(num_blocks), choice.values);
}

void check_host_eviction(const std::string& name, const std::map<std::string, double>& options) {
  const Choice choice(kHostPool, name, options);
}

void check_host_eviction_beside(const std::string& host, const std::string& device) {
  const Entry& entry = entry_of(kHostPool, host);
  if (entry.make_beside == nullptr || host == device) return;
  throw std::invalid_argument("host_eviction is '" + host + "', and eviction is '" + device +
                              "': expected '" + host +
                              "' for both, because the host learns from releases on the device");
}

std::unique_ptr<EvictionOrder> make_host_eviction_policy(
    const std::string& name, const std::map<std::string, double>& options, int64_t num_blocks,
    const EvictionOrder* device) {
  const Choice choice(kHostPool, name, options);
  checked_blocks(num_blocks);
  if (choice.entry.make_beside == nullptr) {
    auto policy = choice.entry.make(num_blocks, choice.values);
    return policy != nullptr ? std::move(policy) : std::make_unique<LeastRecent>(num_blocks);
  }
  auto policy = choice.entry.make_beside(num_blocks, device);
  if (policy == nullptr) check_host_eviction_beside(name, "another");
  return policy;
}

}  // namespace kvcache
