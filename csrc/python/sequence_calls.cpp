// SPDX-License-Identifier: Apache-2.0
#include "python/sequence_calls.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "python/arrays.h"

namespace kvcache::sequences {
namespace {

std::shared_ptr<TokenChain> chain_of(const py::handle& tokens) {
  return py::cast<std::shared_ptr<TokenChain>>(tokens.attr("chain"));
}

// Returns the entry, or null if there is none.
py::object entry_of(const py::dict& entries, const py::object& name) {
  PyObject* entry = PyDict_GetItemWithError(entries.ptr(), name.ptr());
  if (entry == nullptr && PyErr_Occurred()) throw py::error_already_set();
  return py::reinterpret_borrow<py::object>(entry);
}

// Returns a request whose whole prompt is computed in one step, and whose blocks are cached once
// they are marked as computed.
NewRow new_row(std::shared_ptr<TokenChain> chain) {
  NewRow asked;
  asked.chain = std::move(chain);
  asked.computes_whole = asked.waits_for_marks = true;
  return asked;
}

}  // namespace

void SequenceCalls::set_row(const py::object& seq_id, const py::object& owner, int32_t row) {
  value_of(owner).row = row;
  if (PyDict_SetItem(allocated_.ptr(), seq_id.ptr(), owner.ptr()) != 0) {
    throw py::error_already_set();
  }
}

bool SequenceCalls::take_rows(const py::list& sequences, const py::list& hits, int64_t num_cached,
                              bool skips_blocks, const py::object& encoder, int64_t since) {
  struct New {
    py::object seq_id, owner;  // the id and owner of an AllocatedSequence that has no row
    std::shared_ptr<TokenChain> chain;
  };
  std::vector<New> all;
  for (const py::handle& item : sequences) {
    const auto each = py::cast<py::tuple>(item);
    const py::object tokens = each[1];
    AllocatedSequence begun = all.empty()
                                  ? AllocatedSequence::begun(tokens, num_cached, skips_blocks)
                                  : value_of(all[0].owner).forked(tokens);
    all.push_back({each[0], py::cast(std::move(begun)), chain_of(tokens)});
  }
  NewRow asked = new_row(all[0].chain);
  asked.num_tokens = value_of(all[0].owner).num_tokens - num_cached;
  const std::vector<std::vector<BlockId>> blocks = int32_lists(hits, "computed_blocks");
  check_since(since);
  const Slots slots = native_->admit(asked, blocks);
  if (slots.status != kvcache::Status::kServed) return false;
  ++num_changes_;
  const Soundness::Change change = native_->change("allocate");
  for (const New& each : all) {
    const bool is_first = &each == all.data();
    const int32_t row = is_first ? slots.row : native_->fork(slots.row, each.chain).row;
    // Create the table now, because every scheduler reads it in the same step.
    const std::vector<BlockId>& held = native_->blocks(row, 0);
    value_of(each.owner).table = list_of(held, held.size());
    set_row(each.seq_id, each.owner, row);
  }
  if (!encoder.is_none()) take_encoder_row(py::cast<py::tuple>(encoder));
  return true;
}

// For a prompt, blocks outside the window are not allocated, but for later tokens they are. Because
// all encoder tokens are attended to, all of them except the first are added as later tokens.
void SequenceCalls::take_encoder_row(const py::tuple& encoder) {
  const auto num_more = py::cast<int64_t>(encoder[3]) - 1;
  NewRow asked = new_row(chain_of(encoder[2]));
  asked.num_tokens = 1;
  asked.num_lookahead = num_more;
  const Slots slots = native_->admit(asked, {{}});
  if (slots.status != kvcache::Status::kServed) {
    throw std::logic_error("an encoder that fits got no slots");
  }
  if (num_more > 0) {
    const RowAsk more{slots.row, num_more, 0, nullptr, num_more};
    native_->extend(more, /*lists_new=*/false);
  }
  py::cast<py::dict>(encoder[0])[encoder[1]] = py::int_(slots.row);
}

void SequenceCalls::fork_row(const py::object& parent, const py::object& seq_id,
                             const py::object& tokens, int64_t since) {
  const int32_t row = value_of(parent).row;
  const py::object child = py::cast(value_of(parent).forked(tokens));
  const std::shared_ptr<TokenChain> chain = chain_of(tokens);
  begin_change(since);
  const int32_t child_row = native_->fork(row, chain).row;
  const Soundness::Change change = native_->change("fork");
  set_row(seq_id, child, child_row);
}

void SequenceCalls::free_row(const py::object& seq_id) {
  if (const py::object known = entry_of(allocated_, seq_id)) {
    free_entry(allocated_, seq_id, value_of(known).row);
  }
}

void SequenceCalls::free_encoder_row(const py::dict& rows, const py::object& request_id) {
  if (const py::object row = entry_of(rows, request_id)) {
    free_entry(rows, request_id, py::cast<int32_t>(row));
  }
}

// Removes the row and the entry together, because comparing names may run Python code that raises
// an exception.
void SequenceCalls::free_entry(const py::dict& entries, const py::object& name, int32_t row) {
  native_->free(row);
  ++num_changes_;
  if (native_->is_broken()) return;
  const Soundness::Change change = native_->change("free");
  if (PyDict_DelItem(entries.ptr(), name.ptr()) != 0) throw py::error_already_set();
}

py::object SequenceCalls::swap_in_rows(const std::vector<int32_t>& rows, int64_t since) const {
  begin_change(since);
  const auto moved = native_->swap_in(rows);
  if (!moved) return py::none();
  const Soundness::Change change = native_->change("swap_in");
  return list_of_pairs(*moved);
}

py::object SequenceCalls::swap_out_rows(const std::vector<int32_t>& rows, const py::list& sequences,
                                        int64_t since) const {
  begin_change(since);
  const auto moved = native_->swap_out(rows);
  if (!moved) return py::none();
  const Soundness::Change change = native_->change("swap_out");
  for (const py::handle& each : sequences) {
    value_of(py::reinterpret_borrow<py::object>(each)).forget_views();
  }
  return list_of_pairs(*moved);
}

PyObject* SequenceCalls::can_allocate(py::handle group, py::handle num_lookahead_slots) const {
  const int64_t lookahead = size_argument(num_lookahead_slots, "num_lookahead_slots");
  Sequences seqs = Sequences::of(group);
  py::object seq;
  do {
    seq = seqs.next();
    if (!seq) fail_none(group, "WAITING");
  } while (status_of(seq) != Status::kWaiting);
  const int64_t num_encoder_tokens = has_encoder(group) ? encoder_length(group, max_model_len_) : 0;
  const int64_t num_tokens = length_of(seq);
  const int64_t required = num_required(num_tokens + lookahead, num_encoder_tokens);
  native_->check_reader();
  const int64_t num_total = native_->pool().num_total(), num_free = native_->pool().num_free();
  const bool fits_ever = num_tokens <= max_model_len_ && num_total - required >= watermark_blocks_;
  return (!fits_ever                                 ? statuses_.never
          : num_free - required >= watermark_blocks_ ? statuses_.ok
                                                     : statuses_.later)
      .inc_ref()
      .ptr();
}

PyObject* SequenceCalls::can_append_slots(py::handle group, py::handle num_lookahead_slots) const {
  const int64_t lookahead = size_argument(num_lookahead_slots, "num_lookahead_slots");
  int64_t num_touched = 0;
  bool is_too_long = false;
  Sequences seqs = Sequences::of(group);
  while (const py::object seq = seqs.next()) {
    if (status_of(seq) != Status::kRunning) continue;
    const py::object owner = known(seq);
    const AllocatedSequence& each = value_of(owner);
    const int64_t start = each.num_tokens, num_tokens = start + num_new(seq, each);
    is_too_long |= num_tokens > max_model_len_;
    num_touched += num_touched_blocks(start, num_tokens + lookahead);
  }
  native_->check_reader();
  return py::bool_(!is_too_long && num_touched <= native_->pool().num_free()).release().ptr();
}

// Checks that the ids of the last block with slots, which starts with token `begin`, are unchanged.
// ids[at]: the id of this token.
// Otherwise, a block whose KV belongs to other tokens would be cached.
void SequenceCalls::check_same_ids(const AllocatedSequence& known, py::handle seq, py::handle ids,
                                   int64_t begin, int64_t at) const {
  const int32_t* const before = native_->tokens(known.row);
  for (int64_t i = begin; i < known.num_tokens && at < PyList_GET_SIZE(ids.ptr()); ++i, ++at) {
    const auto item = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(ids.ptr(), at));
    int overflow = 0;
    if (PyLong_AsLongLongAndOverflow(item.ptr(), &overflow) == before[i] && overflow == 0) continue;
    PyErr_Clear();
    throw py::value_error("get_token_ids()[" + std::to_string(i) + "] of seq " +
                          repr_of(seq_id_of(seq)) + " is " + repr_of(item) + ": expected " +
                          std::to_string(before[i]) +
                          ", as before, because tokens with slots must not change");
  }
}

