// SPDX-License-Identifier: Apache-2.0
// One value per block of a pool, zero until it is set, indexed by block id.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/hash.h"
#include "core/zeroed_array.h"

namespace kvcache {

// With 0 blocks, the array is empty and must not be accessed.
template <class T>
class PerBlock {
 public:
  explicit PerBlock(int64_t num_blocks = 0)
      : values_(num_blocks == 0
                    ? nullptr
                    : std::make_unique<ZeroedArray<T>>(static_cast<size_t>(num_blocks))),
        data_(num_blocks == 0 ? nullptr : values_->data()) {}

  bool empty() const { return data_ == nullptr; }
  T& operator[](BlockId id) { return data_[id]; }
  const T& operator[](BlockId id) const { return data_[id]; }

 private:
  std::unique_ptr<ZeroedArray<T>> values_;
  T* data_;
};

}  // namespace kvcache
