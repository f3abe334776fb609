// SPDX-License-Identifier: Apache-2.0
#include "core/manager/call_guard.h"

#include <sstream>
#include <stdexcept>

namespace kvcache {

void CallGuard::fail_caller(bool is_owner) const {
  if (!is_owner) {
    std::ostringstream text;
    text << "called from thread " << std::this_thread::get_id()
         << ", but the manager belongs to thread " << owner_
         << ", which used it first: call it from one thread";
    throw std::runtime_error(text.str());
  }
  throw std::runtime_error(
      "called while another call of this manager is in progress (from a signal handler or an "
      "attention kind?): only one call can run at a time");
}

}  // namespace kvcache
