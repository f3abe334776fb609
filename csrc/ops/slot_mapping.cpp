#include "ops/slot_mapping.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

namespace kvcache {
namespace {

constexpr int64_t kGrain = 16384;  // tokens per thread: below it a second thread costs more

// Two versions of a loop, the one with AVX2 chosen when the library is loaded on a machine that has
// it: table look-ups become gathers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define KV_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KV_VECTOR_CLONES
#endif

// Whether any of these tokens cannot be served. No early exit: the loop is one of vectors.
KV_VECTOR_CLONES bool any_bad(const int32_t* rows, const int64_t* positions, int64_t n,
                              int32_t num_rows, int64_t num_positions) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = rows[i];
    const bool outside = positions[i] < 0 || positions[i] >= num_positions;
    bad |= (row < -1) | (row >= num_rows) | ((row >= 0) & outside);
  }
  return bad != 0;
}

// Whether any of these tokens, whose rows are good, lies behind the entries of its row.
KV_VECTOR_CLONES bool any_behind(const int32_t* counts, int64_t tokens_per_column,
                                 const int32_t* rows, const int64_t* positions, int64_t n) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = rows[i] < 0 ? 0 : rows[i];
    bad |= (rows[i] >= 0) & (positions[i] >= counts[row] * tokens_per_column);
  }
  return bad != 0;
}

bool any_bad(const SlotMapping& m, const int32_t* rows) {
  if (any_bad(rows, m.positions, m.num_tokens, m.groups.num_rows, m.groups.num_positions)) {
    return true;
  }
  for (int g = 0; g < m.groups.num_groups && m.counts != nullptr; ++g) {
    const TableGroupView& group = m.groups.group[g];
    const int32_t* counts = m.counts + int64_t{group.counts_row} * m.groups.num_rows;
    if (any_behind(counts, group.by_column.divisor, rows, m.positions, m.num_tokens)) return true;
  }
  return false;
}

// Slots of tokens begin to end - 1 in a group that is not sharded.
template <class Slot>
KV_VECTOR_CLONES void map_whole(const int32_t* table, const TableGroupView& group,
                                const int32_t* rows, const int64_t* positions, int64_t begin,
                                int64_t end, Slot* out) {
  const uint32_t magic = group.by_column.magic, shift = group.by_column.shift;
  const int64_t columns = group.num_columns, block_size = group.block_size;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = rows[i];
    // A dummy request reads entry 0 of the table, and drops what it read.
    const auto position = static_cast<uint32_t>(row < 0 ? 0 : positions[i]);
    const auto column = static_cast<uint32_t>((uint64_t{position} * magic) >> shift);
    const int64_t block = table[(row < 0 ? 0 : row) * columns + column];
    const int64_t slot = block * block_size + (position - int64_t{column} * block_size);
    out[i] = static_cast<Slot>(row < 0 || block < 0 ? kNoSlot : slot);
  }
}

template <class Slot>
void map_sharded(const int32_t* table, const TableGroupView& group, const int32_t* rows,
                 const int64_t* positions, int64_t begin, int64_t end, Slot* out) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = rows[i];
    out[i] = static_cast<Slot>(
        row < 0 ? kNoSlot
                : group.slot(table + row * group.num_columns, static_cast<uint32_t>(positions[i])));
  }
}

template <class Slot>
void run(const SlotMapping& m, const int32_t* rows) {
  for (int g = 0; g < m.groups.num_groups; ++g) {
    const TableGroupView& group = m.groups.group[g];
    const int32_t* table = m.tables + group.offset;
    Slot* out = static_cast<Slot*>(m.out) + g * m.num_out;
    const auto map = group.by_world.divisor > 1 ? map_sharded<Slot> : map_whole<Slot>;
    if (m.num_tokens <= kGrain) {
      map(table, group, rows, m.positions, 0, m.num_tokens, out);
    } else {
      torch::stable::parallel_for(0, m.num_tokens, kGrain, [&](int64_t begin, int64_t end) {
        map(table, group, rows, m.positions, begin, end, out);
      });
    }
    std::fill(out + m.num_tokens, out + m.num_out, static_cast<Slot>(kNoSlot));
  }
}

// The row of every token, where it was given per request.
std::vector<int32_t> rows_of_tokens(const SlotMapping& m) {
  const BadQueryStart bad{m.query_start, m.num_tokens};
  for (int64_t r = 0; r <= m.num_requests; ++r) {
    if (bad(r)) fail_query_start(r, m.num_tokens);
  }
  std::vector<int32_t> rows(static_cast<size_t>(m.num_tokens), -1);
  for (int64_t r = 0; r < m.num_requests; ++r) {
    std::fill(rows.begin() + m.query_start[r], rows.begin() + m.query_start[r + 1], m.rows[r]);
  }
  return rows;
}

void slot_mapping(Tensor tables, Tensor groups, int64_t num_rows, Tensor rows,
                  std::optional<Tensor> query_start_loc, Tensor positions,
                  std::optional<Tensor> num_blocks_per_row, Tensor out) {
  const SlotMapping m = checked_slot_mapping(tables, groups, num_rows, rows, query_start_loc,
                                             positions, num_blocks_per_row, out);
  std::vector<int32_t> expanded;
  if (m.query_start != nullptr) expanded = rows_of_tokens(m);
  const int32_t* token_rows = m.query_start != nullptr ? expanded.data() : m.rows;
  // All of them before the first write; also before parallel_for, which would lose the message.
  if (any_bad(m, token_rows)) {
    for (int64_t i = 0; i < m.num_tokens; ++i) {
      if (m.bad_row(token_rows[i]) || m.bad_position(token_rows[i], i)) {
        fail_slot_mapping(m, i, token_rows[i], m.positions[i]);
      }
    }
  }
  m.wide ? run<int64_t>(m, token_rows) : run<int32_t>(m, token_rows);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) { m.impl("slot_mapping", TORCH_BOX(&slot_mapping)); }

}  // namespace kvcache
