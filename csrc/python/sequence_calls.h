// SPDX-License-Identifier: Apache-2.0
// The calls that a scheduler makes for each sequence in each step. They read a sequence's Python
// objects and return the result of the native manager.
//
// Returned lists are updated in place, so the cost of a call does not depend on the length of the
// sequence.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/manager.h"
#include "core/zeroed_array.h"
#include "python/sequence_objects.h"

namespace kvcache::sequences {

// A sequence that has blocks: its row, its tokens, and the number of tokens that are marked as
// computed.
struct AllocatedSequence {
  int32_t row;
  py::object tokens;  // kvcache.compat.sequences.tokens.Tokens
  bool reads_ids;     // whether token ids are needed
  // If the prompt is longer than the window, only the blocks within the window at the end of the
  // prompt are allocated.
  bool skips_blocks;
  int64_t num_tokens;       // number of tokens with slots
  int64_t num_prompt;       // number of tokens with slots at allocation
  int64_t num_cached;       // number of prompt tokens that hit the cache at allocation
  int64_t num_marked;       // sum of all marks, at most `num_tokens`
  int64_t num_with_kv;      // number of tokens with KV after the last mark
  int64_t num_dropped = 0;  // number of leading null entries in `table`
  // The sequence's blocks and its hit blocks, as views that are created on demand.
  py::object table, hits;
  int64_t last_call = 0;  // last multi-sequence call that included this sequence

  // Returns the number of tokens with KV if the sum of all marks is `marked`. After the prompt, a
  // step may accept several tokens, whatever number it marks.
  int64_t num_computed(int64_t marked) const {
    return marked < num_prompt ? marked : std::max(marked, num_tokens - 1);
  }
  // Returns the initial state of a prompt with these tokens, without a row.
  static AllocatedSequence begun(const py::object& tokens, int64_t num_cached, bool skips_blocks) {
    AllocatedSequence out{};
    out.row = -1;
    out.tokens = tokens;
    out.reads_ids = py::cast<bool>(tokens.attr("are_read"));
    out.skips_blocks = skips_blocks;
    out.num_tokens = out.num_prompt = static_cast<int64_t>(py::len(tokens.attr("ids")));
    out.num_cached = out.num_with_kv = num_cached;
    return out;
  }
  // Returns the initial state of a child, without a row.
  AllocatedSequence forked(const py::object& child_tokens) const {
    AllocatedSequence child = *this;
    child.row = -1;
    child.tokens = child_tokens;
    child.table = py::object();
    child.num_dropped = 0;
    return child;
  }
  void forget_views() {
    table = hits = py::object();
    num_dropped = 0;
  }
};

// New tokens that need slots.
struct NewTokens {
  int64_t size = 0;
  bool are_read = false;         // whether the token ids are needed
  int32_t one = 0;               // the id, if there is a single token
  std::vector<int32_t> several;  // the ids, if there are several tokens

  const int32_t* data() const {
    return !are_read ? nullptr : several.empty() ? &one : several.data();
  }
};

// The Python integers for block ids, which all lists share. Each integer is created at its first
// use; after that, adding a reference takes a fraction of the time.
class BlockIds {
 public:
  explicit BlockIds(int64_t num_blocks)
      : objects_(static_cast<size_t>(num_blocks), Pages::kSmall) {}
  BlockIds(const BlockIds&) = delete;
  ~BlockIds() {
    for (BlockId id = 0; id < stop_; ++id) Py_XDECREF(objects_[id]);
  }
  // Returns a borrowed reference.
  PyObject* at(BlockId id) {
    PyObject*& object = objects_[id];
    return object != nullptr ? object : made(id);
  }

 private:
  PyObject* made(BlockId id) {
    PyObject* const made = PyLong_FromLong(id);
    if (made == nullptr) throw py::error_already_set();
    stop_ = std::max(stop_, id + 1);
    return objects_[id] = made;
  }

