// SPDX-License-Identifier: Apache-2.0
// Python bindings of `HashedTokens`, a sequence of bytes objects, one per block.
#include "core/hashing/hashed_tokens.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <utility>

#include "core/errors.h"
#include "python/arrays.h"
#include "python/construct.h"
#include "python/hashes.h"

namespace kvcache {
namespace {

// Hashes those tokens in the list that follow the known tokens.
void extend(HashedTokens& self, const py::list& token_ids,
            const std::optional<std::vector<std::string>>& extras) {
  const auto size = static_cast<int64_t>(PyList_GET_SIZE(token_ids.ptr()));
  const int64_t known = self.num_tokens();
  if (size < known) {
    throw py::value_error("token_ids has " + std::to_string(size) + " entries: expected the " +
                          std::to_string(known) + " known tokens, followed by new ones");
  }
  std::vector<int32_t> tokens = Int32Input::entries_behind(token_ids, "token_ids", known);
  const int64_t num_blocks = self.num_filled_by(size - known);
  if (extras && static_cast<int64_t>(extras->size()) != num_blocks) {
    throw py::value_error("extra_keys has " + std::to_string(extras->size()) +
                          " entries: expected " + std::to_string(num_blocks) +
                          ", one per block that is hashed");
  }
  std::vector<Hash> hashes;
  {
    std::optional<py::gil_scoped_release> unlocked;
    if (size - known > kUnlockedTokens) unlocked.emplace();
    hashes = self.hash_behind(tokens, extras.value_or(std::vector<std::string>{}));
  }
  if (self.num_tokens() != known) {
    throw std::runtime_error(
        "token_ids were appended while other tokens of the same request were hashed");
  }
  self.append(std::move(tokens), std::move(hashes));
}

py::bytes hash_at(const HashedTokens& self, int64_t i) {
  const int64_t n = self.num_blocks();
  if (i < -n || i >= n) throw py::index_error("no such block: there are " + std::to_string(n));
  return as_bytes(self.hashes()[static_cast<size_t>(i < 0 ? i + n : i)], self.num_bytes());
}

struct Bounds {
  py::ssize_t first, stop, step, size;
};

Bounds bounds_of(const HashedTokens& self, const py::slice& slice) {
  Bounds out{};
  if (!slice.compute(self.num_blocks(), &out.first, &out.stop, &out.step, &out.size)) {
    throw py::error_already_set();
  }
  return out;
}

py::list hashes_in(const HashedTokens& self, const py::slice& slice) {
  const Bounds bounds = bounds_of(self, slice);
  py::list out(static_cast<size_t>(bounds.size));
  for (py::ssize_t i = 0; i < bounds.size; ++i) {
    PyList_SET_ITEM(out.ptr(), i, hash_at(self, bounds.first + i * bounds.step).release().ptr());
  }
  return out;
}

void remove(HashedTokens& self, const py::slice& slice) {
  const Bounds bounds = bounds_of(self, slice);
  if (bounds.step != 1 || bounds.first + bounds.size != self.num_blocks()) {
    throw py::value_error("the blocks removed are not the last ones: expected [first:]");
  }
  self.truncate(bounds.first);
}

}  // namespace

void bind_hashed_tokens(py::module_& m) {
  py::class_<HashedTokens, std::shared_ptr<HashedTokens>> hashed(
      m, "HashedTokens",
      "Tokens of a request that an engine keeps, and the hashes of its full blocks: a sequence of "
      "bytes.");
  def_init(
      hashed,
      [](const py::object& block_size, const std::string& parent, const std::string& algorithm,
         const py::object& num_lookahead) {
        const HashAlgorithm found = hash_algorithm_of(algorithm);
        const int64_t size = checked_size("block_size", int_argument(block_size, "block_size"), 1);
        const int64_t lookahead =
            checked_size("num_lookahead", int_argument(num_lookahead, "num_lookahead"), 0);
        return std::make_shared<HashedTokens>(
            found, size, hash_of(parent, "parent", digest_bytes(found)), lookahead);
      },
      py::arg("block_size"), py::arg("parent"), py::arg("algorithm"), py::arg("num_lookahead") = 0)
      .def("extend_to", &extend, py::arg("token_ids"), py::arg("extras") = py::none())
      .def("take_tokens",
           [](HashedTokens& self) {
             return std::make_shared<TokenIds>(self.take_tokens(), /*takes_placeholders=*/true);
           })
      .def_property_readonly("num_tokens", &HashedTokens::num_tokens)
      .def_property_readonly("block_size", &HashedTokens::block_size)
      .def_property_readonly("num_lookahead", &HashedTokens::num_lookahead)
      .def_property_readonly("num_bytes", &HashedTokens::num_bytes)
      .def("__len__", &HashedTokens::num_blocks)
      .def("__getitem__", &hash_at, py::arg("i"))
      .def("__getitem__", &hashes_in, py::arg("i"))
      .def("__delitem__", &remove, py::arg("i"));
}

}  // namespace kvcache
