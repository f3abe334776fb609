#include "ops/slot_mapping.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define KV_X86
#include <immintrin.h>
#endif

namespace kvcache {
namespace {

// Compiles a function twice, with and without AVX2; the loader chooses by the processor. With AVX2,
// table look-ups become gathers.
#ifdef KV_X86
#define KV_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KV_VECTOR_CLONES
#endif

// Whether any of these tokens cannot be served. No early exit, so that the loop is vectorized.
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

// Whether any of these tokens lies beyond the entries of its row. Their rows are valid.
KV_VECTOR_CLONES bool any_behind(const int32_t* counts, int64_t tokens_per_column,
                                 const int32_t* rows, const int64_t* positions, int64_t n) {
  int64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = rows[i] < 0 ? 0 : rows[i];
    bad |= (rows[i] >= 0) & (positions[i] >= counts[row] * tokens_per_column);
  }
  return bad != 0;
}

// Writes the slots of tokens [begin, end) in a group that is not sharded, for tokens in any order.
template <class Slot>
void map_scattered(const int32_t* table, const TableGroupView& group, const int32_t* rows,
                   const int64_t* positions, int64_t begin, int64_t end, Slot* out) {
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = rows[i];
    out[i] = static_cast<Slot>(
        row < 0 ? kNoSlot
                : group.slot(table + row * group.num_columns, static_cast<uint32_t>(positions[i])));
  }
}

#ifdef KV_X86
// The same, four tokens at a time; returns where it stopped. All factors are below 2^32 and all
// products below 2^63. A dummy request (all ones in `dummy`) reads the table's first entry and
// ignores it. benchmarks/tables.py compares this with the scalar loop.
__attribute__((target("avx2"))) int64_t map_scattered_avx2(const int32_t* table,
                                                           const TableGroupView& group,
                                                           const int32_t* rows,
                                                           const int64_t* positions, int64_t n,
                                                           int64_t* out) {
  const __m256i magic = _mm256_set1_epi64x(group.by_column.magic);
  const __m128i shift = _mm_cvtsi32_si128(static_cast<int>(group.by_column.shift));
  const __m256i columns = _mm256_set1_epi64x(group.num_columns);
  const __m256i block_size = _mm256_set1_epi64x(group.block_size);
  const __m256i zero = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const __m128i row32 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i));
    const __m256i row = _mm256_cvtepi32_epi64(row32);
    const __m256i dummy = _mm256_cmpgt_epi64(zero, row);
    const __m256i given = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(positions + i));
    const __m256i position = _mm256_andnot_si256(dummy, given);
    const __m256i column = _mm256_srl_epi64(_mm256_mul_epu32(position, magic), shift);
    const __m256i start = _mm256_mul_epu32(_mm256_andnot_si256(dummy, row), columns);
    const __m128i ids = _mm256_i64gather_epi32(table, _mm256_add_epi64(start, column), 4);
    const __m256i block = _mm256_cvtepi32_epi64(ids);
    const __m256i offset = _mm256_sub_epi64(position, _mm256_mul_epu32(column, block_size));
    const __m256i slot = _mm256_add_epi64(_mm256_mul_epi32(block, block_size), offset);
    const __m256i none = _mm256_or_si256(dummy, _mm256_cmpgt_epi64(zero, block));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i), _mm256_or_si256(slot, none));
  }
  return i;
}
#endif

int64_t map_some_fast(const int32_t* table, const TableGroupView& group, const int32_t* rows,
                      const int64_t* positions, int64_t n, void* out, bool wide) {
#ifdef KV_X86
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
  if (has_avx2 && wide) {
    return map_scattered_avx2(table, group, rows, positions, n, static_cast<int64_t*>(out));
  }
#endif
  return 0;
}

// Tokens [first, first + length): one row, consecutive positions.
struct TokenRun {
  int64_t first, length;
};

// The same for runs of tokens, as prefills have them, one block at a time.
template <class Slot>
KV_VECTOR_CLONES void map_run(const int32_t* ids, const TableGroupView& group, int64_t position,
                              int64_t length, Slot* out) {
  uint32_t column = group.by_column.divide(static_cast<uint32_t>(position));
  int64_t offset = position - int64_t{column} * group.block_size;
  for (; length > 0; ++column, offset = 0) {
    const int64_t n = std::min(length, group.block_size - offset);
    const int64_t block = ids[column];
    const int64_t first = block * group.block_size + offset;
    if (block >= 0) {
      for (int64_t k = 0; k < n; ++k) out[k] = static_cast<Slot>(first + k);
    } else {
      std::fill(out, out + n, static_cast<Slot>(kNoSlot));
    }
    out += n;
    length -= n;
  }
}

