// Rows that leave the device for the host, and come back.
#include <algorithm>
#include <stdexcept>
#include <string>

#include "core/manager/manager.h"

namespace kvcache {

int64_t Manager::num_unique_blocks(const std::vector<int32_t>& rows) const {
  check_reader();
  for (int32_t row : rows) rows_.at(row);
  return swap_.num_unique_blocks(rows);
}

std::optional<std::vector<BlockId>> Manager::swap_out(const std::vector<int32_t>& rows) {
  const Call call(this);
  checks_.check_has_host("swap_out was called");
  checks_.check_swap(rows, /*on_host=*/false);
  for (int32_t row : rows) intake_.hash_filled(row);
  checks_.check_swap(rows, /*on_host=*/false);  // a digest may call back
  if (swap_.num_unique_blocks(rows) > host_->pages().num_free()) return std::nullopt;
  plan_.begin_direct();
  swap_.begin();
  for (int32_t row : rows) leave(row);
  publish_offloaded();
  return plan_.direct_pairs();
}

std::optional<std::vector<BlockId>> Manager::swap_in(const std::vector<int32_t>& rows) {
  const Call call(this);
  checks_.check_has_host("swap_in was called");
  checks_.check_swap(rows, /*on_host=*/true);
  if (swap_.num_unique_blocks(rows) > pool_.num_free()) return std::nullopt;
  plan_.begin_direct();
  swap_.begin();
  for (int32_t row : rows) swap_.move_in(row);
  return plan_.direct_pairs();
}

// Moves the row to the host. Whether it fits there.
bool Manager::leave(int32_t row) {
  const std::optional<RowSwap::Departure> departure = swap_.departure_of(row);
  if (!departure) return false;
  publisher_.publish(row);
  ReleaseFeatures features;
  features.is_swapped_out = true;
  release_.notify_release(row, features);
  swap_.move_out(row, *departure);
  return true;
}

// Which of the rows have left.
std::vector<bool> Manager::swap_out_rows(const StepRequest& request) {
  std::vector<bool> have_left;
  swap_.begin();
  for (int64_t i = 0; i < request.num_swap_out_rows; ++i) {
    const int32_t row = request.swap_out_rows[i];
    have_left.push_back(leave(row));
    if (have_left.back()) journal_.note_swapped(row, rows_[row]);
  }
  swap_.begin();
  return have_left;
}

void Manager::answer_swapped(const StepRequest& request, const std::vector<bool>& have_left) {
  for (size_t i = 0; i < have_left.size(); ++i) {
    const int32_t row = request.swap_out_rows[i];
    plan_.answer(row, have_left[i] ? Status::kServed : Status::kWait, rows_[row].num_computed);
  }
}

}  // namespace kvcache
