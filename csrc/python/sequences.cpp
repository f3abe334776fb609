// The calls that a scheduler makes for each sequence in each step, as methods of the Python class
// `BlockSpaceManager`: what Python objects say of a sequence in, the native manager's answer out.
//
// They are CPython methods, not pybind11's, whose dispatch would cost more than they do. Lists that
// they answer are kept up to date, not made anew: none of them costs more for a longer sequence.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "core/groups/cache_group.h"
#include "core/manager/manager.h"
#include "python/arrays.h"
#include "python/construct.h"

namespace kvcache {
namespace {

std::string repr_of(py::handle value) { return py::cast<std::string>(py::repr(value)); }

// Attributes of sequences and groups.
struct Names {
  static const Names& get() {
    static const auto* names = new Names;  // leaked: it must outlive the interpreter
    return *names;
  }
  py::str seq_id = interned("seq_id"), status = interned("status"), name = interned("name");
  py::str get_len = interned("get_len"), get_token_ids = interned("get_token_ids");
  py::str get_seqs = interned("get_seqs"), request_id = interned("request_id");
  py::str is_encoder_decoder = interned("is_encoder_decoder");
  py::str get_encoder_seq = interned("get_encoder_seq");

 private:
  static py::str interned(const char* text) {
    return py::reinterpret_steal<py::str>(PyUnicode_InternFromString(text));
  }
};

py::object attribute(py::handle of, const py::str& name) {
  PyObject* value = PyObject_GetAttr(of.ptr(), name.ptr());
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object call_method(py::handle of, const py::str& name) {
  PyObject* const self = of.ptr();
  PyObject* value =
      PyObject_VectorcallMethod(name.ptr(), &self, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object seq_id_of(py::handle seq) { return attribute(seq, Names::get().seq_id); }

// `name` says of whose argument an error speaks; called only for one.
template <class Name>
int64_t whole_number(py::handle value, Name name, int64_t least, int64_t most) {
  int64_t number = 0;
  int overflow = 0;
  if (PyLong_CheckExact(value.ptr())) {
    number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  } else if (PyBool_Check(value.ptr()) || !PyIndex_Check(value.ptr())) {
    throw py::type_error(name() + " is " + repr_of(value) + ": expected an integer");
  } else {
    const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
    if (!index) throw py::error_already_set();
    number = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  }
  if (overflow == 0 && number >= least && number <= most) return number;
  throw py::value_error(name() + " is " + py::cast<std::string>(py::str(value)) + ": expected " +
                        std::to_string(least) + " to " + std::to_string(most));
}

int64_t size_argument(py::handle value, const char* name) {
  return whole_number(value, [=] { return std::string(name); }, 0, kMaxInt32);
}

int64_t length_of(py::handle seq) {
  const py::object length = call_method(seq, Names::get().get_len);
  return whole_number(
      length, [&] { return "get_len() of seq " + repr_of(seq_id_of(seq)); }, 1, kMaxInt32);
}

[[noreturn]] void fail_ids(py::handle seq, int64_t num_ids, int64_t num_tokens) {
  throw py::value_error("get_token_ids() of seq " + repr_of(seq_id_of(seq)) + " has " +
                        std::to_string(num_ids) + " tokens: expected " +
                        std::to_string(num_tokens) + ", as get_len() says");
}

[[noreturn]] void fail_unknown(py::handle seq) {
  throw py::value_error("seq " + repr_of(seq_id_of(seq)) +
                        " has no blocks: expected one that was allocated");
}

void check_tier(const Manager& native, int32_t row, const char* what, py::handle name,
                bool on_host) {
  if (native.is_on_host(row) == on_host) return;
  throw py::value_error(std::string(what) + " " + repr_of(name) +
                        (on_host ? " is on the device: expected one that is swapped out"
                                 : " is swapped out: expected one on the device"));
}

enum class Status { kWaiting, kRunning, kSwapped, kFinished, kOther };

Status status_named(PyObject* name) {
  constexpr std::pair<const char*, Status> kNames[] = {
      {"WAITING", Status::kWaiting}, {"RUNNING", Status::kRunning}, {"SWAPPED", Status::kSwapped}};
  for (const auto& [text, status] : kNames) {
    if (PyUnicode_CompareWithASCIIString(name, text) == 0) return status;
  }
  const auto text = py::reinterpret_borrow<py::object>(name);
  return py::cast<bool>(text.attr("startswith")("FINISHED")) ? Status::kFinished : Status::kOther;
}

// The status of a sequence, an enum member or text. What members are called does not change: those
// met before are known.
Status status_of(py::handle seq) {
  constexpr size_t kMostKnown = 32;  // an engine has one enum
  static auto* known = new std::vector<std::pair<PyObject*, Status>>;
  const Names& names = Names::get();
  const py::object status = attribute(seq, names.status);
  for (const auto& [member, value] : *known) {
    if (member == status.ptr()) return value;
  }
  if (PyUnicode_CheckExact(status.ptr())) return status_named(status.ptr());
  const py::object name = py::getattr(status, names.name, status);
  if (!PyUnicode_Check(name.ptr())) {
    throw py::type_error("status of seq " + repr_of(seq_id_of(seq)) + " is " + repr_of(status) +
                         ": expected an enum member or text");
  }
  const Status value = status_named(name.ptr());
  static auto* enum_type = new py::object(py::module_::import("enum").attr("Enum"));
  if (known->size() < kMostKnown && py::isinstance(status, *enum_type)) {
    known->emplace_back(status.inc_ref().ptr(), value);
  }
  return value;
}

// The sequences of a group, while Python code may run.
class Sequences {
 public:
  explicit Sequences(py::object seqs)
      : seqs_(PyList_CheckExact(seqs.ptr()) || PyTuple_CheckExact(seqs.ptr())
                  ? std::move(seqs)
                  : py::object(py::list(seqs))) {}
  static Sequences of(py::handle group) {
    return Sequences(call_method(group, Names::get().get_seqs));
  }
  // The next one; null behind the last.
  py::object next() {
    if (at_ >= PySequence_Fast_GET_SIZE(seqs_.ptr())) return {};
    return py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(seqs_.ptr(), at_++));
  }

 private:
  py::object seqs_;
  py::ssize_t at_ = 0;
};

[[noreturn]] void fail_none(py::handle group, const char* status) {
  throw py::value_error("seq_group " + repr_of(attribute(group, Names::get().request_id)) +
                        " has no " + status + " sequence: expected 1 or more");
}

// The group's sequences of this status, 1 or more.
py::list sequences_with(py::handle group, const py::str& status) {
  const Status wanted = status_named(status.ptr());
  Sequences seqs = Sequences::of(group);
  py::list out;
  while (const py::object seq = seqs.next()) {
    if (status_of(seq) == wanted) out.append(seq);
  }
  if (out.empty()) fail_none(group, py::cast<std::string>(status).c_str());
  return out;
}

int64_t encoder_length(py::handle group, int64_t max_model_len) {
  const py::object encoder = call_method(group, Names::get().get_encoder_seq);
  const py::object length = call_method(encoder, Names::get().get_len);
  const int64_t count =
      whole_number(length, [] { return std::string("get_encoder_seq().get_len()"); }, 0, kMaxInt32);
  if (count > 0 && count <= max_model_len) return count;
  throw py::value_error("the encoder of seq_group " +
                        repr_of(attribute(group, Names::get().request_id)) + " has " +
                        std::to_string(count) + " tokens: expected 1 to max_model_len, which is " +
                        std::to_string(max_model_len));
}

// A sequence that has blocks: its row, its tokens, and how many of them are said to be computed.
struct AllocatedSequence {
  int32_t row;
  py::object tokens;  // kvcache.allocator.sequences.tokens.Tokens
  bool reads_ids;     // whether its token ids are asked for
  bool skips_blocks;  // of a prompt longer than the window none are held that its end does not read
  int64_t num_tokens;   // that have slots
  int64_t num_prompt;   // of these, when it was allocated
  int64_t num_cached;   // of the prompt, hits when it was allocated
  int64_t num_marked;   // the sum of all marks, at most `num_tokens`
  int64_t num_with_kv;  // of them, after the last mark
  // Views, made when they are first asked for: its blocks, and those of them that were hits.
  int64_t num_dropped = 0;  // leading null entries of `table`
  py::object table, hits;
  int64_t last_call = 0;  // that named it, of those that name several

  // Tokens that have KV where the marks come to `marked`. Behind the prompt a step may accept
  // several tokens, whatever its mark says.
  int64_t num_computed(int64_t marked) const {
    return marked < num_prompt ? marked : std::max(marked, num_tokens - 1);
  }
  // A prompt of these tokens as it begins, in no row yet.
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
  // A child as it begins.
  AllocatedSequence forked(int32_t child_row, const py::object& child_tokens) const {
    AllocatedSequence child = *this;
    child.row = child_row;
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

// Tokens that a sequence gets slots for.
struct NewTokens {
  int64_t size = 0;
  bool are_read = false;         // else it does not matter which
  int32_t one = 0;               // where it is one
  std::vector<int32_t> several;  // else

  const int32_t* data() const {
    return !are_read ? nullptr : several.empty() ? &one : several.data();
  }
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
        statuses_{statuses[0], statuses[1], statuses[2]} {}

  const py::dict& allocated() const { return allocated_; }

  // The AllocatedSequence of a sequence; null where it has no blocks.
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
  int64_t num_required(py::handle group, int64_t num_slots) const {
    int64_t required = ceil_div(num_slots, block_size_);
    if (window_) required = std::min(required, *window_ / block_size_ + 2);
    const py::object has_encoder = call_method(group, Names::get().is_encoder_decoder);
    if (is_true(has_encoder)) {
      required += ceil_div(encoder_length(group, max_model_len_), block_size_);
    }
    return required;
  }

  // A row with slots for the prompt of `sequences`, (seq_id, Tokens) each, behind a hit, which the
  // first of them gets and the others share; and one for an encoder, (rows of encoders, request_id,
  // Tokens of one token, number of tokens) or None, which fits. False, with nothing changed, where
  // the prompt does not fit.
  bool take_rows(const py::list& sequences, const py::list& hits, int64_t num_cached,
                 bool skips_blocks, const py::object& encoder);
  // A row for a child that shares the blocks of `parent`.
  void fork_row(const py::object& parent, const py::object& seq_id, const py::object& tokens);
  // Whether the sequence had a row, which is free now.
  bool free_row(const py::object& seq_id);
  // The pairs that move, (device block, host block) each; None where they do not fit.
  py::object swap_out_rows(const std::vector<int32_t>& rows, const py::list& sequences) const;

  // The calls.
  PyObject* can_allocate(py::handle group, py::handle num_lookahead_slots) const;
  PyObject* can_append_slots(py::handle group, py::handle num_lookahead_slots) const;
  PyObject* append_slots(py::handle seq, py::handle num_lookahead_slots) const;
  PyObject* append_group_slots(py::handle groups, py::handle num_lookahead_slots) const;
  PyObject* get_block_table(py::handle seq, py::handle) const;
  PyObject* access_all_blocks_in_seq(py::handle seq, py::handle now) const;
  PyObject* mark_blocks_as_computed(py::handle group, py::handle token_chunk_size) const;
  PyObject* get_common_computed_block_ids(py::handle seqs, py::handle) const;

 private:
  void set_row(const py::object& seq_id, const py::object& owner, int32_t row) {
    value_of(owner).row = row;
    if (PyDict_SetItem(allocated_.ptr(), seq_id.ptr(), owner.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  void take_encoder_row(const py::tuple& encoder);
  static bool is_true(const py::object& value) {
    if (value.ptr() == Py_True || value.ptr() == Py_False) return value.ptr() == Py_True;
    const int answer = PyObject_IsTrue(value.ptr());
    if (answer < 0) throw py::error_already_set();
    return answer != 0;
  }
  int64_t num_new(py::handle seq, const AllocatedSequence& known) const {
    const int64_t num_tokens = length_of(seq);
    if (num_tokens >= known.num_tokens) return num_tokens - known.num_tokens;
    throw py::value_error("seq " + repr_of(seq_id_of(seq)) + " has " + std::to_string(num_tokens) +
                          " tokens: expected " + std::to_string(known.num_tokens) +
                          " or more, which have slots");
  }
  void check_on_device(const AllocatedSequence& known, py::handle seq) const {
    native_->check_reader();
    if (native_->is_on_host(known.row)) {
      check_tier(*native_, known.row, "seq", seq_id_of(seq), /*on_host=*/false);
    }
  }
  int64_t marks_with(const AllocatedSequence& known, int64_t count, py::handle seq) const;
  // Blocks in which slots `start` to `stop - 1` are.
  int64_t num_touched_blocks(int64_t start, int64_t stop) const {
    return stop > start ? (stop - 1) / block_size_ - start / block_size_ + 1 : 0;
  }
  void read_ids(const AllocatedSequence& known, py::handle seq, int64_t num_new,
                NewTokens* out) const;
  bool append(AllocatedSequence* known, const NewTokens& tokens, int64_t num_lookahead,
              py::list* pairs) const;
  void refresh_table(AllocatedSequence* known, int64_t first_written) const;
  const py::object& hits_of(AllocatedSequence* known) const;

  py::object owner_;  // of `native_`
  Manager* native_;
  int64_t block_size_;
  std::optional<int64_t> window_;
  bool enable_caching_;
  int64_t watermark_blocks_, max_model_len_;
  AllocStatuses statuses_;
  py::dict allocated_;             // by seq_id
  mutable int64_t num_calls_ = 0;  // that name several sequences
};

std::shared_ptr<TokenChain> chain_of(const py::handle& tokens) {
  return py::cast<std::shared_ptr<TokenChain>>(tokens.attr("chain"));
}

bool SequenceCalls::take_rows(const py::list& sequences, const py::list& hits, int64_t num_cached,
                              bool skips_blocks, const py::object& encoder) {
  struct New {
    py::object seq_id, owner;  // of an AllocatedSequence, in no row yet
    std::shared_ptr<TokenChain> chain;
  };
  std::vector<New> all;
  for (const py::handle& item : sequences) {
    const auto each = py::cast<py::tuple>(item);
    const py::object tokens = each[1];
    AllocatedSequence begun = all.empty()
                                  ? AllocatedSequence::begun(tokens, num_cached, skips_blocks)
                                  : value_of(all[0].owner).forked(/*child_row=*/-1, tokens);
    all.push_back({each[0], py::cast(std::move(begun)), chain_of(tokens)});
  }
  NewRow asked;
  asked.chain = all[0].chain;
  asked.num_tokens = value_of(all[0].owner).num_tokens - num_cached;
  const Slots slots = native_->allocate(asked, int32_lists(hits, "computed_blocks"), 0);
  if (slots.status != kvcache::Status::kServed) return false;
  const Soundness::Change change = native_->change("allocate");
  for (const New& each : all) {
    const bool is_first = &each == all.data();
    set_row(each.seq_id, each.owner,
            is_first ? slots.row : native_->fork(slots.row, each.chain).row);
  }
  if (!encoder.is_none()) take_encoder_row(py::cast<py::tuple>(encoder));
  return true;
}

// Blocks that a window leaves behind are not held of a prompt, but are of what comes later, and all
// of an encoder's tokens are read: behind the first they come later.
void SequenceCalls::take_encoder_row(const py::tuple& encoder) {
  const auto num_more = py::cast<int64_t>(encoder[3]) - 1;
  NewRow asked;
  asked.chain = chain_of(encoder[2]);
  asked.num_tokens = 1;
  const Slots slots = native_->allocate(asked, {{}}, num_more);
  if (slots.status != kvcache::Status::kServed) {
    throw std::logic_error("an encoder that fits got no slots");
  }
  if (num_more > 0) native_->append_known(slots.row, nullptr, num_more, 0);
  py::cast<py::dict>(encoder[0])[encoder[1]] = py::int_(slots.row);
}

void SequenceCalls::fork_row(const py::object& parent, const py::object& seq_id,
                             const py::object& tokens) {
  const int32_t row = value_of(parent).row;
  const py::object child = py::cast(value_of(parent).forked(/*child_row=*/-1, tokens));
  const int32_t child_row = native_->fork(row, chain_of(tokens)).row;
  const Soundness::Change change = native_->change("fork");
  set_row(seq_id, child, child_row);
}

bool SequenceCalls::free_row(const py::object& seq_id) {
  const auto known =
      py::reinterpret_borrow<py::object>(PyDict_GetItemWithError(allocated_.ptr(), seq_id.ptr()));
  if (!known) {
    if (PyErr_Occurred()) throw py::error_already_set();
    return false;
  }
  native_->free(value_of(known).row);
  if (PyDict_DelItem(allocated_.ptr(), seq_id.ptr()) != 0) throw py::error_already_set();
  return true;
}

py::object SequenceCalls::swap_out_rows(const std::vector<int32_t>& rows,
                                        const py::list& sequences) const {
  const auto moved = native_->swap_out(rows);
  if (!moved) return py::none();
  const Soundness::Change change = native_->change("swap_out");
  for (const py::handle& each : sequences) {
    value_of(py::reinterpret_borrow<py::object>(each)).forget_views();
  }
  py::list pairs;
  for (size_t i = 0; i < moved->size(); i += 2) {
    pairs.append(py::make_tuple((*moved)[i], (*moved)[i + 1]));
  }
  return std::move(pairs);
}

PyObject* SequenceCalls::can_allocate(py::handle group, py::handle num_lookahead_slots) const {
  const int64_t lookahead = size_argument(num_lookahead_slots, "num_lookahead_slots");
  Sequences seqs = Sequences::of(group);
  py::object seq;
  do {
    seq = seqs.next();
    if (!seq) fail_none(group, "WAITING");
  } while (status_of(seq) != Status::kWaiting);
  const int64_t num_tokens = length_of(seq), required = num_required(group, num_tokens + lookahead);
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

// The new token ids of a sequence; they are read where they matter, and no others.
void SequenceCalls::read_ids(const AllocatedSequence& known, py::handle seq, int64_t num_new,
                             NewTokens* out) const {
  out->size = num_new;
  if (!known.reads_ids || num_new == 0) return;
  const py::object ids = call_method(seq, Names::get().get_token_ids);
  const int64_t first = known.num_tokens, stop = first + num_new;
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

// Whether there are slots; the copies are added to the pairs.
bool SequenceCalls::append(AllocatedSequence* known, const NewTokens& tokens, int64_t num_lookahead,
                           py::list* pairs) const {
  const Slots slots = native_->append_known(known->row, tokens.data(), tokens.size, num_lookahead);
  if (slots.status != kvcache::Status::kServed) return false;
  const Soundness::Change change = native_->change("append_slots");
  const int64_t start = known->num_tokens;
  known->num_tokens = start + tokens.size;
  refresh_table(known, start / block_size_);
  for (size_t i = 0; i < slots.copies.size(); i += 2) {
    pairs->append(py::make_tuple(slots.copies[i], slots.copies[i + 1]));
  }
  return true;
}

PyObject* SequenceCalls::append_slots(py::handle seq, py::handle num_lookahead_slots) const {
  const py::object owner = known(seq);
  AllocatedSequence& known = value_of(owner);
  const int64_t lookahead = size_argument(num_lookahead_slots, "num_lookahead_slots");
  NewTokens tokens;
  const int64_t num_new = this->num_new(seq, known);
  check_on_device(known, seq);
  py::list pairs;
  if (num_new == 0 && lookahead == 0) return pairs.release().ptr();
  read_ids(known, seq, num_new, &tokens);
  if (append(&known, tokens, lookahead, &pairs)) return pairs.release().ptr();
  throw py::value_error("seq " + repr_of(seq_id_of(seq)) + " does not get " +
                        std::to_string(num_new) + " slots and " + std::to_string(lookahead) +
                        " more, " + std::to_string(native_->pool().num_free()) +
                        " blocks are free: expected can_append_slots to be asked first");
}

PyObject* SequenceCalls::append_group_slots(py::handle groups,
                                            py::handle num_lookahead_slots) const {
  struct Growing {
    py::object owner;
    NewTokens tokens;
  };
  const int64_t lookahead = size_argument(num_lookahead_slots, "num_lookahead_slots");
  std::vector<Growing> all;
  std::vector<size_t> ends;  // of the groups, in `all`
  ++num_calls_;
  Sequences each_group(py::reinterpret_borrow<py::object>(groups));
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
  std::optional<Soundness::Change> change;  // from the first sequence that is served on
  size_t num_served = 0, first = 0;
  for (; num_served < ends.size(); first = ends[num_served++]) {
    int64_t num_touched = 0;
    bool is_too_long = false;
    for (size_t i = first; i < ends[num_served]; ++i) {
      const int64_t start = value_of(all[i].owner).num_tokens, stop = start + all[i].tokens.size;
      is_too_long |= stop > max_model_len_;
      num_touched += num_touched_blocks(start, stop + lookahead);
    }
    if (is_too_long || num_touched > native_->pool().num_free()) break;
    for (size_t i = first; i < ends[num_served]; ++i) {
      if (all[i].tokens.size == 0 && lookahead == 0) continue;
      if (!append(&value_of(all[i].owner), all[i].tokens, lookahead, &pairs)) {
        throw std::logic_error("slots that fit were not given");
      }
      if (!change) change.emplace(native_->soundness(), "append_group_slots");
    }
  }
  return py::make_tuple(num_served, pairs).release().ptr();
}

// Brings the views up to date when blocks from `first_written` on were given, or exchanged, and
// leading ones have left a window.
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
    PyObject* id = PyLong_FromLong(blocks[static_cast<size_t>(b)]);
    if (id == nullptr || PyList_SetItem(list, b, id) != 0) throw py::error_already_set();
  };
  const int64_t num_known = std::min<int64_t>(PyList_GET_SIZE(list), size);
  for (int64_t b = num_dropped_before; b < std::min(known->num_dropped, num_known); ++b) set(b);
  for (int64_t b = first_written; b < num_known; ++b) set(b);
  for (int64_t b = num_known; b < size; ++b) {
    const auto id =
        py::reinterpret_steal<py::object>(PyLong_FromLong(blocks[static_cast<size_t>(b)]));
    if (!id || PyList_Append(list, id.ptr()) != 0) throw py::error_already_set();
  }
}

py::list list_of(const std::vector<BlockId>& blocks, size_t size) {
  py::list out(size);
  for (size_t b = 0; b < size; ++b) {
    PyList_SET_ITEM(out.ptr(), static_cast<py::ssize_t>(b), PyLong_FromLong(blocks[b]));
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
  const py::object owner = known(seq);
  const AllocatedSequence& known = value_of(owner);
  double moment = 0;
  if (PyFloat_CheckExact(now.ptr())) {
    moment = PyFloat_AS_DOUBLE(now.ptr());
  } else {
    moment = PyBool_Check(now.ptr()) ? -1 : PyFloat_AsDouble(now.ptr());
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
    if (PyErr_Occurred() || PyBool_Check(now.ptr())) {
      PyErr_Clear();
      throw py::type_error("now is " + repr_of(now) + ": expected a number");
    }
  }
  check_on_device(known, seq);
  native_->access(known.row, moment);
  Py_RETURN_NONE;
}

// The sum of all marks with `count` more.
int64_t SequenceCalls::marks_with(const AllocatedSequence& known, int64_t count,
                                  py::handle seq) const {
  const int64_t num_marked = std::min(known.num_marked + count, known.num_tokens);
  if (!known.skips_blocks || num_marked >= known.num_prompt) return num_marked;
  throw py::value_error(std::to_string(num_marked) + " tokens of seq " + repr_of(seq_id_of(seq)) +
                        " are marked as computed, a prompt longer than the window is computed at "
                        "once: expected a token_chunk_size of " +
                        std::to_string(known.num_prompt));
}

PyObject* SequenceCalls::mark_blocks_as_computed(py::handle group,
                                                 py::handle token_chunk_size) const {
  const int64_t count = size_argument(token_chunk_size, "token_chunk_size");
  if (!enable_caching_ && !window_) Py_RETURN_NONE;
  std::vector<std::pair<py::object, int64_t>> more;  // behind the first
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
  std::optional<Soundness::Change> change;  // from the first sequence that is marked on
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

// Leading blocks that were hits; sequences that were forked from one have one list.
const py::object& SequenceCalls::hits_of(AllocatedSequence* known) const {
  if (!known->hits) {
    const std::vector<BlockId>& blocks = native_->blocks(known->row, 0);
    known->hits = list_of(blocks, static_cast<size_t>(known->num_cached / block_size_));
  }
  return known->hits;
}

PyObject* SequenceCalls::get_common_computed_block_ids(py::handle seqs, py::handle) const {
  Sequences each(py::reinterpret_borrow<py::object>(seqs));
  py::object common;
  while (const py::object seq = each.next()) {
    const py::object owner = known(seq);
    AllocatedSequence& known = value_of(owner);
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

// A call, its arguments, and the default of the last one.
struct Spec {
  const char* name;
  PyObject* (SequenceCalls::*method)(py::handle, py::handle) const;
  std::array<const char*, 2> arguments;
  int num_arguments, num_required;
};
constexpr Spec kCalls[] = {
    {"can_allocate", &SequenceCalls::can_allocate, {"seq_group", "num_lookahead_slots"}, 2, 1},
    {"can_append_slots",
     &SequenceCalls::can_append_slots,
     {"seq_group", "num_lookahead_slots"},
     2,
     2},
    {"append_slots", &SequenceCalls::append_slots, {"seq", "num_lookahead_slots"}, 2, 2},
    {"append_group_slots",
     &SequenceCalls::append_group_slots,
     {"seq_groups", "num_lookahead_slots"},
     2,
     2},
    {"get_block_table", &SequenceCalls::get_block_table, {"seq", ""}, 1, 1},
    {"access_all_blocks_in_seq", &SequenceCalls::access_all_blocks_in_seq, {"seq", "now"}, 2, 2},
    {"mark_blocks_as_computed",
     &SequenceCalls::mark_blocks_as_computed,
     {"seq_group", "token_chunk_size"},
     2,
     2},
    {"get_common_computed_block_ids",
     &SequenceCalls::get_common_computed_block_ids,
     {"seqs", ""},
     1,
     1},
};
constexpr size_t kNumCalls = std::size(kCalls);

// The arguments by position, as Python would bind them.
std::array<PyObject*, 2> bound(const Spec& spec, PyObject* const* args, Py_ssize_t num_positional,
                               PyObject* keywords) {
  const auto fail = [&](const std::string& what) {
    throw py::type_error(std::string(spec.name) + "() " + what);
  };
  std::array<PyObject*, 2> out{};
  if (num_positional > spec.num_arguments) {
    fail("takes " + std::to_string(spec.num_arguments) + " arguments, but " +
         std::to_string(num_positional) + " were given");
  }
  std::copy(args, args + num_positional, out.begin());
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    PyObject* keyword = PyTuple_GET_ITEM(keywords, i);
    int found = 0;
    while (found < spec.num_arguments &&
           PyUnicode_CompareWithASCIIString(keyword, spec.arguments[found]) != 0) {
      ++found;
    }
    if (found == spec.num_arguments) fail("has no argument " + repr_of(keyword));
    if (out[found] != nullptr) fail("got argument " + repr_of(keyword) + " twice");
    out[found] = args[num_positional + i];
  }
  for (int i = 0; i < spec.num_required; ++i) {
    if (out[i] == nullptr) fail("lacks argument '" + std::string(spec.arguments[i]) + "'");
  }
  return out;
}

// What pybind11 does for its own functions.
void raise_current() {
  try {
    throw;
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

template <size_t kCall>
PyObject* call(PyObject* self, PyObject* const* args, Py_ssize_t num_positional,
               PyObject* keywords) noexcept {
  constexpr const Spec& spec = kCalls[kCall];
  try {
    auto* instance = reinterpret_cast<py::detail::instance*>(self);
    auto* calls = static_cast<SequenceCalls*>(instance->get_value_and_holder().value_ptr());
    if (calls == nullptr) throw py::type_error("__init__() of the manager was not called");
    if (keywords == nullptr && num_positional == spec.num_arguments) {
      return (calls->*spec.method)(args[0], args[spec.num_arguments - 1]);
    }
    std::array<PyObject*, 2> values = bound(spec, args, num_positional, keywords);
    const py::int_ zero(0);
    if (values[1] == nullptr) values[1] = zero.ptr();
    return (calls->*spec.method)(values[0], values[1]);
  } catch (...) {
    raise_current();
    return nullptr;
  }
}

template <size_t... kCall>
std::array<_PyCFunctionFastWithKeywords, kNumCalls> functions(std::index_sequence<kCall...>) {
  return {&call<kCall>...};
}

// A decorator: the native method of this name, with the declaration's signature and docstring.
py::object native_method(const py::object& declaration) {
  const auto name = py::cast<std::string>(declaration.attr("__name__"));
  const auto spec = std::find_if(std::begin(kCalls), std::end(kCalls),
                                 [&](const Spec& each) { return name == each.name; });
  if (spec == std::end(kCalls)) throw py::value_error("no native method is called " + name);
  std::string text = name + "($self";
  for (int i = 0; i < spec->num_arguments; ++i) {
    text += std::string(", ") + spec->arguments[i] + (i < spec->num_required ? "" : "=0");
  }
  text += ")\n--\n\n" + py::cast<std::string>(declaration.attr("__doc__"));
  const auto function =
      functions(std::make_index_sequence<kNumCalls>())[static_cast<size_t>(spec - kCalls)];
  // Both live as long as the method, which is for ever.
  auto* method = new PyMethodDef{
      spec->name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)),
      METH_FASTCALL | METH_KEYWORDS, (new std::string(text))->c_str()};
  const py::type type = py::type::of<SequenceCalls>();
  auto out = py::reinterpret_steal<py::object>(
      PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), method));
  if (!out) throw py::error_already_set();
  return out;
}

}  // namespace

void bind_sequences(py::module_& m) {
  py::class_<AllocatedSequence>(m, "AllocatedSequence")
      .def_readonly("row", &AllocatedSequence::row)
      .def_readonly("tokens", &AllocatedSequence::tokens)
      .def_readonly("num_tokens", &AllocatedSequence::num_tokens)
      .def_readonly("num_prompt", &AllocatedSequence::num_prompt)
      .def_readonly("num_cached", &AllocatedSequence::num_cached)
      .def_readonly("num_marked", &AllocatedSequence::num_marked)
      .def_readonly("num_with_kv", &AllocatedSequence::num_with_kv)
      .def_property_readonly("table",
                             [](const AllocatedSequence& self) -> py::object {
                               return self.table ? self.table : py::object(py::none());
                             })
      .def_property_readonly("hits", [](const AllocatedSequence& self) -> py::object {
        return self.hits ? self.hits : py::object(py::none());
      });
  def_init(
      py::class_<SequenceCalls>(m, "SequenceCalls"),
      [](const py::object& native, int64_t block_size, std::optional<int64_t> window,
         bool enable_caching, int64_t watermark_blocks, int64_t max_model_len,
         const py::tuple& statuses) {
        return std::make_unique<SequenceCalls>(native, block_size, window, enable_caching,
                                               watermark_blocks, max_model_len, statuses);
      },
      py::kw_only(), py::arg("native"), py::arg("block_size"), py::arg("sliding_window"),
      py::arg("enable_caching"), py::arg("watermark_blocks"), py::arg("max_model_len"),
      py::arg("statuses"))
      .def("_take_rows", &SequenceCalls::take_rows, py::arg("sequences"), py::arg("hits"),
           py::arg("num_cached"), py::arg("skips_blocks"), py::arg("encoder"))
      .def("_fork_row", &SequenceCalls::fork_row, py::arg("parent"), py::arg("seq_id"),
           py::arg("tokens"))
      .def("_free_row", &SequenceCalls::free_row, py::arg("seq_id"))
      .def("_swap_out_rows", &SequenceCalls::swap_out_rows, py::arg("rows"), py::arg("sequences"))
      .def_property_readonly("_allocated", &SequenceCalls::allocated)
      .def("_known", &SequenceCalls::known)
      .def("_num_new",
           [](const SequenceCalls& self, const py::object& seq) { return self.num_new(seq); })
      .def("_num_required", [](const SequenceCalls& self, const py::object& group,
                               int64_t num_slots) { return self.num_required(group, num_slots); });
  m.def("native_method", &native_method);
  m.def("length_of", [](const py::object& seq) { return length_of(seq); });
  m.def("encoder_length", [](const py::object& group, int64_t max_model_len) {
    return encoder_length(group, max_model_len);
  });
  m.def("sequences_with", [](const py::object& group, const py::str& status) {
    return sequences_with(group, status);
  });
  m.def(
      "check_tier",
      [](const Manager& native, int32_t row, const std::string& what, const py::object& name,
         bool on_host) { check_tier(native, row, what.c_str(), name, on_host); },
      py::arg("native"), py::arg("row"), py::arg("what"), py::arg("name"), py::arg("on_host"));
}

}  // namespace kvcache