// Sets breaks[i] where token i does not follow token i - 1, and returns how many there are. The
// loop is vectorized.
KV_VECTOR_CLONES int64_t find_breaks(const int32_t* rows, const int64_t* positions, int64_t n,
                                     uint8_t* breaks) {
  int64_t count = 0;
  for (int64_t i = 1; i < n; ++i) {
    const bool follows = (rows[i] == rows[i - 1]) & (positions[i] == positions[i - 1] + 1);
    breaks[i] = !follows;
    count += !follows;
  }
  return count;
}

// The runs of the tokens; empty where they are too short to be worth it (a decode step).
std::vector<TokenRun> runs_of(const int32_t* rows, const int64_t* positions, int64_t n) {
  constexpr int64_t kWorthwhile = 8;  // tokens per run, on average
  std::vector<TokenRun> runs;
  if (n < kWorthwhile) return runs;
  static thread_local std::vector<uint8_t> breaks;
  breaks.resize(static_cast<size_t>(n));
  const int64_t num_runs = find_breaks(rows, positions, n, breaks.data()) + 1;
  if (num_runs * kWorthwhile > n) return runs;
  runs.reserve(static_cast<size_t>(num_runs));
  for (int64_t first = 0; first < n;) {
    const void* next = first + 1 < n ? std::memchr(breaks.data() + first + 1, 1,
                                                   static_cast<size_t>(n - first - 1))
                                     : nullptr;
    const int64_t end = next == nullptr ? n : static_cast<const uint8_t*>(next) - breaks.data();
    runs.push_back({first, end - first});
    first = end;
  }
  return runs;
}

bool any_bad(const SlotMapping& m, const int32_t* rows, const std::vector<TokenRun>& runs) {
  if (any_bad(rows, m.positions, m.num_tokens, m.groups.num_rows, m.groups.num_positions)) {
    return true;
  }
  for (int g = 0; g < m.groups.num_groups && m.counts != nullptr; ++g) {
    const TableGroupView& group = m.groups.group[g];
    const int32_t* counts = m.counts + int64_t{group.counts_row} * m.groups.num_rows;
    const int64_t tokens = group.by_column.divisor;
    if (runs.empty()) {
      if (any_behind(counts, tokens, rows, m.positions, m.num_tokens)) return true;
      continue;
    }
    for (const TokenRun& run : runs) {  // the last token of a run has the highest position
      const int64_t last = run.first + run.length - 1;
      if (any_behind(counts, tokens, rows + last, m.positions + last, 1)) return true;
    }
  }
  return false;
}

template <class Slot>
void run(const SlotMapping& m, const int32_t* rows, const std::vector<TokenRun>& runs) {
  for (int g = 0; g < m.groups.num_groups; ++g) {
    const TableGroupView& group = m.groups.group[g];
    const int32_t* table = m.tables + group.offset;
    Slot* out = static_cast<Slot*>(m.out) + g * m.num_out;
    const bool sharded = group.by_world.divisor > 1;
    if (sharded || runs.empty()) {
      const int64_t done = sharded ? 0
                                   : map_some_fast(table, group, rows, m.positions, m.num_tokens,
                                                   out, sizeof(Slot) == 8);
      map_scattered(table, group, rows, m.positions, done, m.num_tokens, out);
    } else {
      for (const TokenRun& tokens : runs) {
        const int32_t row = rows[tokens.first];
        Slot* place = out + tokens.first;
        if (row < 0) {
          std::fill(place, place + tokens.length, static_cast<Slot>(kNoSlot));
        } else {
          map_run(table + int64_t{row} * group.num_columns, group, m.positions[tokens.first],
                  tokens.length, place);
        }
      }
    }
    std::fill(out + m.num_tokens, out + m.num_out, static_cast<Slot>(kNoSlot));
  }
}

// Expands rows that were given per request to one row per token.
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
  // All tokens are checked before the first write, and before parallel_for, which would drop the
  // message.
  const std::vector<TokenRun> runs = runs_of(token_rows, m.positions, m.num_tokens);
  if (any_bad(m, token_rows, runs)) {
    for (int64_t i = 0; i < m.num_tokens; ++i) {
      if (m.bad_row(token_rows[i]) || m.bad_position(token_rows[i], i)) {
        fail_slot_mapping(m, i, token_rows[i], m.positions[i]);
      }
    }
  }
  m.wide ? run<int64_t>(m, token_rows, runs) : run<int32_t>(m, token_rows, runs);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) { m.impl("slot_mapping", TORCH_BOX(&slot_mapping)); }

}  // namespace kvcache