// Reads a sequence's new token ids, if they are needed.
void SequenceCalls::read_ids(const AllocatedSequence& known, py::handle seq, int64_t num_new,
                             NewTokens* out) const {
  out->size = num_new;
  if (!known.reads_ids || num_new == 0) return;
  const py::object ids = call_method(seq, Names::get().get_token_ids);
  if (!PySequence_Check(ids.ptr()) || PyObject_Size(ids.ptr()) < 0) {
    clear_refusal();
    throw py::type_error("get_token_ids() of seq " + repr_of(seq_id_of(seq)) + " is " +
                         short_repr(ids) + ": expected a sequence of token ids");
  }
  const int64_t first = known.num_tokens, stop = first + num_new;
  const int64_t begin = (first - 1) / block_size_ * block_size_;
  if (PyList_Check(ids.ptr()) && PyList_GET_SIZE(ids.ptr()) >= first) {
    check_same_ids(known, seq, ids, begin, begin);
  } else {
    const py::list last(ids[py::slice(py::int_(begin), py::int_(first), py::none())]);
    if (static_cast<int64_t>(last.size()) == first - begin)
      check_same_ids(known, seq, last, begin, 0);
  }
  if (num_new == 1 && PyList_CheckExact(ids.ptr()) && PyList_GET_SIZE(ids.ptr()) == stop) {
    PyObject* last = PyList_GET_ITEM(ids.ptr(), first);
    int overflow = 0;
    const int64_t id =
        PyLong_CheckExact(last) ? PyLong_AsLongLongAndOverflow(last, &overflow) : kMaxInt32 + 1;
    if (overflow == 0 && id >= 0 && id <= kMaxInt32) {
      out->one = static_cast<int32_t>(id);
      out->are_read = true;
      return;
    }
  }
  const py::object tail = ids[py::slice(py::int_(first), py::none(), py::none())];
  const auto num_ids = static_cast<int64_t>(py::len(tail));
  if (num_ids != num_new) fail_ids(seq, first + num_ids, stop);
  const Int32Input array(tail, "token_ids", /*least=*/0);
  out->several.assign(array.data(), array.data() + array.size());
  out->are_read = true;
  for (int64_t i = 0; i < num_new; ++i) {
    if (out->data()[i] >= 0) continue;
    throw py::value_error("token_ids[" + std::to_string(i) + "] is " +
                          std::to_string(out->data()[i]) + ": expected 0 to 2147483647");
  }
}

