// SPDX-License-Identifier: Apache-2.0
// Python bindings of the control plane. The bindings only convert arguments and results.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <thread>
#include <tuple>

#include "core/errors.h"
#include "core/eviction/registry.h"
#include "core/hashing/block_hash.h"
#include "core/hashing/extra_keys.h"
#include "core/hashing/hashed_tokens.h"
#include "core/hashing/long_work.h"
#include "core/hashing/sha256.h"
#include "core/hashing/token_chain.h"
#include "core/hashing/xxh3.h"
#include "core/pool/block_pool.h"
#include "python/arrays.h"
#include "python/construct.h"
#include "python/hashes.h"

namespace kvcache {
namespace {

uint8_t checked_group(const py::handle& value) {
  const int64_t group = int_argument(value, "group");
  if (group >= 0 && group <= std::numeric_limits<uint8_t>::max()) {
    return static_cast<uint8_t>(group);
  }
  throw py::value_error("group is " + std::to_string(group) + ": expected 0 to 255");
}

void append_tokens(TokenIds& self, const py::object& token_ids) {
  const Int32Input tokens(token_ids, "token_ids", self.takes_placeholders() ? kMinInt32 : 0);
  self.append(tokens.data(), tokens.size());
}

std::vector<TokenIds*> each_of(const py::list& requests_tokens) {
  std::vector<TokenIds*> each;
  each.reserve(requests_tokens.size());
  for (const py::handle& tokens : requests_tokens) each.push_back(&py::cast<TokenIds&>(tokens));
  return each;
}

// Appends token i to entry i of the list. If any token cannot be appended, none is.
void append_token_to_each(const py::list& requests_tokens, const py::object& token_ids) {
  const std::vector<TokenIds*> each = each_of(requests_tokens);
  const Int32Input tokens(token_ids, "token_ids");
  if (tokens.size() != static_cast<int64_t>(each.size())) {
    throw py::value_error("token_ids has " + std::to_string(tokens.size()) + " entries: expected " +
                          std::to_string(each.size()) + ", one per request");
  }
  size_t i = 0;
  try {
    for (; i < each.size(); ++i) {
      const int32_t token = tokens.data()[i];
      if (token < 0 && !each[i]->takes_placeholders()) {
        TokenIds::fail_negative(static_cast<int64_t>(i), token);
      }
      each[i]->append(&token, 1);
    }
  } catch (...) {
    while (i > 0) each[--i]->take_back(1);
    throw;
  }
}

using Int64Values = py::array_t<int64_t, py::array::c_style | py::array::forcecast>;

// Returns the last token of each entry, or None if any entry does not have exactly one token more
// than `num_computed`.
py::object last_tokens(const py::list& requests_tokens, const Int64Values& num_computed) {
  const std::vector<TokenIds*> each = each_of(requests_tokens);
  if (num_computed.size() != static_cast<py::ssize_t>(each.size())) {
    throw py::value_error("num_computed has " + std::to_string(num_computed.size()) +
                          " entries: expected " + std::to_string(each.size()) +
                          ", one per request");
  }
  Int32Array last(static_cast<py::ssize_t>(each.size()));
  for (size_t i = 0; i < each.size(); ++i) {
    const int64_t computed = num_computed.data()[i];
    if (computed < 0 || each[i]->size() != computed + 1) return py::none();
    last.mutable_data()[i] = each[i]->data()[computed];
  }
  return std::move(last);
}

// Lets other threads run and runs pending signal handlers during long work. Can be called with or
// without the GIL.
void run_signal_handlers(bool is_long) {
  if (is_long && PyGILState_Check() != 0) {
    const py::gil_scoped_release unlocked;
    // A thread that waits for the GIL wakes up only after the GIL is released. Without a pause, the
    // current thread would reacquire the GIL first.
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
  const py::gil_scoped_acquire locked;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

HashArray hash_blocks_of(const py::object& token_ids, const py::object& block_size,
                         const std::string& parent,
                         const std::optional<std::vector<std::string>>& extras,
                         const std::string& algorithm_name) {
  const HashAlgorithm algorithm = hash_algorithm_of(algorithm_name);
  const int64_t size = checked_size("block_size", int_argument(block_size, "block_size"), 1);
  // Copies the array, because the caller's array may change while the GIL is released.
  TokenIds tokens(/*takes_placeholders=*/extras.has_value());
  append_tokens(tokens, token_ids);
  const auto num_blocks = static_cast<size_t>(tokens.size() / size);
  if (extras && extras->size() != num_blocks) {
    throw py::value_error("extra_keys has " + std::to_string(extras->size()) +
                          " entries: expected " + std::to_string(num_blocks) +
                          ", one per full block");
  }
  const Hash first = hash_of(parent, "parent", digest_bytes(algorithm));
  std::vector<Hash> hashes;
  {
    std::optional<py::gil_scoped_release> unlocked;
    if (tokens.size() > kUnlockedTokens) unlocked.emplace();
    hashes = hash_blocks(algorithm, tokens.data(), static_cast<size_t>(tokens.size()), size, first,
                         extras.value_or(std::vector<std::string>{}));
  }
  return copy_hashes(hashes.data(), hashes.size(), digest_bytes(algorithm));
}

// The rows of a numpy array, which must not change. Reading the rows runs no Python code.
class ArrayRows : public RowDigests {
 public:
  // `is_token_id`: a bool per row, true where the token's own embedding is used; or None.
  ArrayRows(py::array rows, py::object is_token_id, int64_t block_size)
      : rows_(std::move(rows)), is_token_id_(std::move(is_token_id)), block_size_(block_size) {
    // The header includes the dtype and the row shape, because rows with different values can have
    // equal bytes. `digest_of_rows` in event_stream.py computes the same digest.
    header_ = py::cast<std::string>(rows_.dtype().attr("str"));
    for (py::ssize_t i = 1; i < rows_.ndim(); ++i) header_ += "," + std::to_string(rows_.shape(i));
  }

  int64_t num_blocks() const override { return (rows_.shape(0) + block_size_ - 1) / block_size_; }
  std::optional<Hash> of_block(int64_t block) const override {
    const py::gil_scoped_acquire locked;
    const py::slice some(block * block_size_, (block + 1) * block_size_, 1);
    py::object rows = rows_[some];
    std::string hashed = header_;
    if (!is_token_id_.is_none()) {
      const py::object is_token_id = is_token_id_[some];
      if (py::cast<bool>(is_token_id.attr("all")())) return std::nullopt;
      // A block that only has rows gets the same digest as without `is_token_id`.
      if (py::cast<bool>(is_token_id.attr("any")())) {
        hashed += ",mixed:" + py::cast<std::string>(is_token_id.attr("tobytes")());
        rows = rows.attr("compress")(is_token_id.attr("__invert__")(), 0);
      }
    }
    if (hashed.size() == header_.size()) hashed += ":";
    hashed += std::string_view(py::cast<py::bytes>(rows.attr("tobytes")()));
    Hash digest;
    sha256(reinterpret_cast<const uint8_t*>(hashed.data()), hashed.size(), digest.bytes);
    return digest;
  }

 private:
  py::array rows_;
  py::object is_token_id_;
  int64_t block_size_;
  std::string header_;
};

// Converts the extra keys of a request. The arguments, which `Request` has validated, are (name,
// path) or (name, path, version) or None, (identifier, first, length) tuples, a string or None, an
// array of rows or None, and an array with a bool per row or None.
ExtraKeys extra_keys(const py::object& lora, const py::tuple& mm_items,
                     const py::object& cache_salt, const py::object& embeds,
                     const py::object& is_token_id, int64_t block_size) {
  std::vector<MmItem> items;
  items.reserve(mm_items.size());
  for (const py::handle& item : mm_items) {
    auto [identifier, first, length] = py::cast<std::tuple<std::string, int64_t, int64_t>>(item);
    items.push_back({std::move(identifier), first, length});
  }
  std::shared_ptr<const RowDigests> rows;
  if (!embeds.is_none()) {
    rows = std::make_shared<ArrayRows>(py::cast<py::array>(embeds), is_token_id, block_size);
  }
  return ExtraKeys(py::cast<std::optional<std::vector<std::string>>>(lora), std::move(items),
                   py::cast<std::optional<std::string>>(cache_salt), std::move(rows));
}

// Block hashes in a Python list of `bytes` objects that the engine owns and appends to. Reading the
// list runs no Python code.
class ListedHashes : public GivenHashes {
 public:
  ListedHashes(py::list hashes, std::string request_id, int64_t block_size, int64_t num_bytes)
      : hashes_(std::move(hashes)),
        request_id_(std::move(request_id)),
        block_size_(block_size),
        num_bytes_(num_bytes) {}

  void read(int64_t first, int64_t stop, Hash* out) const override {
    const auto size = static_cast<int64_t>(PyList_GET_SIZE(hashes_.ptr()));
    if (size < stop) {
      throw py::value_error("block_hashes of request " + request_id_ + " has " +
                            std::to_string(size) + " entries: expected " + std::to_string(stop) +
                            ", one per full block of " + std::to_string(block_size_) + " tokens");
    }
    for (int64_t i = first; i < stop; ++i) {
      PyObject* each = PyList_GET_ITEM(hashes_.ptr(), i);
      const auto name = [&] {
        return "block_hashes[" + std::to_string(i) + "] of request " + request_id_;
      };
      if (!PyBytes_Check(each)) {
        throw py::type_error(name() + " has type " + Py_TYPE(each)->tp_name + ": expected bytes");
      }
      const std::string_view bytes(PyBytes_AS_STRING(each),
                                   static_cast<size_t>(PyBytes_GET_SIZE(each)));
      if (static_cast<int64_t>(bytes.size()) != num_bytes_) {
        throw py::value_error(name() + " has " + std::to_string(bytes.size()) +
                              " bytes: expected " + std::to_string(num_bytes_) +
                              ", the hash_bytes of the manager");
      }
      Hash& hash = out[i - first];
      hash = {};
      std::memcpy(hash.bytes, bytes.data(), bytes.size());
    }
  }

 private:
  py::list hashes_;
  std::string request_id_;  // in quotes, for error messages
  int64_t block_size_, num_bytes_;
};

// Returns a pointer that keeps the labels alive for native code, or null for None. Requires the
// GIL.
EventLabels labels_of(const py::object& labels) {
  if (labels.is_none()) return nullptr;
  return std::make_shared<py::object>(labels);
}

// Returns the source of a chain's hashes. `given` is a tuple (engine's list, quoted request id), a
// `HashedTokens` object, or None.
HashScheme hash_scheme(const std::string& algorithm, const py::object& given, int64_t block_size,
                       int64_t num_bytes, int64_t num_lookahead) {
  HashScheme scheme;
  scheme.num_lookahead = num_lookahead;
  if (given.is_none()) {
    scheme.algorithm = hash_algorithm_of(algorithm);
  } else if (py::isinstance<HashedTokens>(given)) {
    scheme.given = py::cast<std::shared_ptr<HashedTokens>>(given);
  } else {
    auto [hashes, request_id] = py::cast<std::tuple<py::list, std::string>>(given);
    scheme.given = std::make_shared<ListedHashes>(std::move(hashes), std::move(request_id),
                                                  block_size, num_bytes);
  }
  return scheme;
}

void bind_hashing(py::module_& m) {
  m.def(
      "sha256_implementations",
      [] {
        std::vector<std::string> names;
        for (const Sha256Implementation& each : sha256_implementations()) {
          names.emplace_back(each.name);
        }
        return names;
      },
      "Names of the implementations that this CPU supports. The first one is in use.");
  m.def(
      "sha256",
      [](const py::bytes& data, const std::string& implementation) {
        for (const Sha256Implementation& each : sha256_implementations()) {
          if (implementation != each.name) continue;
          const auto view = static_cast<std::string_view>(data);
          uint8_t out[32];
          sha256(reinterpret_cast<const uint8_t*>(view.data()), view.size(), out, each);
          return py::bytes(reinterpret_cast<const char*>(out), sizeof(out));
        }
        throw py::value_error("implementation is '" + implementation +
                              "': expected one of sha256_implementations()");
      },
      py::arg("data"), py::arg("implementation"));
  m.def(
      "hash_seed",
      [](const std::string& seed, const std::string& name) {
        const HashAlgorithm algorithm = hash_algorithm_of(name);
        return as_bytes(hash_seed(seed, algorithm), digest_bytes(algorithm));
      },
      py::arg("seed"), py::arg("algorithm"));
  m.def("hash_algorithm_names", &hash_algorithm_names);
  m.def(
      "digest_bytes", [](const std::string& name) { return digest_bytes(hash_algorithm_of(name)); },
      py::arg("algorithm"));
  m.def(
      "xxh3_128",
      [](const py::bytes& data) {
        const auto view = static_cast<std::string_view>(data);
        uint8_t out[16];
        xxh3_128(reinterpret_cast<const uint8_t*>(view.data()), view.size(), out);
        return py::bytes(reinterpret_cast<const char*>(out), sizeof(out));
      },
      py::arg("data"));

  m.def(
      "xxh3_128_rows",
      [](const py::array_t<uint8_t>& rows, const py::array_t<int64_t, py::array::c_style>& which,
         int64_t begin, int64_t end) {
        if (rows.ndim() != 2 || rows.strides(1) != 1) {
          throw py::value_error("rows: expected two dimensions, the bytes of a row contiguous");
        }
        if (begin < 0 || begin > end || end > rows.shape(1)) {
          throw py::value_error("begin and end: expected bytes of a row");
        }
        for (py::ssize_t i = 0; i < which.size(); ++i) {
          if (which.data()[i] < 0 || which.data()[i] >= rows.shape(0)) {
            throw py::value_error("which: expected existing rows");
          }
        }
        py::array_t<uint8_t> digests({which.size(), py::ssize_t{16}});
        const auto size = static_cast<size_t>(end - begin);
        const uint8_t* const data = rows.data() + begin;
        uint8_t* const out = digests.mutable_data();
        const py::gil_scoped_release unlocked;
        for (py::ssize_t i = 0; i < which.size(); ++i) {
          xxh3_128(data + which.data()[i] * rows.strides(0), size, out + 16 * i);
        }
        return digests;
      },
      py::arg("rows"), py::arg("which"), py::arg("begin"), py::arg("end"));

  m.def("hash_blocks", &hash_blocks_of, py::arg("token_ids"), py::arg("block_size"),
        py::arg("parent"), py::arg("extras"), py::arg("algorithm"));

  py::class_<TokenIds, std::shared_ptr<TokenIds>> token_ids(m, "TokenIds",
                                                            "Known token ids of one request.");
  def_init(
      token_ids,
      [](const py::object& token_ids, bool takes_placeholders) {
        auto out = std::make_shared<TokenIds>(takes_placeholders);
        append_tokens(*out, token_ids);
        return out;
      },
      py::arg("token_ids"), py::arg("takes_placeholders") = false)
      .def("append", &append_tokens, py::arg("token_ids"))
      .def("copy", [](const TokenIds& self) { return copy_array(self.data(), self.size()); })
      .def("tail",  // returns the ids from this one on as a list
           [](const TokenIds& self, int64_t first) {
             return std::vector<int32_t>(self.data() + first, self.data() + self.size());
           })
      .def("__len__", &TokenIds::size);

  m.def("append_token_to_each", &append_token_to_each, py::arg("requests_tokens"),
        py::arg("token_ids"));
  m.def("last_tokens", &last_tokens, py::arg("requests_tokens"), py::arg("num_computed"));

  def_init(
      py::class_<TokenChain, std::shared_ptr<TokenChain>>(
          m, "TokenChain", "The block hashes of one request for one block size and parent."),
      [](std::shared_ptr<TokenIds> tokens, int64_t block_size, const std::string& parent,
         bool read_cache, bool write_cache, const py::object& lora, const py::tuple& mm_items,
         const py::object& cache_salt, const py::object& prompt_embeds, int64_t num_encoder_tokens,
         const std::string& algorithm, const py::object& given, int64_t num_lookahead,
         const py::object& labels, const py::object& prompt_is_token_ids) {
        const auto num_bytes = static_cast<int64_t>(parent.size());
        return std::make_shared<TokenChain>(
            std::move(tokens), block_size, hash_of(parent, "parent", num_bytes),
            extra_keys(lora, mm_items, cache_salt, prompt_embeds, prompt_is_token_ids, block_size),
            read_cache, write_cache, num_encoder_tokens,
            hash_scheme(algorithm, given, block_size, num_bytes, num_lookahead), labels_of(labels));
      },
      py::arg("tokens"), py::arg("block_size"), py::arg("parent"), py::arg("read_cache"),
      py::arg("write_cache"), py::arg("lora") = py::none(), py::arg("mm_items") = py::tuple(),
      py::arg("cache_salt") = py::none(), py::arg("prompt_embeds") = py::none(),
      py::arg("num_encoder_tokens") = 0, py::arg("algorithm") = "sha256_cbor",
      py::arg("given") = py::none(), py::arg("num_lookahead") = 0, py::arg("labels") = py::none(),
      py::arg("prompt_is_token_ids") = py::none());
}

std::unique_ptr<BlockPool> make_pool(const py::object& num_blocks, const py::object& eviction,
                                     const py::object& eviction_options) {
  const int64_t n = int_argument(num_blocks, "num_blocks");
  const std::string policy = text_argument(eviction, "eviction");
  if (!py::isinstance<py::dict>(eviction_options)) {
    throw py::type_error("eviction_options is " + short_repr(eviction_options) +
                         ": expected a dict of numbers");
  }
  std::map<std::string, double> options;
  for (const auto& [name, value] : py::cast<py::dict>(eviction_options)) {
    const std::string what = "eviction_options[" + short_repr(name) + "]";
    options[text_argument(name, "a name in eviction_options")] =
        number_argument(value, what.c_str());
  }
  return std::make_unique<BlockPool>(n, make_eviction_policy(policy, options, n));
}

// The getter of a property that can be read only if the pool is sound.
template <auto kMethod>
auto sound(const BlockPool& pool) {
  pool.check_sound();
  return (pool.*kMethod)();
}

// Calls a method with a batch of ids.
template <void (BlockPool::*kMethod)(const BlockId*, int64_t)>
void with_ids(BlockPool& pool, const py::object& ids) {
  const Int32Input array(ids, "ids");
  (pool.*kMethod)(array.data(), array.size());
}

// Validates the ids even if the policy does not use them.
void check_ids(const BlockPool& pool, const Int32Input& ids) {
  for (py::ssize_t i = 0; i < ids.size(); ++i) pool.check_id(ids.data()[i], "ids");
}

// Converts seconds to milliseconds, at most about 285 million years.
int64_t milliseconds(const py::handle& value, const char* name) {
  const double seconds = number_argument(value, name);
  if (std::abs(seconds) <= 9e15) return std::llround(seconds * 1000);
  throw py::value_error(std::string(name) + " is " + std::to_string(seconds) +
                        ": expected a finite number of seconds");
}

std::vector<Retention> retention_of(const py::object& ranges) {
  const std::string expected = ": expected (first token, stop, priority 0 to 100, ttl_s or None)";
  if (!PyList_Check(ranges.ptr()) && !PyTuple_Check(ranges.ptr())) {
    throw py::type_error("retention is " + short_repr(ranges) + ": expected a list of ranges");
  }
  std::vector<Retention> out;
  for (const py::handle& range : ranges) {
    const std::string name = "retention[" + std::to_string(out.size()) + "]";
    if ((!PyTuple_Check(range.ptr()) && !PyList_Check(range.ptr())) || py::len(range) != 4) {
      throw py::type_error(name + " is " + short_repr(range) + expected);
    }
    const py::tuple fields = py::cast<py::tuple>(py::reinterpret_borrow<py::object>(range));
    const int64_t first = int_argument(fields[0], (name + "[0]").c_str());
    const int64_t stop = int_argument(fields[1], (name + "[1]").c_str());
    const int64_t priority = int_argument(fields[2], (name + "[2]").c_str(), kMinInt32, kMaxInt32);
    const py::object ttl_s = fields[3];
    const std::string ttl = name + " has ttl_s";
    const int64_t ttl_ms = ttl_s.is_none() ? -1 : milliseconds(ttl_s, ttl.c_str());
    if (!ttl_s.is_none() && ttl_ms < 0) {
      throw py::value_error(ttl + " " + short_repr(ttl_s) + ": expected 0 or more, or None");
    }
    out.push_back({first, stop, static_cast<int32_t>(priority), ttl_ms});
  }
  return out;
}

void notify_release(BlockPool& self, const py::object& ids, const py::object& prefix_tokens,
                    const py::object& tokens_per_block, const py::object& num_prefix_tokens,
                    const py::object& num_new_blocks, const py::object& num_output_tokens,
                    const py::object& logical_time, const py::object& wall_ms,
                    const py::object& retention) {
  const Int32Input array(ids, "ids");
  check_ids(self, array);
  const Int32Input prefixes(prefix_tokens, "prefix_tokens");
  require_same_length(array.size(), "ids", prefixes.size(), "prefix_tokens");
  const std::vector<int64_t> wide(prefixes.data(), prefixes.data() + prefixes.size());
  const std::vector<Retention> wanted = retention_of(retention);
  ReleaseFeatures features;
  features.num_prefix_tokens = int_argument(num_prefix_tokens, "num_prefix_tokens");
  features.num_new_blocks = int_argument(num_new_blocks, "num_new_blocks");
  features.num_output_tokens = int_argument(num_output_tokens, "num_output_tokens");
  features.logical_time = int_argument(logical_time, "logical_time");
  features.wall_ms = int_argument(wall_ms, "wall_ms");
  features.tokens_per_block = int_argument(tokens_per_block, "tokens_per_block");
  features.retention = wanted.data();
  features.num_retention = static_cast<int64_t>(wanted.size());
  self.notify(Released{{array.data(), array.size()}, /*access=*/{}, wide.data(), &features});
}

void bind_eviction(py::module_& m, py::class_<BlockPool>* pool) {
  m.def("eviction_names", &eviction_names, "Return the names of the eviction policies.");
  m.def("host_eviction_names", &host_eviction_names,
        "Return the names of the eviction policies that the host tier supports.");
  pool->def(
          "hit",
          [](BlockPool& self, const py::object& ids) {
            const Int32Input array(ids, "ids");
            check_ids(self, array);
            self.notify(Hit{{array.data(), array.size()}, Hit::By::kRequest});
          },
          py::arg("ids"), "Notify the policy that these cached blocks were hits of a request.")
      .def("notify_release", &notify_release, py::arg("ids"), py::arg("prefix_tokens"),
           py::kw_only(), py::arg("tokens_per_block") = 1, py::arg("num_prefix_tokens") = 0,
           py::arg("num_new_blocks") = 0, py::arg("num_output_tokens") = 0,
           py::arg("logical_time") = 0, py::arg("wall_ms") = 0, py::arg("retention") = py::list(),
           "Describe these blocks to the policy before they are released. prefix_tokens[i] is the\n"
           "number of tokens up to the end of block i. retention is a list of ranges, each (first\n"
           "token, stop, priority 0 to 100, ttl_s or None).")
      .def(
          "access",
          [](BlockPool& self, const py::object& ids, const py::object& now) {
            const Int32Input array(ids, "ids");
            check_ids(self, array);
            const double moment = number_argument(now, "now");
            self.notify(Released{{array.data(), array.size()}, self.begin_access(moment)});
          },
          py::arg("ids"), py::arg("now"), "Notify the policy that these blocks were accessed.")
      .def(
          "set_now",
          [](BlockPool& self, const py::object& seconds) {
            self.set_now(milliseconds(seconds, "seconds"));
          },
          py::arg("seconds"), "Set the policy's clock. The clock never goes backwards.")
      .def("pin", &with_ids<&BlockPool::pin>, py::arg("ids"),
           "Add a pin to each cached block. A pinned block is evicted only if no unpinned cached "
           "block\n"
           "is free. A pin ends when the block is no longer cached under its hash.")
      .def("unpin", &with_ids<&BlockPool::unpin>, py::arg("ids"), "Remove a pin from each block.")
      .def(
          "is_pinned",
          [](const BlockPool& self, const py::object& id) {
            const auto block = static_cast<BlockId>(int_argument(id, "id", kMinInt32, kMaxInt32));
            self.check_sound();
            return self.is_pinned(block);
          },
          py::arg("id"))
      .def_property_readonly("has_policy",
                             [](const BlockPool& self) { return self.order() != nullptr; })
      .def_property_readonly("num_pinned", sound<&BlockPool::num_pinned>)
      .def_property_readonly("num_pins_broken", sound<&BlockPool::num_pins_broken>,
                             "Number of evicted blocks that were pinned.");
}

void bind_pool(py::module_& m) {
  py::class_<BlockPool> pool(
      m, "BlockPool",
      R"(Tracks which blocks (by int32 id) are free, held and cached. It does not store KV.

Every call either processes its whole batch or changes nothing. If memory runs out in the middle of
a change (MemoryError), the pool becomes unusable, and every later call raises RuntimeError. Block 0
is the null block: it is never allocated or cached, and not counted in `num_total` and `num_free`.

The constructor takes:

- `num_blocks`: Number of blocks, including the null block.
- `eviction`: The policy that chooses among free cached blocks, one of `eviction_names()`.
- `eviction_options`: Options for the policy, such as default_priority for priority.

Raises:
    ValueError: An id is out of range, a released block is not held, or a published block is free or
        already published.

Example:
    >>> pool = BlockPool(5)
    >>> ids = pool.allocate(2)
    >>> pool.release(ids[::-1])
    >>> pool.num_free
    4
)");
  def_init(pool, &make_pool, py::arg("num_blocks"), py::arg("eviction") = "lru",
           py::arg("eviction_options") = py::dict())
      .def(
          "allocate",
          [](BlockPool& self, const py::object& count) -> py::object {
            const int64_t n = int_argument(count, "n");
            self.check_sound();
            if (n > self.num_free()) return py::none();
            Int32Array out = new_int32(std::max<int64_t>(n, 0));
            self.allocate(n, out.mutable_data());
            return std::move(out);
          },
          py::arg("n"),
          "Return n block ids (int32[n]) with one reference each, or None if fewer are free.\n\n"
          "Uncached blocks are allocated first, in the order in which they were released. If there "
          "are\n"
          "too few of them, the policy chooses cached blocks to evict.")
      .def("retain", &with_ids<&BlockPool::retain>, py::arg("ids"),
           "Add a reference to each block, which must be held, or free and cached.")
      .def("release", &with_ids<&BlockPool::release>, py::arg("ids"),
           "Drop a reference to each block. Blocks become eviction candidates in the order of "
           "`ids`.")
      .def(
          "publish",
          [](BlockPool& self, const py::object& ids, const py::object& hashes,
             const py::object& group, const py::object& parent, const py::object& is_chain) {
            const Int32Input array(ids, "ids");
            const HashArray hash = hash_array(hashes, "hashes");
            require_same_length(array.size(), "ids", hash.shape(0), "hashes");
            if (!parent.is_none() && !PyBytes_Check(parent.ptr())) {
              throw py::type_error("parent is " + short_repr(parent) + ": expected 32 bytes");
            }
            const Hash first =
                parent.is_none() ? Hash{} : hash_of(py::cast<std::string>(parent), "parent");
            Content content{as_hashes(hash), &first};
            content.is_chain = flag_argument(is_chain, "is_chain");
            content.begins_chain = parent.is_none();
            self.publish(array.data(), content, array.size(), checked_group(group));
          },
          py::arg("ids"), py::arg("hashes"), py::arg("group") = 0, py::arg("parent") = py::none(),
          py::arg("is_chain") = true,
          "Publish held blocks under hashes (uint8[n, 32]). Two blocks may have the same hash. "
          "Unless\n"
          "`is_chain` is False, each block is the child of the previous block, and the first "
          "block\n"
          "is the child of `parent` (bytes or None). Policies evict children before their parents.")
      .def(
          "lookup",
          [](const BlockPool& self, const py::object& hashes, const py::object& group,
             const py::object& prefix) {
            const HashArray hash = hash_array(hashes, "hashes");
            const bool is_prefix = flag_argument(prefix, "prefix");
            const uint8_t g = checked_group(group);
            Int32Array out = new_int32(hash.shape(0));
            self.check_sound();
            self.lookup(as_hashes(hash), hash.shape(0), g, is_prefix, out.mutable_data());
            return out;
          },
          py::arg("hashes"), py::arg("group") = 0, py::arg("prefix") = true,
          "Return the oldest block under each hash as int32[n], or -1 for a miss. With `prefix`, "
          "every\n"
          "entry after the first miss is -1.")
      .def("evict", &with_ids<&BlockPool::evict>, py::arg("ids"),
           "Remove these blocks, held or free, from the cache.")
      .def("reset", &BlockPool::reset, "Clear the cache. Return False if a block is held.")
      .def(
          "ref_counts",
          [](const BlockPool& self, const py::object& ids) {
            const Int32Input array(ids, "ids");
            Int32Array out = new_int32(array.size());
            self.check_sound();
            for (py::ssize_t i = 0; i < array.size(); ++i) {
              out.mutable_data()[i] = self.ref_count(array.data()[i]);
            }
            return out;
          },
          py::arg("ids"))
      .def("check_invariants", sound<&BlockPool::check_invariants>,
           "Check all invariants of the pool. For tests.")
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("num_total", &BlockPool::num_total)
      .def_property_readonly("num_free", sound<&BlockPool::num_free>)
      .def_property_readonly("num_cached", sound<&BlockPool::num_cached>)
      .def_property_readonly("num_evicted", sound<&BlockPool::num_evicted>)
      .def_property_readonly("peak_used", sound<&BlockPool::peak_used>)
      .def_property_readonly("num_bytes", sound<&BlockPool::num_bytes>,
                             "Memory that the pool uses once every block has been used, in bytes.");
  bind_eviction(m, &pool);
  m.def(
      "reset_pools",
      [](const std::vector<BlockPool*>& pools) {
        for (const BlockPool* pool : pools) {
          if (pool->num_free() != pool->num_total()) return false;
        }
        for (BlockPool* pool : pools) pool->reset();
        return true;
      },
      py::arg("pools"), "Reset all pools. If any block is held, reset none and return False.");
}

}  // namespace

void bind_control_plane(py::module_& m) {
  between_pieces = &run_signal_handlers;
  bind_hashing(m);
  bind_pool(m);
}

}  // namespace kvcache
