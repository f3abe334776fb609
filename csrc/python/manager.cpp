// SPDX-License-Identifier: Apache-2.0
// Python bindings of the manager and its attention kinds. The bindings only convert arguments and
// results.
#include "core/manager/manager.h"
#include "core/eviction/learned.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/errors.h"
#include "core/groups/kinds.h"
#include "python/arrays.h"
#include "python/construct.h"
#include "python/fast_method.h"
#include "python/hashes.h"
#include "python/plan_type.h"
#include "python/request_rows.h"

namespace kvcache {
namespace {

// An attention kind written in Python. It is called only once per position, so that its results are
// consistent. Its errors must not stop a step halfway, so they are reported as unraisable
// exceptions, and the result is 0, with which every block is kept and needed.
class PythonKind : public AttentionKind {
 public:
  int64_t first_needed_token(int64_t num_computed_tokens) const override {
    const auto [known, is_new] = answers_.emplace(num_computed_tokens, 0);
    if (!is_new) return known->second;
    const int64_t answer = ask(num_computed_tokens);  // may reenter and invalidate `known`
    return answers_[num_computed_tokens] = answer;
  }

 private:
  int64_t ask(int64_t num_computed_tokens) const {
    const py::function method =
        py::get_override(static_cast<const AttentionKind*>(this), "first_needed_token");
    if (!method) return 0;
    try {
      const py::object answer = method(num_computed_tokens);
      const int64_t token = PyLong_AsLongLong(answer.ptr());
      if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
      return token;
    } catch (py::error_already_set& error) {
      if (error.matches(PyExc_KeyboardInterrupt))
        PyErr_SetInterrupt();  // raise KeyboardInterrupt at the end of the call
      error.discard_as_unraisable(method);
      return 0;
    }
  }

  mutable std::unordered_map<int64_t, int64_t> answers_;
};

template <class Kind>
auto class_of(py::module_& m, const char* name) {
  return py::class_<Kind, AttentionKind, std::shared_ptr<Kind>>(m, name);
}

void bind_kinds(py::module_& m) {
  def_init(
      py::class_<AttentionKind, PythonKind, std::shared_ptr<AttentionKind>>(m, "AttentionKind"),
      []() -> std::shared_ptr<AttentionKind> { return std::make_shared<PythonKind>(); })
      .def(
          "first_needed_token",
          [](const AttentionKind& self, const py::object& num_computed_tokens) {
            constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
            return self.first_needed_token(
                int_argument(num_computed_tokens, "num_computed_tokens", 0, kMost));
          },
          py::arg("num_computed_tokens"));
  def_init(class_of<FullAttention>(m, "FullAttention"),
           [] { return std::make_shared<FullAttention>(); });
  def_init(
      class_of<SlidingWindow>(m, "SlidingWindow"),
      [](const py::object& window) {
        return std::make_shared<SlidingWindow>(int_argument(window, "window"));
      },
      py::arg("window"));
  def_init(
      class_of<ChunkedLocal>(m, "ChunkedLocal"),
      [](const py::object& chunk_size) {
        return std::make_shared<ChunkedLocal>(int_argument(chunk_size, "chunk_size"));
      },
      py::arg("chunk_size"));
  def_init(
      class_of<CircularWindow>(m, "CircularWindow"),
      [](const py::object& window, const py::object& buffer) {
        return std::make_shared<CircularWindow>(int_argument(window, "window"),
                                                int_argument(buffer, "buffer"));
      },
      py::arg("window"), py::arg("buffer"));
  def_init(
      class_of<RecurrentState>(m, "RecurrentState"),
      [](const py::object& num_speculative_blocks) {
        return std::make_shared<RecurrentState>(
            int_argument(num_speculative_blocks, "num_speculative_blocks"));
      },
      py::arg("num_speculative_blocks") = 0);
  def_init(class_of<CrossAttention>(m, "CrossAttention"),
           [] { return std::make_shared<CrossAttention>(); });
}

// An optional array argument of a step.
class OptionalInput {
 public:
  OptionalInput(const py::object& value, const char* name, int64_t least = kMinInt32) {
    if (!value.is_none()) input_.emplace(value, name, least);
  }
  bool is_given() const { return input_.has_value(); }
  const int32_t* data() const { return input_ ? input_->data() : nullptr; }
  py::ssize_t size() const { return input_ ? input_->size() : 0; }
  void copy_values() {
    if (input_) input_->copy_values();
  }