// Returns whether slots were allocated, and adds the required copies to the pairs.
bool SequenceCalls::take(AllocatedSequence* known, int64_t num_new, const Slots& slots,
                         py::list* pairs) const {
  if (slots.status != kvcache::Status::kServed) return false;
  const Soundness::Change change = native_->change("append_slots");
  const int64_t start = known->num_tokens;
  known->num_tokens = start + num_new;
  refresh_table(known, start / block_size_);
  for (size_t i = 0; i < slots.copies.size(); i += 2) {
    pairs->append(py::make_tuple(slots.copies[i], slots.copies[i + 1]));
  }
  return true;
}

PyObject* SequenceCalls::append_slots(py::handle seq, py::handle num_lookahead_slots) const {
  const int64_t since = num_changes_;
  const py::object owner = known(seq);
  AllocatedSequence& known = value_of(owner);
  const int64_t lookahead = size_argument(num_lookahead_slots, "num_lookahead_slots");
  NewTokens tokens;
  const int64_t num_new = this->num_new(seq, known);
  check_on_device(known, seq);
  py::list pairs;
  if (num_new == 0 && lookahead == 0) return pairs.release().ptr();
  read_ids(known, seq, num_new, &tokens);
  begin_change(since);
  const RowAsk ask{known.row, tokens.size, lookahead, tokens.data(), tokens.size};
  const Slots slots = native_->extend(ask, /*lists_new=*/false);
  if (take(&known, num_new, slots, &pairs)) return pairs.release().ptr();
  throw py::value_error("seq " + repr_of(seq_id_of(seq)) + " cannot get " +
                        std::to_string(num_new) + " slots and " + std::to_string(lookahead) +
                        " more, because only " + std::to_string(native_->pool().num_free()) +
                        " blocks are free: expected a call to can_append_slots first");
}

