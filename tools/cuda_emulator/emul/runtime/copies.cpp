// SPDX-License-Identifier: Apache-2.0
#include "emul/runtime/copies.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>

#include "emul/runtime/api.h"
#include "emul/runtime/capture.h"
#include "emul/runtime/counters.h"
#include "emul/runtime/ranges.h"
#include "emul/runtime/settings.h"

namespace kvcache::gpuless {
namespace {

bool is_device(const void* p) {
  const Range* r = range_of(p);
  return r != nullptr && r->kind == RangeKind::kDevice;
}

bool fits_kind(const CopyShape& c, cudaMemcpyKind kind) {
  const bool to = is_device(c.to), from = is_device(c.from);
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to && !from;
    case cudaMemcpyHostToDevice:
      return to && !from;
    case cudaMemcpyDeviceToHost:
      return !to && from;
    case cudaMemcpyDeviceToDevice:
      return to && from;
    default:
      return true;  // for cudaMemcpyDefault, the kind is derived from the pointers
  }
}

size_t extent(const CopyShape& c, size_t pitch) { return (c.num_rows - 1) * pitch + c.row_bytes; }

// Copies rows between addresses that the runtime can access.
void move_rows(const CopyShape& c, char* to, size_t to_pitch, const char* from, size_t from_pitch) {
  for (size_t row = 0; row < c.num_rows; ++row) {
    std::memmove(to + row * to_pitch, from + row * from_pitch, c.row_bytes);
  }
}

// Returns work that copies directly between the two sides. Addresses are resolved only when the
// work runs, after all earlier work in the stream, because the memory may have been freed by then.
Work direct(const CopyShape& c) {
  return [c] { move_rows(c, reachable(c.to), c.to_pitch, reachable(c.from), c.from_pitch); };
}

Work from_staging(const CopyShape& c) {
  auto staged = std::make_shared<std::vector<char>>(c.num_rows * c.row_bytes);
  move_rows(c, staged->data(), c.row_bytes, static_cast<const char*>(c.from), c.from_pitch);
  return [c, staged] { move_rows(c, reachable(c.to), c.to_pitch, staged->data(), c.row_bytes); };
}

// Returns whether a copy of one row overlaps itself, which is undefined on a device, because bytes
// are copied in no particular order. Copies of several rows are not checked, because the source's
// rows may lie between the destination's rows.
bool overlaps(const CopyShape& c) {
  if (c.num_rows != 1) return false;
  const auto to = reinterpret_cast<uintptr_t>(c.to), from = reinterpret_cast<uintptr_t>(c.from);
  if (to >= from + c.row_bytes || from >= to + c.row_bytes) return false;
  say("copy of %zu bytes from %p to %p: they overlap", c.row_bytes, c.from, c.to);
  return true;
}

void wait_for(Stream& stream) {
  count(Counter::kWaits);
  drain(stream);
}

bool has_bad_operand(void* to, const void* from, size_t bytes) {
  return bytes == 0 || !is_operand(to, bytes) || !is_operand(from, bytes) ||
         overlaps({to, from, bytes});
}

}  // namespace

cudaError_t copy(const CopyShape& c, cudaMemcpyKind kind, Stream& stream) {
  if (c.row_bytes == 0 || c.num_rows == 0) return cudaSuccess;
  if (c.num_rows > 1 && std::min(c.to_pitch, c.from_pitch) < c.row_bytes) {
    return cudaErrorInvalidPitchValue;
  }
  if (!is_operand(c.to, extent(c, c.to_pitch)) || !is_operand(c.from, extent(c, c.from_pitch))) {
    say("copy of %zu bytes from %p to %p: an operand crosses the end of an allocation or "
        "registration, or is freed",
        c.row_bytes * c.num_rows, c.from, c.to);
    return cudaErrorInvalidValue;
  }
  if (!fits_kind(c, kind) || overlaps(c)) return cudaErrorInvalidValue;
  count(Counter::kCopies);
  if (is_pageable(c.from) || is_pageable(c.to)) count(Counter::kPageableCopies);
  if (stream.capture != nullptr) return submit_or_capture(stream, direct(c));
  const bool staged = is_pageable(c.from);
  if (const cudaError_t e = submit_or_capture(stream, staged ? from_staging(c) : direct(c)))
    return e;
  if (is_pageable(c.to)) wait_for(stream);
  return cudaSuccess;
}

cudaError_t fill(void* to, int value, size_t bytes, Stream& stream) {
  if (bytes == 0) return cudaSuccess;
  if (!is_operand(to, bytes)) return cudaErrorInvalidValue;
  if (is_pageable(to)) {
    say("fill of %zu bytes at %p: it is pageable host memory", bytes, to);
    return cudaErrorInvalidValue;
  }
  count(Counter::kFills);
  return submit_or_capture(stream, [=] { std::memset(reachable(to), value, bytes); });
}

cudaError_t copy_batch(void* const* to, const void* const* from, const size_t* bytes,
                       size_t num_copies, const cudaMemcpyAttributes* attributes,
                       const size_t* first_of_attributes, size_t num_attributes, Stream& stream) {
  if (stream.is_null()) return cudaErrorInvalidValue;
  if (const cudaError_t error = refuse_if_capturing(stream)) return error;
  if (num_copies == 0 || num_attributes == 0 || num_attributes > num_copies)
    return cudaErrorInvalidValue;
  for (size_t i = 0; i < num_attributes; ++i) {
    const bool in_order =
        i == 0 ? first_of_attributes[0] == 0 : first_of_attributes[i] > first_of_attributes[i - 1];
    const int access = attributes[i].srcAccessOrder;
    const bool known =
        access >= cudaMemcpySrcAccessOrderStream && access <= cudaMemcpySrcAccessOrderAny;
    if (!in_order || first_of_attributes[i] >= num_copies || !known) return cudaErrorInvalidValue;
  }
  if (settings().batches_fail) return cudaErrorInvalidValue;
  if (settings().batches_crash) return cudaErrorUnknown;
  for (size_t i = 0; i < num_copies; ++i) {
    if (has_bad_operand(to[i], from[i], bytes[i])) return cudaErrorInvalidValue;
  }
  count(Counter::kBatches);
  count(Counter::kBatchedCopies, long(num_copies));
  std::vector<Work> copies;
  bool to_pageable = false;
  for (size_t i = 0, a = 0; i < num_copies; ++i) {
    while (a + 1 < num_attributes && first_of_attributes[a + 1] <= i) ++a;
    const CopyShape c{to[i], from[i], bytes[i]};
    const int access = attributes[a].srcAccessOrder;
    const bool at_once = access == cudaMemcpySrcAccessOrderDuringApiCall && is_pageable(from[i]);
    // With this order, the source may be read either during the call, before earlier work in the
    // stream, or when the copy runs.
    const bool early =
        access == cudaMemcpySrcAccessOrderAny && !is_device(from[i]) && random_below(2) == 0;
    copies.push_back(at_once || early ? from_staging(c) : direct(c));
    to_pageable = to_pageable || is_pageable(to[i]);
    if (is_pageable(from[i]) || is_pageable(to[i])) count(Counter::kPageableCopies);
  }
  // The copies in a batch run in no particular order.
  for (size_t i = num_copies - 1; i > 0; --i) std::swap(copies[i], copies[random_below(i + 1)]);
  submit(stream, [copies = std::move(copies)] {
    for (const Work& one : copies) one();
  });
  if (to_pageable) wait_for(stream);
  return cudaSuccess;
}

}  // namespace kvcache::gpuless