  ZeroedArray<PyObject*> objects_;
  BlockId stop_ = 0;  // this id and all higher ids have never been used
};

struct AllocStatuses {
  py::object ok, later, never;
};

class SequenceCalls {
 public:
  SequenceCalls(const py::object& native, int64_t block_size, std::optional<int64_t> window,
                bool enable_caching, int64_t watermark_blocks, int64_t max_model_len,
                const py::tuple& statuses)
      : owner_(native),
        native_(py::cast<Manager*>(native)),
        block_size_(block_size),
        window_(window),
        enable_caching_(enable_caching),
        watermark_blocks_(watermark_blocks),
        max_model_len_(max_model_len),
        ids_(native_->pool().num_total() + 1),
        statuses_{statuses[0], statuses[1], statuses[2]} {}

  const py::dict& allocated() const { return allocated_; }
  int64_t block_size() const { return block_size_; }
  std::optional<int64_t> sliding_window() const { return window_; }
  bool enable_caching() const { return enable_caching_; }
  int64_t max_model_len() const { return max_model_len_; }
  int64_t watermark_blocks() const { return watermark_blocks_; }
  void set_watermark_blocks(int64_t num_blocks) { watermark_blocks_ = num_blocks; }

  // Returns the AllocatedSequence of a sequence, or null if it has no blocks.
  py::object find(py::handle seq) const {
    const py::object seq_id = seq_id_of(seq);
    PyObject* known = PyDict_GetItemWithError(allocated_.ptr(), seq_id.ptr());
    if (known == nullptr && PyErr_Occurred()) throw py::error_already_set();
    return py::reinterpret_borrow<py::object>(known);
  }
  py::object known(py::handle seq) const {
    py::object found = find(seq);
    if (!found) fail_unknown(seq);
    return found;
  }
  static AllocatedSequence& value_of(const py::object& known) {
    auto* instance = reinterpret_cast<py::detail::instance*>(known.ptr());
    return *static_cast<AllocatedSequence*>(instance->get_value_and_holder().value_ptr());
  }
  int64_t num_new(py::handle seq) const {
    const py::object owner = known(seq);
    return num_new(seq, value_of(owner));
  }
  int64_t num_required(int64_t num_slots, int64_t num_encoder_tokens) const {
    int64_t required = ceil_div(num_slots, block_size_);
    if (window_) required = std::min(required, *window_ / block_size_ + 2);
    return required + ceil_div(num_encoder_tokens, block_size_);
  }

  // Returns the number of changes so far, to be passed as `since`.
  int64_t num_changes() const { return num_changes_; }

  // Reading the engine's objects may run Python code, and this code may call the manager.
  // Therefore, calls that change the manager have a parameter `since`, the number of changes when
  // the call began. If another call has changed the manager since then, they raise RuntimeError
  // without changing anything.

  // Creates rows with slots for the prompt of `sequences`, which are (seq_id, Tokens) pairs, after
  // a hit. The blocks are allocated for the first sequence and shared by the others. `encoder` is
  // None or, for an encoder that fits, (rows of encoders, request_id, Tokens of one token, number
  // of tokens). If the prompt does not fit, returns false without changing anything.
  bool take_rows(const py::list& sequences, const py::list& hits, int64_t num_cached,
                 bool skips_blocks, const py::object& encoder, int64_t since);
  // Creates a row for a child that shares all blocks of `parent`.
  void fork_row(const py::object& parent, const py::object& seq_id, const py::object& tokens,
                int64_t since);
  // Frees the sequence's row, if it has one.
  void free_row(const py::object& seq_id);
  void free_encoder_row(const py::dict& rows, const py::object& request_id);
  // Returns the blocks to move as (device block, host block) pairs, or None if they do not fit.
  py::object swap_out_rows(const std::vector<int32_t>& rows, const py::list& sequences,
                           int64_t since) const;
  // Returns the blocks to move as (host block, device block) pairs, or None if they do not fit.
  py::object swap_in_rows(const std::vector<int32_t>& rows, int64_t since) const;