namespace {

// The new tokens of several sequences. They have already been appended to the sequences' chains,
// and are rolled back unless they receive slots.
class TakenTokens {
 public:
  TakenTokens(Manager* native, std::vector<RowAsk> all) : native_(native), all_(std::move(all)) {
    native_->take_in(all_.data(), all_.size());
  }
  TakenTokens(const TakenTokens&) = delete;
  ~TakenTokens() {
    for (; next_ < all_.size(); ++next_) native_->give_back(all_[next_]);
  }
  // Appends the next sequence's tokens. They are kept if there are slots for them.
  Slots append_next() { return native_->serve(all_[next_++], /*lists_new=*/false); }
  void skip_next() { ++next_; }

 private:
  Manager* native_;
  std::vector<RowAsk> all_;
  size_t next_ = 0;
};

}  // namespace

PyObject* SequenceCalls::append_group_slots(py::handle groups,
                                            py::handle num_lookahead_slots) const {
  struct Growing {
    py::object owner;
    NewTokens tokens;
  };
  const int64_t lookahead = size_argument(num_lookahead_slots, "num_lookahead_slots");
  std::vector<Growing> all;
  std::vector<size_t> ends;  // end of each group in `all`
  const int64_t since = num_changes_;
  ++num_calls_;
  Sequences each_group(py::reinterpret_borrow<py::object>(groups), "seq_groups");
  while (const py::object group = each_group.next()) {
    Sequences seqs = Sequences::of(group);
    while (const py::object seq = seqs.next()) {
      if (status_of(seq) != Status::kRunning) continue;
      all.emplace_back();
      Growing& growing = all.back();
      growing.owner = known(seq);
      AllocatedSequence& known = value_of(growing.owner);
      check_on_device(known, seq);
      if (std::exchange(known.last_call, num_calls_) == num_calls_) {
        throw py::value_error("seq_groups has seq " + repr_of(seq_id_of(seq)) +
                              " twice: expected it once");
      }
      read_ids(known, seq, num_new(seq, known), &growing.tokens);
    }
    ends.push_back(all.size());
  }
  py::list pairs;
  begin_change(since);
  // If a group has a sequence that is too long, the group does not fit and ends the batch.
  const auto too_long = std::find_if(all.begin(), all.end(), [&](const Growing& each) {
    return value_of(each.owner).num_tokens + each.tokens.size > max_model_len_;
  });
  const auto num_short = static_cast<size_t>(too_long - all.begin());
  while (!ends.empty() && ends.back() > num_short) ends.pop_back();
  std::vector<RowAsk> asks;
  for (size_t i = 0; i < (ends.empty() ? 0 : ends.back()); ++i) {
    const NewTokens& tokens = all[i].tokens;
    asks.push_back(
        {value_of(all[i].owner).row, tokens.size, lookahead, tokens.data(), tokens.size});
  }
  TakenTokens taken(native_, std::move(asks));
  const NoCollection no_collection;
  std::optional<Soundness::Change> change;  // set when the first sequence is served
  size_t num_served = 0, first = 0;
  for (; num_served < ends.size(); first = ends[num_served++]) {
    int64_t num_touched = 0;
    for (size_t i = first; i < ends[num_served]; ++i) {
      const int64_t start = value_of(all[i].owner).num_tokens, stop = start + all[i].tokens.size;
      num_touched += num_touched_blocks(start, stop + lookahead);
    }
    if (num_touched > native_->pool().num_free()) break;
    for (size_t i = first; i < ends[num_served]; ++i) {
      if (all[i].tokens.size == 0 && lookahead == 0) {
        taken.skip_next();
        continue;
      }
      if (!take(&value_of(all[i].owner), all[i].tokens.size, taken.append_next(), &pairs)) {
        throw std::logic_error("slots that fit were not given");
      }
      if (!change) change.emplace(native_->soundness(), "append_group_slots");
    }
  }
  return py::make_tuple(num_served, pairs).release().ptr();
}

