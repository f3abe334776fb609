// SPDX-License-Identifier: Apache-2.0
// Python bindings of the sanitizer's checks. The bindings only convert arguments and results.
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "python/arrays.h"
#include "python/construct.h"
#include "sanitizer/request_tags.h"
#include "sanitizer/shadow.h"
#include "sanitizer/slot_group.h"
#include "sanitizer/slot_reads.h"
#include "sanitizer/slot_writes.h"

namespace kvcache::sanitizer {

// The values of a C-contiguous int64 array, or of a converted copy. (pybind11's own conversion
// would call numpy for each argument.)
class Int64Input {
 public:
  Int64Input() = default;
  explicit Int64Input(const py::handle& value) {
    using Array = py::array_t<int64_t, py::array::c_style>;
    using Converted = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;
    const bool is_plain = py::isinstance<Array>(value);
    array_ = is_plain ? py::reinterpret_borrow<py::object>(value) : Converted::ensure(value);
    if (!array_) throw py::type_error("expected int64[n]");
    const auto array = py::reinterpret_borrow<py::array>(array_);
    data_ = static_cast<const int64_t*>(array.data());
    size_ = array.size();
  }
  const int64_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  py::object array_;
  const int64_t* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace kvcache::sanitizer

namespace pybind11::detail {

template <>
struct type_caster<kvcache::sanitizer::Int64Input> {
  PYBIND11_TYPE_CASTER(kvcache::sanitizer::Int64Input, const_name("int64[n]"));
  bool load(const handle& source, bool /*convert*/) {
    value = kvcache::sanitizer::Int64Input(source);
    return true;
  }
};

}  // namespace pybind11::detail

namespace kvcache::sanitizer {
namespace {

constexpr int64_t kMaxUnknown = 65'536;  // limits the memory that a wrong position costs

[[noreturn]] void fail(const std::string& what, int64_t value, const std::string& expected) {
  throw py::value_error(what + std::to_string(value) + expected);
}

void check_size(const Int64Input& values, const char* name, int64_t size, const char* what) {
  if (values.size() == size) return;
  fail(std::string(name) + " has ", values.size(),
       " entries: expected " + std::to_string(size) + what);
}

// Checks that there is one value per request, each from `least` to the largest int32.
const int64_t* counts_of(const Int64Input& values, const char* name, int64_t size,
                         int64_t least = 0) {
  check_size(values, name, size, ", one per request_id");
  for (int64_t i = 0; i < size; ++i) {
    const int64_t value = values.data()[i];
    if (value >= least && value <= kMaxInt32) continue;
    fail(std::string(name) + "[" + std::to_string(i) + "] is ", value,
         ": expected " + std::to_string(least) + " to " + std::to_string(kMaxInt32));
  }
  return values.data();
}

TokenRanges ranges_of(const Int64Input& rows, const Int64Input& starts, const char* counts_name,
                      const Int64Input& counts) {
  return {rows.data(), counts_of(starts, "starts", rows.size()),
          counts_of(counts, counts_name, rows.size()), rows.size()};
}

int64_t num_tokens_of(const TokenRanges& ranges) {
  int64_t sum = 0;
  for (int64_t r = 0; r < ranges.size; ++r) sum += ranges.counts[r];
  return sum;
}

Table table_of(const py::array& array) {
  const bool is_wide = array.itemsize() == sizeof(int64_t);
  return {static_cast<const char*>(array.data()), array.shape(1), array.strides(0),
          array.strides(1), is_wide};
}

// Checks that the tokens in all ranges are known. `stop(r)` returns the end of range r.
template <class Stop>
void check_known(const RequestTags& requests, const Int64Input& rows, const py::list& names,
                 Stop stop) {
  for (int64_t r = 0; r < rows.size(); ++r) {
    const int64_t row = rows.data()[r];
    if (row < 0 || stop(r) <= requests.num_tokens(row)) continue;
    fail(repr_of(names[static_cast<size_t>(r)]) + " has ", requests.num_tokens(row),
         " known tokens: expected " + std::to_string(stop(r)) +
             " (call observe_tokens before the writes)");
  }
}

py::object hash_tokens(const Int64Input& starts, const Int64Input& query_lens,
                       const Int64Input& token_ids, uint64_t key) {
  const TokenRanges ranges{nullptr, counts_of(starts, "starts", starts.size()),
                           counts_of(query_lens, "query_lens", starts.size()), starts.size()};
  check_size(token_ids, "token_ids", num_tokens_of(ranges), ", the sum of query_lens");
  auto out = new_array<int64_t>(token_ids.size());
  token_hashes(ranges, token_ids.data(), key, reinterpret_cast<uint64_t*>(out.mutable_data()));
  return std::move(out);
}

// Returns the requests whose tokens before `starts` are not known: their indices and the number of
// known tokens, int64[n, 2].
py::object put(RequestTags& self, const py::list& names, const Int64Input& rows,
               const Int64Input& starts, const Int64Input& query_lens, const Int64Input& hashes,
               const std::vector<SlotReads*>& reads) {
  const TokenRanges ranges = ranges_of(rows, starts, "query_lens", query_lens);
  check_size(hashes, "hashes", num_tokens_of(ranges), ", the sum of query_lens");
  std::vector<int64_t> gaps;
  for (int64_t r = 0; r < ranges.size; ++r) {
    const int64_t known = self.num_in_sequence(ranges.rows[r]);
    if (ranges.starts[r] <= known) continue;
    if (ranges.starts[r] - known > kMaxUnknown) {
      fail("starts[" + std::to_string(r) + "] is ", ranges.starts[r],
           ": expected at most " + std::to_string(known) + ", the known tokens of " +
               repr_of(names[static_cast<size_t>(r)]));
    }
    gaps.insert(gaps.end(), {r, known});
  }
  for (int64_t r = 0; r < ranges.size; ++r) {
    if (ranges.starts[r] >= self.num_tokens(ranges.rows[r])) continue;
    for (SlotReads* each : reads) each->forget(ranges.rows[r], ranges.starts[r]);
  }
  self.put(ranges, reinterpret_cast<const uint64_t*>(hashes.data()));
  if (gaps.empty()) return py::none();
  const auto n = static_cast<py::ssize_t>(gaps.size());
  return copy_array(gaps.data(), n).reshape({n / 2, py::ssize_t{2}});
}

// Returns the findings as int64[n, 6], or None if there are none.
py::object array_of(const Findings& findings) {
  if (findings.empty()) return py::none();
  static_assert(sizeof(Finding) == 6 * sizeof(int64_t));
  const auto n = static_cast<py::ssize_t>(findings.size());
  const auto* const data = reinterpret_cast<const int64_t*>(findings.data());
  return copy_array(data, 6 * n).reshape({n, py::ssize_t{6}});
}

SlotGroup group_of(int16_t index, const std::string& kind, int64_t block_size, int64_t window,
                   int64_t chunk, int64_t columns) {
  using Kind = SlotGroup::Kind;
  for (const auto& [name, value] :
       {std::pair{"full", Kind::kFull}, std::pair{"window", Kind::kWindow},
        std::pair{"chunk", Kind::kChunk}, std::pair{"circular", Kind::kCircular},
        std::pair{"state", Kind::kState}}) {
    if (kind == name) return {index, value, block_size, window, chunk, columns};
  }
  throw py::value_error("kind is unknown");
}

void bind_shadow(py::module_& m) {
  PYBIND11_NUMPY_DTYPE(ShadowSlot, tag, origin);
  PYBIND11_NUMPY_DTYPE(ShadowBlock, holder, writer, write_step, num_events, num_holders, owner,
                       is_fresh);
  PYBIND11_NUMPY_DTYPE(ShadowEvent, step, request, position, group, kind, medium);
  py::class_<Shadow, std::shared_ptr<Shadow>> shadow(m, "Shadow");
  def_init(
      shadow,
      [](int64_t num_blocks, int64_t stride, int64_t history) {
        return std::make_shared<Shadow>(num_blocks, stride, history);
      },
      py::arg("num_blocks"), py::arg("stride"), py::arg("history"))
      .def_property_readonly("num_blocks", &Shadow::num_blocks)
      .def_property_readonly("stride", &Shadow::stride)
      .def_property_readonly("num_bytes", &Shadow::num_bytes)
      .def_readwrite("tracks_holders", &Shadow::tracks_holders)
      // Views of the shadow's memory: slots[num_blocks, stride] and blocks[num_blocks].
      .def_property_readonly("slots",
                             [](const py::object& self) {
                               auto& shadow = py::cast<Shadow&>(self);
                               return view_of(shadow.slots(),
                                              {shadow.num_blocks(), shadow.stride()}, self);
                             })
      .def_property_readonly("blocks",
                             [](const py::object& self) {
                               auto& shadow = py::cast<Shadow&>(self);
                               return view_of(shadow.blocks(), {shadow.num_blocks()}, self);
                             })
      .def("change",
           [](Shadow& self, const Int64Input& blocks) {
             for (py::ssize_t i = 0; i < blocks.size(); ++i) self.change(blocks.data()[i]);
           })
      .def("clear",
           [](Shadow& self, const Int64Input& blocks) {
             for (py::ssize_t i = 0; i < blocks.size(); ++i) self.clear(blocks.data()[i]);
           })
      .def(
          "log",
          [](Shadow& self, const Int64Input& blocks, int8_t kind, int64_t step, int64_t request,
             int16_t group, const std::optional<Int64Input>& sources, int8_t medium) {
            for (py::ssize_t i = 0; i < blocks.size(); ++i) {
              const int64_t source = sources ? sources->data()[i] : 0;
              self.log(blocks.data()[i],
                       {step, request, static_cast<int32_t>(source), group, kind, medium});
            }
          },
          py::arg("blocks"), py::arg("kind"), py::arg("step"), py::arg("request") = kNobody,
          py::arg("group") = kNobody, py::arg("sources") = py::none(), py::arg("medium") = 0)
      .def("events",
           [](const Shadow& self, int64_t block) { return copy_array(self.events(block)); });
}

void bind_requests(py::module_& m) {
  m.def("hash_tokens", &hash_tokens);
  py::class_<RequestTags, std::shared_ptr<RequestTags>> requests(m, "RequestTags");
  def_init(requests, [] { return std::make_shared<RequestTags>(); })
      .def("add", &RequestTags::add)
      .def("remove", &RequestTags::remove)
      .def("restart", &RequestTags::restart)
      .def("serial", &RequestTags::serial)
      .def("seed", &RequestTags::seed)
      .def("num_tokens", &RequestTags::num_tokens)
      .def("put", &put);
}

void bind_writes(py::module_& m) {
  py::class_<SlotWrites> writes(m, "SlotWrites");
  def_init(writes,
           [](std::shared_ptr<Shadow> shadow, std::shared_ptr<RequestTags> requests) {
             return std::make_unique<SlotWrites>(std::move(shadow), std::move(requests));
           })
      .def("begin",
           [](SlotWrites& self, const SlotGroup& group, const py::list& names,
              const Int64Input& rows, const Int64Input& starts, const Int64Input& query_lens,
              const Int64Input& slots, const std::optional<py::array>& table, int64_t step) {
             const TokenRanges ranges = ranges_of(rows, starts, "query_lens", query_lens);
             check_known(self.requests(), rows, names,
                         [&](int64_t r) { return ranges.starts[r] + ranges.counts[r]; });
             check_size(slots, "slot_mapping", num_tokens_of(ranges), "");
             return array_of(
                 self.begin(group, ranges, slots.data(), table ? table_of(*table) : Table{}, step));
           })
      .def(
          "begin_states",
          [](SlotWrites& self, const SlotGroup& group, const py::list& names,
             const Int64Input& rows, const Int64Input& num_tokens, const Int64Input& pages,
             int64_t step) {
            const int64_t* const stops = counts_of(num_tokens, "num_tokens", rows.size(), 1);
            check_size(pages, "pages", rows.size(), ", one per request_id");
            check_known(self.requests(), rows, names, [&](int64_t r) { return stops[r]; });
            std::vector<int64_t> starts(stops, stops + rows.size());
            for (int64_t& each : starts) --each;
            const std::vector<int64_t> ones(starts.size(), 1);
            return array_of(self.begin_states(
                group, {rows.data(), starts.data(), ones.data(), rows.size()}, pages.data(), step));
          })
      .def("load",
           [](SlotWrites& self, const SlotGroup& group, const py::list& names,
              const Int64Input& rows, const Int64Input& starts, const Int64Input& stops,
              const py::array& table, int64_t step) {
             counts_of(starts, "starts", rows.size());
             counts_of(stops, "stops", rows.size());
             check_known(self.requests(), rows, names, [&](int64_t r) { return stops.data()[r]; });
             std::vector<int64_t> counts;
             for (int64_t r = 0; r < rows.size(); ++r) {
               counts.push_back(std::max<int64_t>(stops.data()[r] - starts.data()[r], 0));
             }
             self.load(group, {rows.data(), starts.data(), counts.data(), rows.size()},
                       table_of(table), step);
           })
      .def("advance", [](SlotWrites& self) { return array_of(self.advance()); })
      .def_property_readonly("num_written", &SlotWrites::num_written);
}

void bind_reads(py::module_& m) {
  py::class_<SlotReads> reads(m, "SlotReads");
  def_init(reads,
           [](const SlotGroup& group, std::shared_ptr<Shadow> shadow,
              std::shared_ptr<RequestTags> requests) {
             return std::make_unique<SlotReads>(group, std::move(shadow), std::move(requests));
           })
      // If `skips` is set, validates only the arguments.
      .def("check",
           [](SlotReads& self, const Int64Input& rows, const Int64Input& starts,
              const Int64Input& seq_lens, const py::array& blocks, bool skips) {
             counts_of(starts, "starts", rows.size());
             const int64_t* const stops = counts_of(seq_lens, "seq_lens", rows.size());
             Table table = table_of(blocks);
             self.cut(&table, stops, rows.size());
             if (skips) return array_of(self.skip());
             return array_of(self.check({rows.data(), starts.data(), stops, rows.size()}, table));
           })
      .def("check_states",
           [](SlotReads& self, const Int64Input& rows, const Int64Input& num_tokens,
              const Int64Input& pages, bool skips) {
             const int64_t* const stops = counts_of(num_tokens, "num_tokens", rows.size());
             check_size(pages, "pages", rows.size(), ", one per request_id");
             if (skips) return array_of(self.skip());
             return array_of(self.check_states(rows.data(), stops, pages.data(), rows.size()));
           })
      .def("forget", [](SlotReads& self, int64_t row) { self.forget(row, 0); })
      .def_property_readonly("num_read", &SlotReads::num_read)
      .def_property_readonly("num_compared", &SlotReads::num_compared);
}

}  // namespace
}  // namespace kvcache::sanitizer

namespace kvcache {

void bind_sanitizer(py::module_& m) {
  using namespace sanitizer;
  py::class_<SlotGroup> group(m, "SlotGroup");
  def_init(group, [](int16_t index, const std::string& kind, int64_t block_size, int64_t window,
                     int64_t chunk, int64_t columns) {
    return std::make_unique<SlotGroup>(group_of(index, kind, block_size, window, chunk, columns));
  }).def("first_needed", [](const SlotGroup& self, const Int64Input& starts) {
    auto out = new_array<int64_t>(starts.size());
    for (py::ssize_t i = 0; i < starts.size(); ++i) {
      out.mutable_data()[i] = self.first_needed(starts.data()[i]);
    }
    return out;
  });
  bind_shadow(m);
  bind_requests(m);
  bind_writes(m);
  bind_reads(m);
}

}  // namespace kvcache
