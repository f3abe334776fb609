// SPDX-License-Identifier: Apache-2.0
// Slot mapping as a plain C++ loop, like that of an engine. It processes each group token by token,
// without checks and without padding after the last token.
#include <cstdint>

extern "C" __attribute__((visibility("default"))) void plain_slots(
    const int32_t* tables, int64_t num_groups, int64_t num_rows, int64_t width, const int32_t* rows,
    const int64_t* positions, int64_t n, int64_t block_size, int64_t* slots, int64_t num_slots) {
  for (int64_t g = 0; g < num_groups; ++g) {
    const int32_t* table = tables + g * num_rows * width;
    int64_t* out = slots + g * num_slots;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t position = positions[i];
      const int64_t block = table[rows[i] * width + position / block_size];
      out[i] = block * block_size + position % block_size;
    }
  }
}