  // Calls made by the scheduler:
  PyObject* can_allocate(py::handle group, py::handle num_lookahead_slots) const;
  PyObject* can_append_slots(py::handle group, py::handle num_lookahead_slots) const;
  PyObject* append_slots(py::handle seq, py::handle num_lookahead_slots) const;
  PyObject* append_group_slots(py::handle groups, py::handle num_lookahead_slots) const;
  PyObject* get_block_table(py::handle seq, py::handle) const;
  PyObject* access_all_blocks_in_seq(py::handle seq, py::handle now) const;
  PyObject* mark_blocks_as_computed(py::handle group, py::handle token_chunk_size) const;
  PyObject* get_common_computed_block_ids(py::handle seqs, py::handle) const;

 private:
  // Counts a change. Raises RuntimeError if there were other changes after `since`.
  void begin_change(int64_t since) const {
    check_since(since);
    ++num_changes_;
  }
  void check_since(int64_t since) const {
    if (num_changes_ == since) return;
    throw std::runtime_error(
        "another call changed the manager during this call (from the code of a sequence or a "
        "signal handler): only one call can run at a time");
  }
  void set_row(const py::object& seq_id, const py::object& owner, int32_t row);
  void free_entry(const py::dict& entries, const py::object& name, int32_t row);
  void take_encoder_row(const py::tuple& encoder);
  int64_t num_new(py::handle seq, const AllocatedSequence& known) const {
    const int64_t num_tokens = length_of(seq);
    if (num_tokens >= known.num_tokens) return num_tokens - known.num_tokens;
    throw py::value_error("seq " + repr_of(seq_id_of(seq)) + " has " + std::to_string(num_tokens) +
                          " tokens: expected " + std::to_string(known.num_tokens) +
                          " or more, the tokens that have slots");
  }
  void check_on_device(const AllocatedSequence& known, py::handle seq) const {
    native_->check_reader();
    check_swapped_in(known, seq);
  }
  // Like check_on_device, for callers that have already checked the calling thread.
  void check_swapped_in(const AllocatedSequence& known, py::handle seq) const {
    if (native_->is_on_host(known.row)) {
      check_tier(*native_, known.row, "seq", seq_id_of(seq), /*on_host=*/false);
    }
  }
  int64_t marks_with(const AllocatedSequence& known, int64_t count, py::handle seq) const;
  // Returns the number of blocks that contain slots `start` to `stop - 1`.
  int64_t num_touched_blocks(int64_t start, int64_t stop) const {
    return stop > start ? (stop - 1) / block_size_ - start / block_size_ + 1 : 0;
  }
  void check_same_ids(const AllocatedSequence& known, py::handle seq, py::handle ids, int64_t begin,
                      int64_t at) const;
  void read_ids(const AllocatedSequence& known, py::handle seq, int64_t num_new,
                NewTokens* out) const;
  bool take(AllocatedSequence* known, int64_t num_new, const Slots& slots, py::list* pairs) const;
  void refresh_table(AllocatedSequence* known, int64_t first_written) const;
  const py::object& hits_of(AllocatedSequence* known) const;
  py::list list_of(const std::vector<BlockId>& blocks, size_t size) const;

  py::object owner_;  // keeps `native_` alive
  Manager* native_;
  int64_t block_size_;
  std::optional<int64_t> window_;
  bool enable_caching_;
  int64_t watermark_blocks_, max_model_len_;
  mutable BlockIds ids_;
  AllocStatuses statuses_;
  py::dict allocated_;               // sequences with blocks, by seq_id
  mutable int64_t num_calls_ = 0;    // number of multi-sequence calls
  mutable int64_t num_changes_ = 0;  // number of changes to rows and marks
};

}  // namespace kvcache::sequences
