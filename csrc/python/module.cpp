// SPDX-License-Identifier: Apache-2.0
#include <pybind11/pybind11.h>

namespace kvcache {

void bind_control_plane(pybind11::module_& m);
void bind_hashed_tokens(pybind11::module_& m);
void bind_options(pybind11::module_& m);
void bind_plan(pybind11::module_& m);
void bind_manager(pybind11::module_& m);
void bind_sanitizer(pybind11::module_& m);
void bind_worker(pybind11::module_& m);

}  // namespace kvcache

PYBIND11_MODULE(_core, m) {
  m.doc() =
      "Native host code of kvcache: block pool, block hashes, request rows; tables; sanitizer. No "
      "torch.";
  kvcache::bind_control_plane(m);
  kvcache::bind_hashed_tokens(m);
  kvcache::bind_options(m);
  kvcache::bind_plan(m);
  kvcache::bind_manager(m);
  kvcache::bind_sanitizer(m);
  kvcache::bind_worker(m);
}