 private:
  std::optional<Int32Input> input_;
};

py::object step(Manager& self, const py::object& rows, const py::object& num_tokens,
                RequestRows& requests, const py::object& new_requests, const py::object& token_ids,
                const py::object& num_token_ids, const py::object& num_rejected_tokens,
                const py::object& num_lookahead_tokens, const py::object& swap_out) {
  Int32Input r(rows, "rows"), n(num_tokens, "num_tokens");
  OptionalInput out(swap_out, "swap_out");
  OptionalInput ids(token_ids, "token_ids"), num_ids(num_token_ids, "num_token_ids");
  OptionalInput rejected(num_rejected_tokens, "num_rejected_tokens");
  require_same_length(r.size(), "rows", n.size(), "num_tokens");
  if (num_ids.is_given()) require_same_length(r.size(), "rows", num_ids.size(), "num_token_ids");
  if (rejected.is_given()) {
    require_same_length(r.size(), "rows", rejected.size(), "num_rejected_tokens");
  }
  StepRequest request;
  RequestRows::Asking asking = requests.asking(new_requests);
  request.new_rows = std::move(asking.rows);
  const bool per_row = PySequence_Check(num_lookahead_tokens.ptr()) != 0;
  OptionalInput lookahead(per_row ? num_lookahead_tokens : py::none(), "num_lookahead_tokens");
  if (lookahead.is_given()) {
    require_same_length(r.size(), "rows", lookahead.size(), "num_lookahead_tokens");
  } else {
    request.num_lookahead = int_argument(num_lookahead_tokens, "num_lookahead_tokens");
  }
  // Copies the caller's arrays, because signal handlers and attention kinds written in Python may
  // modify them.
  r.copy_values();
  n.copy_values();
  for (OptionalInput* each : {&ids, &num_ids, &rejected, &lookahead, &out}) each->copy_values();
  request.rows = r.data();
  request.num_tokens = n.data();
  request.num_rows = r.size();
  request.token_ids = ids.data();
  request.num_ids = ids.size();
  request.num_token_ids = num_ids.data();
  request.num_rejected = rejected.data();
  request.lookahead = lookahead.data();
  request.swap_out_rows = out.data();
  request.num_swap_out_rows = out.size();
  requests.check_new(asking);
  const StepPlan& plan = self.step(request);
  const Soundness::Change change(&self.guard().soundness(), "step");
  requests.admit(asking, plan.rows.data() + plan.rows.size() - asking.ids.size());
  return as_plan(plan);
}

py::list per_group(const std::vector<std::vector<BlockId>>& blocks) {
  py::list out(blocks.size());
  for (size_t g = 0; g < blocks.size(); ++g) out[g] = copy_int32(blocks[g]);
  return out;
}

// Returns the new blocks for each group, or None if no slots were allocated.
py::object as_python(const Slots& slots) {
  if (slots.status != Status::kServed) return py::none();
  return per_group(slots.new_blocks);
}

py::object as_python(const std::optional<std::vector<BlockId>>& pairs) {
  return pairs ? list_of_pairs(*pairs) : py::object(py::none());
}

// Returns the result of a call. If creating the result fails, the manager is marked as broken,
// because its state has already changed.
template <class Answer>
py::object answer(Manager& self, const char* call, const Answer& native) {
  const Soundness::Change change(&self.guard().soundness(), call);
  return as_python(native);
}
// Like the overload above, but returns the numbers of computed tokens, keyed by request id.
py::dict answer(Manager& self, const RequestRows& requests, const char* call,
                const Recompute& recompute) {
  const Soundness::Change change(&self.guard().soundness(), call);
  return requests.by_id(recompute.rows, recompute.num_computed_tokens);
}

py::tuple as_tuple(const HitCount& count) {
  return py::make_tuple(count.num_requests, count.query_tokens, count.hit_tokens,
                        count.host_hit_tokens);
}

py::object as_tuple(const TierCount& tiers, const BlockPool* host) {
  if (host == nullptr) return py::none();
  return py::make_tuple(tiers.written_blocks, tiers.unwritten_blocks, tiers.declined_blocks,
                        tiers.loaded_blocks, tiers.swapped_out_blocks, tiers.swapped_in_blocks,
                        host->num_evicted());
}

// Returns the number of missed tokens for each reason, in the order of MissReason.
std::vector<int64_t> as_list(const MissReport::Counts& counts) {
  return {counts.begin(), counts.end()};
}

// Returns a tuple: the number of tokens; the number of hit tokens; the numbers of missed tokens by
// reason; (is_evicted, was_on_host, taker, ms ago) for the first lost block, or None; the number of
// tokens shared with a recent request, or -1; that request's id; and the extra key that differs.
py::tuple explain(Manager& self, const RequestRows& requests, const py::object& request,
                  const std::shared_ptr<TokenChain>& chain) {
  const MissReport report = self.explain(chain, requests.find(request));
  py::object lost = py::none();
  if (report.lost) {
    lost = py::make_tuple(report.lost->is_evicted, report.lost->was_on_host,
                          static_cast<int>(report.lost->taker), report.lost->ms_ago);
  }
  return py::make_tuple(report.num_tokens, report.num_hit, as_list(report.missed), lost,
                        report.num_alike, report.alike, report.differs_in);
}

// Returns a tuple: total, window, groups, host or None, the numbers
// of missed tokens by reason or None, and whether the eviction policy `learned` follows LRU; None
// for others.
py::tuple stats_of(Manager& self) {
  const CacheStats& stats = self.stats();
  py::list groups;
  for (size_t g = 0; g < stats.groups().size(); ++g) {
    const GroupCount& group = stats.groups()[g];
    groups.append(py::make_tuple(group.query_blocks, group.hit_blocks, group.stored_blocks,
                                 self.pool().num_evicted_of(static_cast<uint8_t>(g))));
  }
  const auto* learned = dynamic_cast<const Learned*>(self.pool().order());
  const MissReport::Counts* missed = self.reads().missed();
  return py::make_tuple(
      as_tuple(stats.total()), as_tuple(stats.window()), groups,
      as_tuple(self.reads().tiers(), self.host()),
      missed != nullptr ? py::cast(as_list(*missed)) : py::none(),
      learned == nullptr ? py::object(py::none()) : py::bool_(learned->duel().follows_lru()));
}

// Returns a tuple of arrays: kinds uint8[n]; mediums uint8[n]; groups int32[n]; hashes and parents,
// each uint8[n, hash_bytes]; tokens int32[...]; int32[n] with first tokens or, for cleared events,
// the number of dropped events; and the labels of requests, or None.
py::tuple waiting_events(Manager& self) {
  const EventLog::Drained& drained = self.reads().events();
  const auto n = static_cast<py::ssize_t>(drained.events.size());
  py::array_t<uint8_t> kinds(n), mediums(n);
  Int32Array groups = new_int32(n), first_tokens = new_int32(n);
  py::list labels(n);
  const py::ssize_t num_bytes = self.reads().hash_bytes();
  HashArray hashes({n, num_bytes}), parents({n, num_bytes});
  for (py::ssize_t i = 0; i < n; ++i) {
    const EventLog::Event& event = drained.events[static_cast<size_t>(i)];
    kinds.mutable_data()[i] = static_cast<uint8_t>(event.kind);
    mediums.mutable_data()[i] = static_cast<uint8_t>(event.tier);
    groups.mutable_data()[i] = event.group;
    const int64_t number =
        event.kind == EventLog::Kind::kCleared ? event.num_dropped : event.first_token;
    first_tokens.mutable_data()[i] = static_cast<int32_t>(std::min(number, kMaxInt32));
    labels[static_cast<size_t>(i)] =
        event.labels ? *static_cast<const py::object*>(event.labels.get()) : py::none();
    std::memcpy(hashes.mutable_data(i, 0), event.hash.bytes, static_cast<size_t>(num_bytes));
    std::memcpy(parents.mutable_data(i, 0), event.parent.bytes, static_cast<size_t>(num_bytes));
  }
  return py::make_tuple(kinds, mediums, groups, hashes, parents, copy_int32(drained.tokens),
                        first_tokens, labels);
}

void free_requests(Manager& self, RequestRows& requests, const py::tuple& named,
                   const ReleaseFeatures& features, bool keep_blocks = false) {
  if (!self.guard().is_broken())
    self.guard().check_caller();  // also checked if there is nothing to free
  const RequestRows::Leaving leaving = requests.leaving(named);
  KeptNames kept;
  for (size_t i = 0; i < leaving.ids.size() && keep_blocks; ++i) {
    kept.push_back(py::cast<std::string>(py::str(leaving.ids[i])));
  }
  self.free(leaving.rows.data(), static_cast<int64_t>(leaving.rows.size()), features, kept);
  requests.forget(leaving);
}

// Returns the request's new blocks for each group, or None if no slots were allocated. If
// `computed` is None, the longest cached prefix is used.
py::object admit(Manager& self, RequestRows& requests, const py::object& asked,
                 const py::object& computed) {
  RequestRows::Asking asking = requests.asking_alone(asked, "request");
  NewRow& row = asking.rows[0];
  if (row.max_host_blocks != kMaxSize) {
    throw py::value_error("max_host_blocks is " + std::to_string(row.max_host_blocks) +
                          ": expected None, because admit loads no blocks from the host");
  }
  std::vector<std::vector<BlockId>> blocks;
  if (!computed.is_none()) {
    blocks = int32_lists(computed, "computed_blocks");
  } else {
    const bool with_partial = row.external.num_tokens == 0;
    const PrefixHit& hit =
        self.lookup(*row.chain, /*with_host=*/false, with_partial, row.read_cache);
    for (const CacheGroup& group : self.reads().groups()) blocks.push_back(hit.ids(group));
  }
  requests.check_new(asking);
  const Slots slots = self.admit(row, blocks);
  const Soundness::Change change(&self.guard().soundness(), "admit");
  if (slots.status == Status::kServed) requests.admit(asking, &slots.row);
  return as_python(slots);
}

// Returns a list for each group, or () if there are no blocks.
py::tuple as_lists(const std::vector<std::vector<BlockId>>& blocks) {
  const bool any = std::any_of(blocks.begin(), blocks.end(),
                               [](const std::vector<BlockId>& ids) { return !ids.empty(); });
  if (!any) return py::tuple();
  py::tuple out(blocks.size());
  for (size_t g = 0; g < blocks.size(); ++g) {
    py::list ids(blocks[g].size());
    for (size_t i = 0; i < blocks[g].size(); ++i) ids[i] = py::int_(blocks[g][i]);
    out[g] = std::move(ids);
  }
  return out;
}

// Returns each request's new blocks, or None for a request that does not fit.
py::list advance(Manager& self, const py::object& rows, const py::object& starts,
                 const py::object& stops, const py::object& num_lookahead_tokens,
                 const py::object& token_ids, const py::object& num_token_ids) {
  Int32Input named(rows, "rows"), first(starts, "starts"), last(stops, "stops");
  Int32Input ids(token_ids, "token_ids"), num_ids(num_token_ids, "num_token_ids", 0);
  const py::ssize_t n = named.size();
  require_same_length(n, "rows", first.size(), "starts");
  require_same_length(n, "rows", last.size(), "stops");
  const int64_t num_lookahead = int_argument(num_lookahead_tokens, "num_lookahead_tokens");
  if (ids.size() > 0) require_same_length(n, "rows", num_ids.size(), "num_token_ids");
  std::vector<RowAsk> all(static_cast<size_t>(n));
  int64_t num_named = 0;
  for (size_t i = 0; i < all.size(); ++i) {
    const int64_t k = ids.size() > 0 ? num_ids.data()[i] : 0;
    const int64_t start = first.data()[i];
    all[i] = {
        named.data()[i], last.data()[i] - start, num_lookahead, ids.data() + num_named, k, start};
    num_named += k;
  }
  if (num_named != ids.size()) {
    throw py::value_error("token_ids has " + std::to_string(ids.size()) + " entries: expected " +
                          std::to_string(num_named) + ", the sum of num_token_ids");
  }
  const std::vector<Slots> slots = self.advance(all);
  const Soundness::Change change(&self.guard().soundness(), "advance");
  py::list answers(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots[i].status == Status::kServed) {
      answers[i] = as_lists(slots[i].new_blocks);
    } else {
      answers[i] = py::none();
    }
  }
  return answers;
}

// Returns the child's row, or -1.
int32_t fork(Manager& self, RequestRows& requests, const py::object& parent,
             const py::object& child) {
  const RequestRows::Asking asking = requests.asking_alone(child, "child");
  const int32_t row = requests.at(parent, "parent");
  requests.check_new(asking);
  if (!self.reads().row(row).by_step()) {
    throw py::value_error("request " + short_repr(parent.attr("request_id")) +
                          " was admitted by admit: expected a request that step admitted, "
                          "because the copies are part of plans");
  }
  const int32_t child_row = self.fork(row, asking.rows[0].chain).row;
  const Soundness::Change change(&self.guard().soundness(), "fork");
  requests.admit(asking, &child_row);
  return child_row;
}

// The rows of `HeldRows` (Python). A row belongs to a Python object `held`, whose attributes
// (`row`, or -1; `num_tokens`; `table`) change in the same native call as the row, so that an
// interrupt sees both changes or neither.

void set(const py::handle& held, PyObject* name, int64_t value) {
  const py::int_ number(value);
  if (PyObject_SetAttr(held.ptr(), name, number.ptr()) != 0) throw py::error_already_set();
}
void set_row(const py::handle& held, int32_t row) {
  static PyObject* const name = PyUnicode_InternFromString("row");
  set(held, name, row);
}

// Creates a group's rows: one for a prompt that is computed in one step, its forks for the other
// sequences, and one for the encoder unless it is None. Blocks are cached once they are marked as
// computed. Returns false if the prompt does not fit.
bool admit_held(Manager& self, const py::list& held,
                const std::vector<std::shared_ptr<TokenChain>>& chains, const py::list& computed,
                const py::object& encoder, const std::shared_ptr<TokenChain>& encoder_chain) {
  NewRow asked;
  asked.chain = chains.at(0);
  asked.computes_whole = asked.waits_for_marks = true;
  const Slots slots = self.admit(asked, int32_lists(computed, "computed_blocks"));
  if (slots.status != Status::kServed) return false;
  const Soundness::Change change(&self.guard().soundness(), "allocate");
  for (size_t i = 0; i < chains.size(); ++i) {
    set_row(held[i], i == 0 ? slots.row : self.fork(slots.row, chains[i]).row);
  }
  if (!encoder.is_none()) {
    NewRow cross;
    cross.chain = encoder_chain;  // without computes_whole, because all of its tokens are read
    const Slots added = self.admit(cross, {{}});
    if (added.status != Status::kServed) {
      throw std::logic_error("an encoder that fits got no slots");
    }
    set_row(encoder, added.row);
  }
  // Create the tables now, because every scheduler reads them in the same step. This may run
  // finalizers, which may free the rows.
  const std::vector<BlockId> blocks = self.reads().blocks(slots.row, 0);
  for (const py::handle& each : held) each.attr("table") = blocks;
  return true;
}

void fork_held(Manager& self, int32_t parent, const py::object& held,
               const std::shared_ptr<TokenChain>& chain) {
  const Slots slots = self.fork(parent, chain);
  const Soundness::Change change(&self.guard().soundness(), "fork");
  set_row(held, slots.row);
}

void free_held(Manager& self, const py::object& held) {
  self.free(py::cast<int32_t>(held.attr("row")));
  if (self.guard().is_broken()) return;
  const Soundness::Change change(&self.guard().soundness(), "free");
  set_row(held, -1);
}

// Updates a list of the row's blocks, of which the blocks from column `first` on have changed.
// Earlier blocks may have left the window.
void update_table(const py::list& table, const std::vector<BlockId>& blocks, size_t first) {
  const bool has_window = !blocks.empty() && blocks[0] == kNullBlock;
  for (size_t b = std::min(first, table.size()); b-- > 0 && has_window;) {
    if (blocks[b] != kNullBlock) continue;
    if (PyLong_AsLong(table[b].ptr()) == kNullBlock) break;
    table[b] = kNullBlock;
  }
  const std::vector<BlockId> changed(blocks.begin() + static_cast<std::ptrdiff_t>(first),
                                     blocks.end());
  const py::object tail = py::cast(changed);
  if (PyList_SetSlice(table.ptr(), static_cast<py::ssize_t>(first), PY_SSIZE_T_MAX, tail.ptr())) {
    throw py::error_already_set();
  }
}

// The calls that a scheduler makes for each sequence in each step.

// Arguments: `held`; its row; the numbers of tokens and of lookahead slots; the tokens' ids, or
// None if their values do not matter; and the list of the row's blocks. Returns the pairs of blocks
// to copy, or None if the slots do not fit.
PyObject* append_slots(Manager& self, PyObject* const* args) {
  static PyObject* const name = PyUnicode_InternFromString("num_tokens");
  const auto row = static_cast<int32_t>(PyLong_AsLong(args[1]));
  const int64_t num_tokens = PyLong_AsLong(args[2]);
  const OptionalInput ids(py::reinterpret_borrow<py::object>(args[4]), "token_ids", /*least=*/0);
  const int64_t start = self.reads().row(row).num_computed;
  const RowAsk ask{row, num_tokens, PyLong_AsLong(args[3]), ids.data(), num_tokens};
  const Slots slots = self.extend(ask, /*lists_new=*/false);
  if (slots.status != Status::kServed) Py_RETURN_NONE;
  const Soundness::Change change(&self.guard().soundness(), "append_slots");
  set(args[0], name, start + num_tokens);
  const int64_t first = start / self.reads().groups()[0].block_size;
  update_table(py::reinterpret_borrow<py::list>(args[5]), self.reads().blocks(row, 0),
               static_cast<size_t>(first));
  return list_of_pairs(slots.copies).release().ptr();
}

PyObject* mark_computed(Manager& self, PyObject* const* args) {
  self.mark_computed(static_cast<int32_t>(PyLong_AsLong(args[0])), PyLong_AsLong(args[1]));
  Py_RETURN_NONE;
}

PyObject* access(Manager& self, PyObject* const* args) {
  self.access(static_cast<int32_t>(PyLong_AsLong(args[0])), number_argument(args[1], "now"));
  Py_RETURN_NONE;
}

PyObject* check_reader(Manager& self, PyObject* const*) {
  self.guard().check_reader();
  Py_RETURN_NONE;
}

PyObject* num_free(Manager& self, PyObject* const*) {
  self.guard().check_reader();
  return PyLong_FromLongLong(self.pool().num_free());
}

// Also discards the attribute `table` of each object in `held`.
py::object swap_out(Manager& self, const std::vector<int32_t>& rows, const py::list& held) {
  const auto moved = self.swap_out(rows);
  const Soundness::Change change(&self.guard().soundness(), "swap_out");
  for (const py::handle& each : held) {
    if (moved) each.attr("table") = py::none();
  }
  return as_python(moved);
}

// The getter of a property.
template <auto kMethod>
int64_t read(const Manager& manager) {
  return (manager.reads().*kMethod)();
}

}  // namespace

