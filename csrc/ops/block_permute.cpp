// SPDX-License-Identifier: Apache-2.0
#include "ops/block_permute.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <cstring>
#include <memory>

#include "ops/parallel.h"

namespace kvcache {
namespace {

// The minimum number of bytes per thread, below which an additional thread does not pay off.
constexpr int64_t kPermuteGrainBytes = 1 << 18;
constexpr int64_t kScratchBytes = 1 << 18;  // per thread; fits in L2 together with the unit
constexpr int64_t kLeastSliceBytes = 64;    // one cache line

char* scratch() {
  thread_local const std::unique_ptr<char[]> memory(new char[kScratchBytes + 64]);
  return memory.get() + (-reinterpret_cast<uintptr_t>(memory.get()) & 63);
}

// Copies a row of `kBytes`, or of `bytes` if kBytes is 0 (unknown at compile time).
template <int64_t kBytes>
void copy_row(char* to, const char* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(kBytes > 0 ? kBytes : bytes));
}

// Calls f(first row, number of rows, offset of the first row) for each range of evenly spaced rows
// in the unit.
template <class F>
void for_each_stretch(const BlockPermute& p, const PermuteUnit& unit, const int32_t* ids, F&& f) {
  const uint32_t length = p.is_dense() ? p.block_rows.divisor : p.inner_rows.divisor;
  for (uint32_t r = 0; r < p.unit_rows;) {
    const uint32_t left = length - (unit.first_row + r) % length;
    const uint32_t n = std::min(left, p.unit_rows - r);
    f(r, n, p.place(unit, ids, r));
    r += n;
  }
}

// Prefetches a unit's rows into the L2 cache, one row per call.
class Prefetch {
 public:
  Prefetch(const BlockPermute& p, const char* layer, const PermuteUnit& unit, const int32_t* ids)
      : p_(p), layer_(layer), unit_(unit), ids_(ids) {}

  void next_row() {
    if (num_left_ == 0) {
      const uint32_t length = p_.is_dense() ? p_.block_rows.divisor : p_.inner_rows.divisor;
      num_left_ = length - (unit_.first_row + row_) % length;
      at_ = layer_ + p_.place(unit_, ids_, row_);
    }
    for (int64_t i = 0; i < p_.row_bytes; i += kLeastSliceBytes) __builtin_prefetch(at_ + i, 1, 2);
    at_ += p_.inner_stride;
    --num_left_;
    ++row_;
  }

 private:
  const BlockPermute& p_;
  const char* layer_;
  PermuteUnit unit_;
  const int32_t* ids_;
  uint32_t row_ = 0, num_left_ = 0;
  const char* at_ = nullptr;
};

// Permutes the unit through the thread's scratch memory, `slice` bytes of each row at a time. At
// the same time, prefetches the next unit, if any, because blocks are scattered and the CPU's own
// prefetcher cannot predict where the next unit starts.
template <int64_t kBytes>
void permute_unit(const BlockPermute& p, char* layer, const PermuteUnit& unit, const int32_t* ids,
                  int64_t slice, Prefetch* following) {
  char* const held = scratch();
  for (int64_t first = 0; first < p.row_bytes; first += slice) {
    const int64_t bytes = std::min(slice, p.row_bytes - first);
    char* const base = layer + first;
    for_each_stretch(p, unit, ids, [&](uint32_t r, uint32_t n, int64_t place) {
      if (bytes == p.inner_stride) {
        std::memcpy(held + r * bytes, base + place, static_cast<size_t>(n * bytes));
        return;
      }
      for (uint32_t i = 0; i < n; ++i) {
        copy_row<kBytes>(held + (r + i) * bytes, base + place + i * p.inner_stride, bytes);
      }
    });
    for_each_stretch(p, unit, ids, [&](uint32_t r, uint32_t n, int64_t place) {
      for (uint32_t i = 0; i < n; ++i) {
        if (following != nullptr && first == 0) following->next_row();
        copy_row<kBytes>(base + place + i * p.inner_stride, held + p.source(r + i) * bytes, bytes);
      }
    });
  }
}

// Permutes the unit in place along the cycles of the permutation. Used for units with too many rows
// for the scratch memory.
void rotate_unit(const BlockPermute& p, char* layer, const PermuteUnit& unit, const int32_t* ids) {
  char* const held = scratch();
  for (int64_t first = 0; first < p.row_bytes; first += kScratchBytes) {
    const int64_t bytes = std::min(kScratchBytes, p.row_bytes - first);
    const auto row = [&](uint32_t r) { return layer + first + p.place(unit, ids, r); };
    for (uint32_t r = 0; r < p.unit_rows; ++r) {
      if (!p.leads_cycle(r)) continue;
      copy_row<0>(held, row(r), bytes);
      uint32_t to = r;
      for (uint32_t from = p.source(r); from != r; from = p.source(to = from)) {
        copy_row<0>(row(to), row(from), bytes);
      }
      copy_row<0>(row(to), held, bytes);
    }
  }
}

using Permute = void (*)(const BlockPermute&, char*, const PermuteUnit&, const int32_t*, int64_t,
                         Prefetch*);

// Dispatches on the row size, so that the sizes of common models (64 to 256 elements of 1 or 2
// bytes) are compile-time constants.
Permute permute_for(int64_t row_bytes, int64_t slice) {
  if (row_bytes % slice != 0) return permute_unit<0>;
  switch (slice) {
    case 64:
      return permute_unit<64>;
    case 128:
      return permute_unit<128>;
    case 256:
      return permute_unit<256>;
    case 512:
      return permute_unit<512>;
    default:
      return permute_unit<0>;
  }
}

void permute_blocks_(Tensor cache, Tensor offsets, Tensor indices, int64_t remote_block_size,
                     bool remote_is_hnd, Owners owners) {
  const BlockPermute p =
      checked_block_permute(cache, offsets, indices, remote_block_size, remote_is_hnd, owners);
  const int32_t* ids = indices.const_data_ptr<int32_t>();
  check_block_ids(ids, indices.numel(), p.num_blocks);
  const int64_t num_units = p.num_groups * p.units_per_group;
  if (p.is_identity() || p.row_bytes == 0 || num_units == 0) return;
  const int64_t* layers = offsets.const_data_ptr<int64_t>();
  const int64_t fitting = kScratchBytes / p.unit_rows;
  const int64_t slice =
      p.row_bytes <= fitting ? p.row_bytes : fitting / kLeastSliceBytes * kLeastSliceBytes;
  const Permute through_scratch = slice > 0 ? permute_for(p.row_bytes, slice) : nullptr;
  const int64_t grain = std::max<int64_t>(kPermuteGrainBytes / p.unit_bytes(), 1);
  parallel_for(0, offsets.numel() * num_units, grain, [&](int64_t begin, int64_t end) {
    const auto layer_of = [&](int64_t i) { return p.cache + layers[i / num_units]; };
    const auto unit_of = [&](int64_t i) {
      const int64_t u = i % num_units;
      return p.unit(u / p.units_per_group, static_cast<uint32_t>(u % p.units_per_group));
    };
    for (int64_t i = begin; i < end; ++i) {
      if (through_scratch == nullptr) {
        rotate_unit(p, layer_of(i), unit_of(i), ids);
        continue;
      }
      const bool is_last = i + 1 == end;
      Prefetch following(p, layer_of(is_last ? i : i + 1), unit_of(is_last ? i : i + 1), ids);
      through_scratch(p, layer_of(i), unit_of(i), ids, slice, is_last ? nullptr : &following);
    }
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) {
  m.impl("permute_blocks_", TORCH_BOX(&permute_blocks_));
}

}  // namespace kvcache
