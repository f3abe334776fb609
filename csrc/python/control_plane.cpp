// The control plane's native part for Python. Converts arrays, nothing else.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>

#include "core/block_hash.h"
#include "core/block_pool.h"
#include "core/manager.h"
#include "core/sha256.h"
#include "core/token_chain.h"
#include "python/arrays.h"

namespace kvcache {
namespace {

using HashArray = py::array_t<uint8_t, py::array::c_style>;

HashArray hash_array(const py::handle& value, const char* name) {
  if (py::isinstance<HashArray>(value)) {
    auto array = py::reinterpret_borrow<HashArray>(value);
    if (array.ndim() == 2 && array.shape(1) == sizeof(Hash)) return array;
  }
  throw py::type_error(std::string(name) +
                       ": expected a C-contiguous uint8 array of shape [n, 32]");
}

const Hash* as_hashes(const HashArray& array) {
  static_assert(alignof(Hash) == 1);
  return reinterpret_cast<const Hash*>(array.data());
}

Hash hash_of(const std::string& bytes, const char* name) {
  if (bytes.size() != sizeof(Hash)) {
    throw py::value_error(std::string(name) + " has " + std::to_string(bytes.size()) +
                          " bytes: expected 32");
  }
  Hash hash;
  std::memcpy(hash.bytes, bytes.data(), sizeof(Hash));
  return hash;
}

py::bytes as_bytes(const Hash& hash) {
  return py::bytes(reinterpret_cast<const char*>(hash.bytes), sizeof(Hash));
}

HashArray copy_hashes(const Hash* hashes, size_t n) {
  HashArray out({n, sizeof(Hash)});
  if (n > 0) std::memcpy(out.mutable_data(), hashes, n * sizeof(Hash));
  return out;
}

uint16_t checked_group(int64_t group) {
  if (group >= 0 && group <= std::numeric_limits<uint16_t>::max()) {
    return static_cast<uint16_t>(group);
  }
  throw py::value_error("group is " + std::to_string(group) + ": expected 0 to 65535");
}

void bind_hashing(py::module_& m) {
  m.def(
      "libcrypto_name", [] { return libcrypto_name(); },
      "Name of the libcrypto in use, or None when the fallback is.");
  m.def(
      "set_sha256_fallback",
      [](const py::function& digest, bool force) {
        // Leaked on purpose: it must outlive the interpreter's own tear-down order.
        auto* function = new py::function(digest);
        set_sha256_fallback(
            [function](const uint8_t* data, size_t size, uint8_t* out) {
              py::gil_scoped_acquire gil;
              const py::bytes input(reinterpret_cast<const char*>(data), size);
              const auto hash = hash_of(py::cast<std::string>((*function)(input)), "digest");
              std::memcpy(out, hash.bytes, sizeof(Hash));
            },
            force);
      },
      py::arg("digest"), py::arg("force") = false);
  m.def(
      "hash_seed", [](const std::string& seed) { return as_bytes(hash_seed(seed)); },
      py::arg("seed"));

  py::class_<TokenChain, std::shared_ptr<TokenChain>>(
      m, "TokenChain", "Tokens of one request and the hashes of its full blocks.")
      .def(py::init([](int64_t block_size, const std::string& parent,
                       std::vector<std::string> block_extras, std::string later_extra,
                       bool read_cache, bool write_cache) {
             return std::make_shared<TokenChain>(block_size, hash_of(parent, "parent"),
                                                 std::move(block_extras), std::move(later_extra),
                                                 read_cache, write_cache);
           }),
           py::arg("block_size"), py::arg("parent"),
           py::arg("block_extras") = std::vector<std::string>{}, py::arg("later_extra") = "",
           py::arg("read_cache") = true, py::arg("write_cache") = true)
      .def(
          "append",
          [](TokenChain& self, const py::object& token_ids) {
            const Int32Input tokens(token_ids, "token_ids");
            self.append(tokens.data(), tokens.size());
          },
          py::arg("token_ids"))
      .def("hashes",
           [](TokenChain& self) {
             {
               std::optional<py::gil_scoped_release> unlocked;
               if (self.num_tokens() > 4096) unlocked.emplace();
               self.hashes();
             }
             return copy_hashes(self.hashes().data(), self.hashes().size());
           })
      .def("token_ids", [](const TokenChain& self) { return copy_int32(self.tokens()); })
      .def_property_readonly("block_size", &TokenChain::block_size)
      .def_property_readonly("num_tokens", &TokenChain::num_tokens)
      .def_property_readonly("num_full_blocks", &TokenChain::num_full_blocks);
}

void bind_pool(py::module_& m) {
  py::class_<BlockPool>(m, "BlockPool",
                        R"(Which block is free, held and cached; int32 ids, no bytes.

Every call serves its whole batch or changes nothing. Block 0 is the null block: never handed out,
never cached, not counted in `num_total` and `num_free`. Ids out of range, a release of a block that
is not held, a publish of a free or already published block: ValueError.

>>> pool = BlockPool(5)
>>> ids = pool.allocate(2)
>>> pool.release(ids[::-1])
>>> pool.num_free
4
)")
      .def(py::init<int64_t>(), py::arg("num_blocks"))
      .def(
          "allocate",
          [](BlockPool& self, int64_t n) -> py::object {
            if (n > self.num_free()) return py::none();
            Int32Array out = new_int32(std::max<int64_t>(n, 0));
            self.allocate(n, out.mutable_data());
            return std::move(out);
          },
          py::arg("n"),
          "n block ids (int32[n]) with one reference each, or None when fewer are free.\n\n"
          "Uncached blocks first, then cached ones, which are evicted; each least recently\n"
          "released first.")
      .def(
          "retain",
          [](BlockPool& self, const py::object& ids) {
            const Int32Input array(ids, "ids");
            self.retain(array.data(), array.size());
          },
          py::arg("ids"), "One more reference each; a block must be held, or free and cached.")
      .def(
          "release",
          [](BlockPool& self, const py::object& ids) {
            const Int32Input array(ids, "ids");
            self.release(array.data(), array.size());
          },
          py::arg("ids"), "One reference less each, in the order given: the order of eviction.")
      .def(
          "publish",
          [](BlockPool& self, const py::object& ids, const py::object& hashes, int64_t group) {
            const Int32Input array(ids, "ids");
            const HashArray hash = hash_array(hashes, "hashes");
            require_same_length(array.size(), "ids", hash.shape(0), "hashes");
            self.publish(array.data(), as_hashes(hash), array.size(), checked_group(group));
          },
          py::arg("ids"), py::arg("hashes"), py::arg("group") = 0,
          "Makes held blocks findable under hashes (uint8[n, 32]). Two may share a hash.")
      .def(
          "lookup",
          [](const BlockPool& self, const py::object& hashes, int64_t group, bool prefix) {
            const HashArray hash = hash_array(hashes, "hashes");
            Int32Array out = new_int32(hash.shape(0));
            self.lookup(as_hashes(hash), hash.shape(0), checked_group(group), prefix,
                        out.mutable_data());
            return out;
          },
          py::arg("hashes"), py::arg("group") = 0, py::arg("prefix") = true,
          "int32[n]: the oldest block under each hash, or -1; all -1 after the first miss where\n"
          "`prefix`.")
      .def(
          "evict",
          [](BlockPool& self, const py::object& ids) {
            const Int32Input array(ids, "ids");
            self.evict(array.data(), array.size());
          },
          py::arg("ids"), "Forgets the hashes of these blocks, held or free.")
      .def("reset", &BlockPool::reset, "Forgets every hash; False while any block is held.")
      .def(
          "ref_counts",
          [](const BlockPool& self, const py::object& ids) {
            const Int32Input array(ids, "ids");
            Int32Array out = new_int32(array.size());
            for (py::ssize_t i = 0; i < array.size(); ++i) {
              out.mutable_data()[i] = self.ref_count(array.data()[i]);
            }
            return out;
          },
          py::arg("ids"))
      .def("record_evictions", &BlockPool::record_evictions, py::arg("on") = true,
           "Whether evicted hashes are kept for `drain_evicted`.")
      .def(
          "drain_evicted",
          [](BlockPool& self) {
            const auto evicted = self.drain_evicted();
            HashArray hashes({evicted.size(), sizeof(Hash)});
            Int32Array groups = new_int32(static_cast<py::ssize_t>(evicted.size()));
            for (size_t i = 0; i < evicted.size(); ++i) {
              std::memcpy(hashes.mutable_data(i, 0), evicted[i].hash.bytes, sizeof(Hash));
              groups.mutable_data()[i] = evicted[i].group;
            }
            return py::make_tuple(hashes, groups);
          },
          "(uint8[n, 32] hashes, int32[n] groups) evicted since the last call, oldest first.")
      .def("check_invariants", &BlockPool::check_invariants, "Walks the whole pool; for tests.")
      .def_property_readonly("num_blocks", &BlockPool::num_blocks)
      .def_property_readonly("num_total", &BlockPool::num_total)
      .def_property_readonly("num_free", &BlockPool::num_free)
      .def_property_readonly("num_cached", &BlockPool::num_cached)
      .def_property_readonly("num_evicted", &BlockPool::num_evicted)
      .def_property_readonly("peak_used", &BlockPool::peak_used)
      .def_property_readonly("num_bytes", &BlockPool::num_bytes,
                             "Bytes of the pool itself when every block was used once.");
}

std::vector<NewRow> new_rows(const py::list& chains, const Int32Input& num_tokens) {
  require_same_length(static_cast<py::ssize_t>(chains.size()), "new", num_tokens.size(),
                      "new_num_tokens");
  std::vector<NewRow> out(chains.size());
  for (size_t i = 0; i < out.size(); ++i) {
    out[i].chain = py::cast<std::shared_ptr<TokenChain>>(chains[i]);
    out[i].num_tokens = num_tokens.data()[i];
  }
  return out;
}

py::tuple as_tuple(const StepDelta& delta) {
  py::array_t<uint8_t> status(static_cast<py::ssize_t>(delta.status.size()), delta.status.data());
  return py::make_tuple(copy_int32(delta.rows), std::move(status),
                        copy_int32(delta.num_computed_tokens), copy_int32(delta.clear_rows),
                        copy_int32(delta.append_rows), copy_int32(delta.append_splits),
                        copy_int32(delta.append_ids));
}

void bind_manager(py::module_& m) {
  py::class_<Manager>(m, "Manager")
      .def(py::init([](int64_t block_size, int64_t num_blocks, int64_t max_model_len,
                       bool enable_caching, int64_t num_preallocate_tokens, int64_t max_num_reqs) {
             return std::make_unique<Manager>(ManagerOptions{block_size, num_blocks, max_model_len,
                                                             enable_caching, num_preallocate_tokens,
                                                             max_num_reqs});
           }),
           py::kw_only(), py::arg("block_size"), py::arg("num_blocks"), py::arg("max_model_len"),
           py::arg("enable_caching"), py::arg("num_preallocate_tokens"), py::arg("max_num_reqs"))
      .def("lookup",
           [](const Manager& self, TokenChain& chain) { return copy_int32(self.lookup(chain)); })
      .def("step",
           [](Manager& self, const py::object& rows, const py::object& num_tokens,
              const py::list& new_chains, const py::object& new_num_tokens,
              int64_t num_lookahead_tokens) {
             const Int32Input r(rows, "rows");
             const Int32Input n(num_tokens, "num_tokens");
             const Int32Input limits(new_num_tokens, "new_num_tokens");
             require_same_length(r.size(), "rows", n.size(), "num_tokens");
             return as_tuple(self.step(r.data(), n.data(), r.size(), new_rows(new_chains, limits),
                                       num_lookahead_tokens));
           })
      .def("step_with_computed",
           [](Manager& self, std::shared_ptr<TokenChain> chain, int64_t num_tokens,
              const py::object& computed, int64_t num_lookahead_tokens) {
             const Int32Input ids(computed, "computed_blocks");
             static const BlockId none = kNullBlock;  // an empty array may have no address
             NewRow request{std::move(chain), num_tokens};
             request.computed = ids.size() == 0 ? &none : ids.data();
             request.num_computed_blocks = ids.size();
             return as_tuple(self.step(nullptr, nullptr, 0, {request}, num_lookahead_tokens));
           })
      .def("free", &Manager::free)
      .def("reset_prefix_cache", &Manager::reset_prefix_cache)
      .def("blocks", [](const Manager& self, int32_t row) { return copy_int32(self.blocks(row)); })
      .def("num_computed_tokens", &Manager::num_computed_tokens)
      .def("check_invariants", &Manager::check_invariants)
      .def("clear_stats", &Manager::clear_stats)
      .def_property_readonly("stats",
                             [](const Manager& self) {
                               const CacheStats& s = self.stats();
                               return py::make_tuple(s.num_requests, s.query_tokens, s.hit_tokens);
                             })
      .def_property_readonly("num_rows", &Manager::num_rows)
      .def_property_readonly(
          "pool", [](Manager& self) -> BlockPool& { return self.pool(); },
          py::return_value_policy::reference_internal);
}

}  // namespace

void bind_control_plane(py::module_& m) {
  bind_hashing(m);
  bind_pool(m);
  bind_manager(m);
}

}  // namespace kvcache