void bind_manager(py::module_& m) {
  bind_kinds(m);
  m.def("use_admit_types", &RequestRows::use_admit_types, py::arg("admit"), py::arg("external"));
  def_init(
      py::class_<RequestRows>(m, "RequestRows"),
      [](const py::tuple& chain_key, int64_t max_encoder_tokens) {
        return std::make_unique<RequestRows>(chain_key, max_encoder_tokens);
      },
      py::arg("chain_key"), py::arg("max_encoder_tokens"))
      .def_property_readonly("chain_key", &RequestRows::chain_key)
      .def("find", &RequestRows::find)
      .def("at", [](const RequestRows& self, const py::object& request) {
        return self.at(request, "request");
      });
  py::class_<Manager> manager(m, "Manager");
  def_fast<Manager, 6, &append_slots>(manager, "append_slots");
  def_fast<Manager, 2, &mark_computed>(manager, "mark_computed");
  def_fast<Manager, 2, &access>(manager, "access");
  def_fast<Manager, 0, &check_reader>(manager, "check_reader");
  def_fast<Manager, 0, &num_free>(manager, "num_free");
  def_init(
      manager, [](const ManagerOptions& options) { return std::make_unique<Manager>(options); },
      py::arg("options"))
      .def("check_caller", [](Manager& self) { self.guard().check_caller(); })
      .def("set_now", &Manager::set_now)
      .def("hashes",
           [](Manager& self, TokenChain& chain) {
             const HashList& hashes = self.hashes(chain);
             return copy_hashes(hashes.data(), hashes.size(), self.reads().hash_bytes());
           })
      .def("find_hashes",
           [](const Manager& self, const py::object& hashes, const py::object& group) {
             const std::vector<Hash> wanted =
                 hashes_of_rows(hashes, "hashes", self.reads().hash_bytes());
             const auto n = static_cast<py::ssize_t>(wanted.size());
             const int64_t g = int_argument(group, "group");
             Int32Array device = new_int32(n), host = new_int32(n);
             self.reads().find_hashes(wanted.data(), n, g, /*on_host=*/false,
                                      device.mutable_data());
             self.reads().find_hashes(wanted.data(), n, g, /*on_host=*/true, host.mutable_data());
             return py::make_tuple(device, host);
           })
      .def("hashes_of_blocks",  // returns (hashes uint8[n, hash_bytes], groups int32[n])
           [](const Manager& self, const py::object& ids, bool on_host) {
             const Int32Input array(ids, "ids");
             Int32Array groups = new_int32(array.size());
             std::vector<Hash> hashes(static_cast<size_t>(array.size()));
             for (py::ssize_t i = 0; i < array.size(); ++i) {
               const Hash* hash =
                   self.reads().hash_of(array.data()[i], on_host, &groups.mutable_data()[i]);
               if (hash != nullptr) hashes[static_cast<size_t>(i)] = *hash;
             }
             return py::make_tuple(
                 copy_hashes(hashes.data(), hashes.size(), self.reads().hash_bytes()), groups);
           })
      .def(
          "lookup",
          [](Manager& self, TokenChain& chain, const std::optional<bool>& read_cache,
             bool with_partial, const std::optional<int64_t>& most_tokens) {
            const PrefixHit& hit = self.lookup(chain, /*with_host=*/false, with_partial, read_cache,
                                               most_tokens.value_or(kUnbounded));
            std::vector<std::vector<BlockId>> blocks;
            for (const CacheGroup& group : self.reads().groups()) blocks.push_back(hit.ids(group));
            return py::make_tuple(per_group(blocks), hit.num_tokens, hit.num_shared_tokens);
          },
          py::arg("chain"), py::arg("read_cache") = py::none(), py::arg("with_partial") = false,
          py::arg("most_tokens") = py::none())
      .def("explain", &explain)
      .def("take_copies", [](Manager& self) { return list_of_pairs(self.take_copies()); })
      .def(
          // Returns (hit tokens on the device only, hit tokens including the host, blocks from the
          // host).
          "lookup_tiers",
          [](Manager& self, TokenChain& chain, const std::optional<bool>& read_cache) {
            const int64_t on_device =
                self.lookup(chain, /*with_host=*/false, /*with_partial=*/false, read_cache)
                    .num_tokens;
            const PrefixHit& hit =
                self.lookup(chain, /*with_host=*/true, /*with_partial=*/false, read_cache);
            return py::make_tuple(on_device, hit.num_tokens, hit.num_host_blocks);
          },
          py::arg("chain"), py::arg("read_cache") = py::none())
      .def("num_counted_hits",
           [](const Manager& self, TokenChain& chain) { return self.stats().num_hits(&chain); })
      .def("would_fit",
           [](Manager& self, const RequestRows& requests, const py::object& asked, bool whole) {
             const RequestRows::Asking asking = requests.asking_alone(asked, "request");
             return static_cast<int>(self.would_fit(asking.rows[0], whole));
           })
      .def("would_extend",
           [](Manager& self, int32_t row, const py::object& num_tokens,
              const py::object& num_lookahead) {
             return static_cast<int>(
                 self.would_extend(row, int_argument(num_tokens, "num_tokens"),
                                   int_argument(num_lookahead, "num_lookahead_tokens")));
           })
      .def("checkpoint_tokens",
           [](Manager& self, TokenChain& chain, int32_t row, const py::object& num_tokens) {
             return self.checkpoint_tokens(chain, row, int_argument(num_tokens, "num_tokens"));
           })
      .def("step", &step)
      .def("admit", &admit)
      .def("finish_receiving",
           [](Manager& self, int32_t row, const py::object& num_tokens) {
             const int64_t n = num_tokens.is_none() ? self.reads().num_external(row)
                                                    : int_argument(num_tokens, "num_tokens");
             return self.finish_receiving(row, n);
           })
      .def("is_receiving",
           [](const Manager& self, int32_t row) { return self.reads().row(row).is_receiving(); })
      .def("release_kept", &Manager::release_kept)
      .def("hold",
           [](Manager& self, const py::object& ids) {
             const Int32Input array(ids, "ids");
             self.hold(array.data(), array.size());
           })
      .def("release_held",
           [](Manager& self, const py::object& ids) {
             const Int32Input array(ids, "blocks");
             self.release_held(array.data(), array.size());
           })
      .def("extend",
           [](Manager& self, int32_t row, const py::object& num_tokens,
              const py::object& num_lookahead_tokens) {
             const RowAsk ask{row,
                              checked_size("num_tokens", int_argument(num_tokens, "num_tokens"), 1),
                              int_argument(num_lookahead_tokens, "num_lookahead_tokens")};
             return answer(self, "extend", self.extend(ask));
           })
      .def("advance", &advance)
      .def("reject",
           [](Manager& self, int32_t row, const py::object& num_tokens) {
             self.reject(row, int_argument(num_tokens, "num_tokens"));
           })
      .def("free_requests",
           [](Manager& self, RequestRows& requests, const py::tuple& named) {
             free_requests(self, requests, named, {});
           })
      .def("free_requests",
           [](Manager& self, RequestRows& requests, const py::tuple& named,
              const py::object& num_output_tokens, const std::optional<bool>& ends_turn,
              const std::vector<std::tuple<int64_t, int64_t, int32_t, int64_t>>& retention,
              bool keep_blocks) {
             ReleaseFeatures features;
             if (!num_output_tokens.is_none()) {
               features.num_output_tokens = checked_size(
                   "num_output_tokens", int_argument(num_output_tokens, "num_output_tokens"), 0);
             }
             features.ends_turn = ends_turn;
             std::vector<Retention> ranges;
             for (const auto& [first, stop, priority, ttl_ms] : retention) {
               ranges.push_back({first, stop, priority, ttl_ms});
             }
             features.retention = ranges.data();
             features.num_retention = static_cast<int64_t>(ranges.size());
             free_requests(self, requests, named, features, keep_blocks);
           })
      .def("fork", &fork)
      .def("admit_held", &admit_held)
      .def("fork_held", &fork_held)
      .def("free_held", &free_held)
      .def("swap_out", &swap_out)
      .def("swap_in",
           [](Manager& self, const std::vector<int32_t>& rows) {
             return answer(self, "swap_in", self.swap_in(rows));
           })
      .def("is_on_host",
           [](const Manager& self, int32_t row) { return self.reads().row(row).is_on_host(); })
      .def("by_step",
           [](const Manager& self, int32_t row) { return self.reads().row(row).by_step(); })
      .def("num_unique_blocks",
           [](const Manager& self, const std::vector<int32_t>& rows) {
             return self.reads().num_unique_blocks(rows);
           })
      .def("num_blocks_back",
           [](const Manager& self, const std::vector<int32_t>& rows,
              const std::vector<int64_t>& num_slots) {
             const RowSwap::BlocksBack back = self.reads().num_blocks_back(rows, num_slots);
             return py::make_tuple(back.num_taken, back.alone);
           })
      .def("pin", &Manager::pin)
      .def("unpin", &Manager::unpin)
      .def("abort",
           [](Manager& self, const RequestRows& requests, const py::object& step_id) {
             return answer(
                 self, requests, "abort",
                 self.report(int_argument(step_id, "step_id"), /*completed=*/false, {}, {}));
           })
      .def("invalidate",
           [](Manager& self, const RequestRows& requests, const py::object& ids) {
             const Int32Input array(ids, "ids");
             return answer(self, requests, "invalidate",
                           self.invalidate(array.data(), array.size()));
           })
      .def("report",
           [](Manager& self, const RequestRows& requests, const py::object& step_id, bool completed,
              const py::object& failed, const py::object& failed_on_host) {
             const auto ids = [](const py::object& values, const char* name) {
               const Int32Input array(values, name);
               return std::vector<BlockId>(array.data(), array.data() + array.size());
             };
             return answer(self, requests, "report",
                           self.report(int_argument(step_id, "step_id"), completed,
                                       ids(failed, "failed_pages"),
                                       ids(failed_on_host, "failed_host_pages")));
           })
      .def("evict",
           [](Manager& self, const py::object& ids) {
             const Int32Input array(ids, "ids");
             self.evict(array.data(), array.size());
           })
      .def("num_common_prefix_blocks",
           [](Manager& self, int32_t row, const py::object& num_running, const py::object& group) {
             return self.reads().num_common_prefix_blocks(
                 row, int_argument(num_running, "num_running_requests"),
                 int_argument(group, "group"));
           })
      .def("reset_prefix_cache", &Manager::reset_prefix_cache)
      .def("reset_group",
           [](Manager& self, const py::object& group) {
             return self.reset_group(int_argument(group, "group"));
           })
      .def("start_epoch", &Manager::start_epoch)
      .def_property_readonly("num_epochs", read<&ManagerReads::num_epochs>)
      .def_property_readonly("num_invalidations", read<&ManagerReads::num_invalidations>)
      .def("is_stale",
           [](const Manager& self, int32_t row) { return self.reads().row(row).is_stale; })
      .def("forget_adapter",
           [](Manager& self, RequestRows& requests, const std::string& name,
              const py::tuple& chain_key) {  // one call, so that an interrupt sees both or neither
             self.forget_adapter(name);
             requests.set_chain_key(chain_key);
           })
      .def("blocks",
           [](const Manager& self, int32_t row, const py::object& group) {
             return copy_int32(self.reads().blocks(row, int_argument(group, "group")));
           })
      .def("num_computed_tokens",
           [](const Manager& self, int32_t row) { return self.reads().row(row).num_computed; })
      .def("quiet_until",
           [](const Manager& self) { return copy_array(self.reads().quiet_until()); })
      .def("check_invariants", &Manager::check_invariants)
      .def("clear_stats", &Manager::clear_stats)
      .def("stats", &stats_of)
      .def("waiting_events", &waiting_events)
      .def("drop_events", [](Manager& self) { self.drain_events(); })
      .def_property_readonly("hash_block_size", read<&ManagerReads::hash_block_size>)
      .def_property_readonly("num_rows", read<&ManagerReads::num_rows>)
      .def_property_readonly("last_step_id",
                             [](const Manager& self) { return self.reads().steps().last_issued; })
      .def_property_readonly("num_fenced", read<&ManagerReads::num_fenced>)
      .def_property_readonly("num_kept", read<&ManagerReads::num_kept>)
      .def_property_readonly("num_loading", read<&ManagerReads::num_loading>)
      // The manager owns the pools, so a reference to a pool keeps the manager alive.
      // (`reference_internal` would have the same effect, but terminates the process if it runs out
      // of memory.)
      .def_property_readonly(
          "host", [](Manager& self) { return self.host(); }, py::return_value_policy::reference)
      .def_property_readonly(
          "pool", [](Manager& self) -> BlockPool& { return self.pool(); },
          py::return_value_policy::reference);
}

}  // namespace kvcache