// Updates the views after blocks from `first_written` on were added or replaced. Leading blocks may
// also have left a window.
void SequenceCalls::refresh_table(AllocatedSequence* known, int64_t first_written) const {
  const std::vector<BlockId>& blocks = native_->blocks(known->row, 0);
  const auto size = static_cast<int64_t>(blocks.size());
  const int64_t num_dropped_before = known->num_dropped;
  while (known->num_dropped < size && blocks[static_cast<size_t>(known->num_dropped)] == kNullBlock)
    ++known->num_dropped;
  if (known->num_dropped > num_dropped_before) known->hits = py::object();
  if (!known->table) return;
  PyObject* list = known->table.ptr();
  const auto set = [&](int64_t b) {
    PyObject* const id = ids_.at(blocks[static_cast<size_t>(b)]);
    if (PyList_GET_ITEM(list, b) == id) return;
    Py_INCREF(id);
    if (PyList_SetItem(list, b, id) != 0) throw py::error_already_set();
  };
  const int64_t num_known = std::min<int64_t>(PyList_GET_SIZE(list), size);
  for (int64_t b = num_dropped_before; b < std::min(known->num_dropped, num_known); ++b) set(b);
  for (int64_t b = first_written; b < num_known; ++b) set(b);
  for (int64_t b = num_known; b < size; ++b) {
    PyObject* const id = ids_.at(blocks[static_cast<size_t>(b)]);
    if (PyList_Append(list, id) != 0) throw py::error_already_set();
  }
}

py::list SequenceCalls::list_of(const std::vector<BlockId>& blocks, size_t size) const {
  const NoCollection no_collection;
  py::list out(size);
  for (size_t b = 0; b < size; ++b) {
    PyObject* const id = ids_.at(blocks[b]);
    Py_INCREF(id);
    PyList_SET_ITEM(out.ptr(), static_cast<py::ssize_t>(b), id);
  }
  return out;
}

PyObject* SequenceCalls::get_block_table(py::handle seq, py::handle) const {
  const py::object owner = known(seq);
  AllocatedSequence& known = value_of(owner);
  check_on_device(known, seq);
  if (!known.table) {
    const std::vector<BlockId>& blocks = native_->blocks(known.row, 0);
    known.table = list_of(blocks, blocks.size());
  }
  return known.table.inc_ref().ptr();
}

PyObject* SequenceCalls::access_all_blocks_in_seq(py::handle seq, py::handle now) const {
  const int64_t since = num_changes_;
  const py::object owner = known(seq);
  const AllocatedSequence& known = value_of(owner);
  const double moment = number_argument(now, "now");
  check_swapped_in(known, seq);
  check_since(since);
  native_->access(known.row, moment);
  Py_RETURN_NONE;
}

