// The control plane's native part for Python. Converts arrays, nothing else.
#include <pybind11/functional.h>
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>

#include "core/block_hash.h"
#include "core/block_pool.h"
#include "core/extra_keys.h"
#include "core/limits.h"
#include "core/sha256.h"
#include "core/token_chain.h"
#include "python/arrays.h"
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
  const Int32Input tokens(token_ids, "token_ids", /*least=*/0);
  self.append(tokens.data(), tokens.size());
}

// Below this a prompt hashes in less time than it takes to hand the interpreter to another thread.
constexpr int64_t kUnlockedTokens = 4096;

HashArray hash_blocks_of(const py::object& token_ids, const py::object& block_size,
                         const std::string& parent,
                         const std::optional<std::vector<std::string>>& extras) {
  const int64_t size = checked_size("block_size", int_argument(block_size, "block_size"), 1);
  TokenIds tokens;  // a copy: the caller's array may change while the lock is released
  append_tokens(tokens, token_ids);
  const auto num_blocks = static_cast<size_t>(tokens.size() / size);
  if (extras && extras->size() != num_blocks) {
    throw py::value_error("extra_keys has " + std::to_string(extras->size()) +
                          " entries: expected " + std::to_string(num_blocks) +
                          ", one per full block");
  }
  const Hash first = hash_of(parent, "parent");
  std::vector<Hash> hashes;
  {
    std::optional<py::gil_scoped_release> unlocked;
    if (tokens.size() > kUnlockedTokens) unlocked.emplace();
    hashes = hash_blocks(tokens.ids(), size, first, extras.value_or(std::vector<std::string>{}));
  }
  return copy_hashes(hashes.data(), hashes.size());
}

// What `Request` has checked: (name, path) or None, (identifier, first, length) tuples, a string or
// None, 32 bytes per block.
ExtraKeys extra_keys(const py::object& lora, const py::tuple& mm_items,
                     const py::object& cache_salt, const std::string& embed_digests) {
  std::vector<MmItem> items;
  items.reserve(mm_items.size());
  for (const py::handle& item : mm_items) {
    auto [identifier, first, length] = py::cast<std::tuple<std::string, int64_t, int64_t>>(item);
    items.push_back({std::move(identifier), first, length});
  }
  std::vector<Hash> digests(embed_digests.size() / sizeof(Hash));
  if (!digests.empty()) {
    std::memcpy(digests.data(), embed_digests.data(), digests.size() * sizeof(Hash));
  }
  return ExtraKeys(py::cast<std::optional<std::pair<std::string, std::string>>>(lora),
                   std::move(items), py::cast<std::optional<std::string>>(cache_salt),
                   std::move(digests));
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

  m.def("hash_blocks", &hash_blocks_of, py::arg("token_ids"), py::arg("block_size"),
        py::arg("parent"), py::arg("extras"));

  py::class_<TokenIds, std::shared_ptr<TokenIds>>(m, "TokenIds", "Known token ids of one request.")
      .def(py::init([](const py::object& token_ids) {
             auto out = std::make_shared<TokenIds>();
             append_tokens(*out, token_ids);
             return out;
           }),
           py::arg("token_ids"))
      .def("append", &append_tokens, py::arg("token_ids"))
      .def("copy", [](const TokenIds& self) { return copy_int32(self.ids()); })
      .def("__len__", &TokenIds::size);

  py::class_<TokenChain, std::shared_ptr<TokenChain>>(
      m, "TokenChain", "The block hashes of one request for one block size and parent.")
      .def(py::init([](std::shared_ptr<TokenIds> tokens, int64_t block_size,
                       const std::string& parent, bool read_cache, bool write_cache,
                       const py::object& lora, const py::tuple& mm_items,
                       const py::object& cache_salt, const std::string& embed_digests,
                       int64_t num_encoder_tokens) {
             return std::make_shared<TokenChain>(
                 std::move(tokens), block_size, hash_of(parent, "parent"),
                 extra_keys(lora, mm_items, cache_salt, embed_digests), read_cache, write_cache,
                 num_encoder_tokens);
           }),
           py::arg("tokens"), py::arg("block_size"), py::arg("parent"), py::arg("read_cache"),
           py::arg("write_cache"), py::arg("lora") = py::none(), py::arg("mm_items") = py::tuple(),
           py::arg("cache_salt") = py::none(), py::arg("embed_digests") = "",
           py::arg("num_encoder_tokens") = 0);
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
      .def(py::init([](const py::object& num_blocks) {
             return std::make_unique<BlockPool>(int_argument(num_blocks, "num_blocks"));
           }),
           py::arg("num_blocks"))
      .def(
          "allocate",
          [](BlockPool& self, const py::object& count) -> py::object {
            const int64_t n = int_argument(count, "n");
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
          [](BlockPool& self, const py::object& ids, const py::object& hashes,
             const py::object& group) {
            const Int32Input array(ids, "ids");
            const HashArray hash = hash_array(hashes, "hashes");
            require_same_length(array.size(), "ids", hash.shape(0), "hashes");
            const Hash no_parent{};
            self.publish(array.data(), Content{as_hashes(hash), &no_parent}, array.size(),
                         checked_group(group));
          },
          py::arg("ids"), py::arg("hashes"), py::arg("group") = 0,
          "Makes held blocks findable under hashes (uint8[n, 32]). Two may share a hash.")
      .def(
          "lookup",
          [](const BlockPool& self, const py::object& hashes, const py::object& group,
             bool prefix) {
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

}  // namespace

void bind_control_plane(py::module_& m) {
  bind_hashing(m);
  bind_pool(m);
}

}  // namespace kvcache
