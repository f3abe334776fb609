#include "core/eviction/registry.h"

#include <cmath>
#include <sstream>
#include <stdexcept>

#include "core/eviction/last_access.h"
#include "core/eviction/priority.h"
#include "core/eviction/s3_fifo.h"
#include "core/eviction/segmented_lru.h"
#include "core/limits.h"

namespace kvcache {

namespace {

// Each policy here has one option or none.
struct Entry {
  const char* name;
  const char* option;  // null: none
  double standard, least, most;
  bool is_integer;
  std::unique_ptr<EvictionPolicy> (*make)(int64_t num_blocks, double option);
};

const Entry kEntries[] = {
    {"last_access", nullptr, 0, 0, 0, false,
     [](int64_t num_blocks, double) -> std::unique_ptr<EvictionPolicy> {
       return std::make_unique<LastAccess>(num_blocks);
     }},
    {"lru", nullptr, 0, 0, 0, false,
     [](int64_t, double) -> std::unique_ptr<EvictionPolicy> { return nullptr; }},
    {"priority", "default_priority", 35, 0, 100, true,
     [](int64_t num_blocks, double value) -> std::unique_ptr<EvictionPolicy> {
       return std::make_unique<Priority>(num_blocks, static_cast<int32_t>(value));
     }},
    {"s3_fifo", "small_share", 0.1, 0, 1, false,
     [](int64_t num_blocks, double value) -> std::unique_ptr<EvictionPolicy> {
       return std::make_unique<S3Fifo>(num_blocks, value);
     }},
    {"segmented_lru", "protected_share", 0.8, 0, 1, false,
     [](int64_t num_blocks, double value) -> std::unique_ptr<EvictionPolicy> {
       return std::make_unique<SegmentedLru>(num_blocks, value);
     }},
};

double checked_option(const Entry& entry, const std::string& option, double value) {
  std::ostringstream text;
  text << "eviction '" << entry.name << "': option '" << option << "' is " << value
       << ": expected ";
  if (entry.option == nullptr) {
    text << "no options";
  } else if (option != entry.option) {
    text << "no option but '" << entry.option << "'";
  } else if (!(value >= entry.least && value <= entry.most) ||
             (entry.is_integer && value != std::floor(value))) {
    text << (entry.is_integer ? "an integer from " : "") << entry.least << " to " << entry.most;
  } else {
    return value;
  }
  throw std::invalid_argument(text.str());
}

}  // namespace

std::vector<std::string> eviction_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kEntries) names.emplace_back(entry.name);
  return names;
}

std::unique_ptr<EvictionPolicy> make_eviction_policy(const std::string& name,
                                                     const std::map<std::string, double>& options,
                                                     int64_t num_blocks) {
  std::string known;
  for (const Entry& entry : kEntries) {
    known += (known.empty() ? "" : ", ") + std::string(entry.name);
    if (name != entry.name) continue;
    double value = entry.standard;
    for (const auto& [option, given] : options) value = checked_option(entry, option, given);
    return entry.make(checked_size("num_blocks", num_blocks, 2, " (the null block is counted)"),
                      value);
  }
  throw std::invalid_argument("eviction is '" + name + "': expected one of " + known);
}

}  // namespace kvcache