// Returns the sum of all of the sequence's marks, including `count`.
int64_t SequenceCalls::marks_with(const AllocatedSequence& known, int64_t count,
                                  py::handle seq) const {
  const int64_t num_marked = std::min(known.num_marked + count, known.num_tokens);
  if (!known.skips_blocks || num_marked >= known.num_prompt) return num_marked;
  throw py::value_error(std::to_string(num_marked) + " tokens of seq " + repr_of(seq_id_of(seq)) +
                        " are marked as computed, but a prompt longer than the window is computed "
                        "in one step: expected a token_chunk_size of " +
                        std::to_string(known.num_prompt));
}

PyObject* SequenceCalls::mark_blocks_as_computed(py::handle group,
                                                 py::handle token_chunk_size) const {
  const int64_t count = size_argument(token_chunk_size, "token_chunk_size");
  if (!enable_caching_ && !window_) Py_RETURN_NONE;
  const int64_t since = num_changes_;
  std::vector<std::pair<py::object, int64_t>> more;  // all sequences except the first
  std::pair<py::object, int64_t> first;
  Sequences seqs = Sequences::of(group);
  while (const py::object seq = seqs.next()) {
    py::object owner = find(seq);
    const Status status = status_of(seq);
    if (!owner || status == Status::kSwapped || status == Status::kFinished) continue;
    const int64_t num_marked = marks_with(value_of(owner), count, seq);
    if (!first.first) {
      first = {std::move(owner), num_marked};
    } else {
      more.emplace_back(std::move(owner), num_marked);
    }
  }
  begin_change(since);
  std::optional<Soundness::Change> change;  // set when the first sequence is marked
  const auto mark = [&](const std::pair<py::object, int64_t>& each) {
    AllocatedSequence& known = value_of(each.first);
    if (enable_caching_) native_->mark_computed(known.row, known.num_computed(each.second));
    known.num_with_kv = std::max(known.num_with_kv, known.num_computed(each.second));
    known.num_marked = each.second;
    if (!change) change.emplace(native_->soundness(), "mark_blocks_as_computed");
  };
  if (first.first) mark(first);
  for (const auto& each : more) mark(each);
  Py_RETURN_NONE;
}

// Returns the leading blocks that were hits. Sequences that were forked from the same sequence
// share a list.
const py::object& SequenceCalls::hits_of(AllocatedSequence* known) const {
  if (!known->hits) {
    const std::vector<BlockId>& blocks = native_->blocks(known->row, 0);
    known->hits = list_of(blocks, static_cast<size_t>(known->num_cached / block_size_));
  }
  return known->hits;
}

PyObject* SequenceCalls::get_common_computed_block_ids(py::handle seqs, py::handle) const {
  const int64_t since = num_changes_;
  Sequences each(py::reinterpret_borrow<py::object>(seqs), "seqs");
  py::object common;
  while (const py::object seq = each.next()) {
    const py::object owner = known(seq);
    AllocatedSequence& known = value_of(owner);
    check_since(since);
    check_on_device(known, seq);
    const py::object& hits = hits_of(&known);
    if (!common) common = hits;
    if (common.is(hits)) continue;
    const py::ssize_t size = PyList_GET_SIZE(common.ptr()), size_here = PyList_GET_SIZE(hits.ptr());
    py::ssize_t n = 0;
    while (n < std::min(size, size_here) && PyLong_AsLong(PyList_GET_ITEM(common.ptr(), n)) ==
                                                PyLong_AsLong(PyList_GET_ITEM(hits.ptr(), n))) {
      ++n;
    }
    if (n == size && n == size_here) {
      known.hits = common;
    } else if (n < size) {
      common = py::reinterpret_steal<py::object>(PyList_GetSlice(common.ptr(), 0, n));
      if (!common) throw py::error_already_set();
    }
  }
  return common ? common.release().ptr() : py::list().release().ptr();
}

}  // namespace kvcache::sequences
