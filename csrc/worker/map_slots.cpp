// SPDX-License-Identifier: Apache-2.0
#include "worker/map_slots.h"

#include <algorithm>
#include <cstring>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define KV_X86
#include <immintrin.h>
#endif

namespace kvcache {
namespace {

// Compiles a function twice, with and without AVX2. The dynamic loader selects the version that the
// CPU supports. It does so before ThreadSanitizer, which would instrument the selection, is ready.
#if defined(KV_X86) && !defined(__SANITIZE_THREAD__)
#define KV_VECTOR_CLONES __attribute__((target_clones("avx2", "default")))
#else
#define KV_VECTOR_CLONES
#endif

bool has_avx2() {
#ifdef KV_X86
  static const bool has = __builtin_cpu_supports("avx2");
  return has;
#else
  return false;
#endif
}

// Returns whether any of these tokens is invalid, regardless of its row's content. Has no early
// exit, so that the loop is vectorized.
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

// Tokens in any order -------------------------------------------------------------------------

// For each token: its column, its offset within the column, and the index of its entry in the
// group's table. For a dummy request, the index is 0, and the column and offset are arbitrary.
// Indices are used only for tables with fewer than 2^31 entries.
struct Places {
  int32_t* columns;
  int32_t* offsets;
  int32_t* indices;
};

#ifdef KV_X86
__attribute__((target("avx2"))) inline void store_eight(int32_t* to, __m256i values) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), values);
}

// Computes the places of eight tokens at a time, and returns the index at which it stopped.
__attribute__((target("avx2"))) int64_t find_places_avx2(const int32_t* rows,
                                                         const int64_t* positions, int64_t n,
                                                         int32_t num_rows, int64_t num_positions,
                                                         FastDivisor by_column,
                                                         uint32_t num_columns, const Places& out,
                                                         bool* any_bad) {
  if (num_positions > INT32_MAX) return 0;
  const auto all = [](uint32_t value) { return static_cast<int32_t>(value); };
  const __m256i magic = _mm256_set1_epi64x(by_column.magic);
  const __m128i shift = _mm_cvtsi32_si128(all(by_column.shift));
  const __m256i divisor = _mm256_set1_epi32(all(by_column.divisor));
  const __m256i width = _mm256_set1_epi32(all(num_columns));
  const __m256i last_row = _mm256_set1_epi32(num_rows - 1), none = _mm256_set1_epi32(-1);
  const __m256i stop = _mm256_set1_epi32(static_cast<int32_t>(num_positions));
  __m256i bad = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i));
    const auto* const wide = reinterpret_cast<const __m256*>(positions + i);
    const __m256 first = _mm256_loadu_ps(reinterpret_cast<const float*>(wide));
    const __m256 second = _mm256_loadu_ps(reinterpret_cast<const float*>(wide + 1));
    // The low and the high halves of the positions, in the order of the positions.
    const __m256i low =
        _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0x88)), 0xD8);
    const __m256i high =
        _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(first, second, 0xDD)), 0xD8);
    const __m256i live = _mm256_cmpgt_epi32(row, none);
    const __m256i below = _mm256_and_si256(_mm256_cmpgt_epi32(stop, low),
                                           _mm256_cmpeq_epi32(high, _mm256_setzero_si256()));
    const __m256i inside = _mm256_and_si256(below, _mm256_cmpgt_epi32(low, none));
    const __m256i no_row =
        _mm256_or_si256(_mm256_cmpgt_epi32(row, last_row), _mm256_cmpgt_epi32(none, row));
    bad = _mm256_or_si256(bad, _mm256_or_si256(no_row, _mm256_andnot_si256(inside, live)));
    // 64-bit products exist only for every other lane.
    const __m256i even = _mm256_srl_epi64(_mm256_mul_epu32(low, magic), shift);
    const __m256i odd =
        _mm256_srl_epi64(_mm256_mul_epu32(_mm256_srli_epi64(low, 32), magic), shift);
    const __m256i column = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    const __m256i index = _mm256_add_epi32(_mm256_mullo_epi32(row, width), column);
    store_eight(out.columns + i, column);
    store_eight(out.offsets + i, _mm256_sub_epi32(low, _mm256_mullo_epi32(column, divisor)));
    store_eight(out.indices + i, _mm256_and_si256(live, index));
  }
  *any_bad = _mm256_testz_si256(bad, bad) == 0;
  return i;
}
#endif

// Computes the places of tokens, and returns the result of `any_bad`. A single loop does both, so
// that rows and positions are read only once.
bool find_places(const int32_t* rows, const int64_t* positions, int64_t n, int32_t num_rows,
                 int64_t num_positions, FastDivisor by_column, uint32_t num_columns,
                 const Places& out) {
  int64_t i = 0;
  bool any_bad = false;
#ifdef KV_X86
  if (has_avx2()) {
    i = find_places_avx2(rows, positions, n, num_rows, num_positions, by_column, num_columns, out,
                         &any_bad);
  }
#endif
  int32_t bad = any_bad;
  for (; i < n; ++i) {
    const int32_t row = rows[i];
    const auto wide = static_cast<uint64_t>(positions[i]);
    const int32_t outside = wide >= static_cast<uint64_t>(num_positions);
    bad |= (row < -1) | (row >= num_rows) | ((row >= 0) & outside);
    const auto position = static_cast<uint32_t>(wide);
    const uint32_t column = by_column.divide(position);
    out.columns[i] = static_cast<int32_t>(column);
    out.offsets[i] = static_cast<int32_t>(position - column * by_column.divisor);
    const uint32_t index = static_cast<uint32_t>(row) * num_columns + column;
    out.indices[i] = row < 0 ? 0 : static_cast<int32_t>(index);
  }
  return bad != 0;
}

// The places in all groups. They are computed once per row shape (number of columns and tokens per
// column).
class PlacesByGroup {
 public:
  PlacesByGroup(const SlotMapping& m, const int32_t* rows) {
    static thread_local std::vector<int32_t> memory;
    const auto n = static_cast<size_t>(m.num_tokens);
    memory.resize(3 * n * static_cast<size_t>(m.groups.num_groups));
    for (int g = 0; g < m.groups.num_groups; ++g) {
      const TableGroupView& group = m.groups.group[g];
      int same = 0;
      while (!have_equal_rows(m.groups.group[same], group)) ++same;
      int32_t* columns = memory.data() + 3 * n * static_cast<size_t>(same);
      places_[g] = {columns, columns + n, columns + 2 * n};
      if (same != g) continue;
      any_bad_ =
          find_places(rows, m.positions, m.num_tokens, m.groups.num_rows, m.groups.num_positions,
                      group.by_column, static_cast<uint32_t>(group.num_columns), places_[g]);
    }
  }
  // Returns whether any token is invalid, regardless of its row's content.
  bool any_bad() const { return any_bad_; }
  const Places& operator[](int g) const { return places_[g]; }

 private:
  static bool have_equal_rows(const TableGroupView& a, const TableGroupView& b) {
    return a.num_columns == b.num_columns && a.by_column.divisor == b.by_column.divisor;
  }

  bool any_bad_ = false;
  Places places_[kMaxTables];
};

#ifdef KV_X86
// The following functions process several tokens at a time, and return the index at which they
// stopped. benchmarks/tables.py compares their speed with that of an engine's plain loop.

// Returns the numbers of entries in the rows of eight tokens, with 0 for dummy requests. Uses a
// single load if the rows are consecutive, as in most decode steps.
__attribute__((target("avx2"))) inline __m256i counts_of_eight(const int32_t* counts, __m256i rows,
                                                               __m256i live) {
  const int32_t first = _mm256_extract_epi32(rows, 0);
  const __m256i following =
      _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  if (first >= 0 && _mm256_movemask_epi8(_mm256_cmpeq_epi32(rows, following)) == -1) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(counts + first));
  }
  return _mm256_mask_i32gather_epi32(_mm256_setzero_si256(), counts, rows, live, 4);
}

__attribute__((target("avx2"))) int64_t find_behind_avx2(const int32_t* counts, const int32_t* rows,
                                                         const int32_t* columns, int64_t n,
                                                         bool* found) {
  const __m256i none = _mm256_set1_epi32(-1);
  __m256i behind = _mm256_setzero_si256();
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256i row = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows + i));
    const __m256i column = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(columns + i));
    const __m256i live = _mm256_cmpgt_epi32(row, none);
    const __m256i count = counts_of_eight(counts, row, live);
    behind = _mm256_or_si256(behind, _mm256_andnot_si256(_mm256_cmpgt_epi32(count, column), live));
  }
  *found = _mm256_testz_si256(behind, behind) == 0;
  return i;
}

// Returns the slots of four tokens. The slot of each token for which `without` is set is -1,
// regardless of its offset.
__attribute__((target("avx2"))) inline __m256i slots_of_four(__m128i blocks, __m128i offsets,
                                                             __m128i without, __m256i block_size) {
  const __m256i first = _mm256_mul_epi32(_mm256_cvtepi32_epi64(blocks), block_size);
  const __m256i slot = _mm256_add_epi64(first, _mm256_cvtepi32_epi64(offsets));
  return _mm256_or_si256(slot, _mm256_cvtepi32_epi64(without));
}

// The table must have at least one entry and fewer than 2^31 entries. Entries are read one by one,
// because a gather instruction is slower if most entries are not in the L1 cache (AMD Zen 3).
__attribute__((target("avx2"))) int64_t map_avx2(const int32_t* table, const TableGroupView& group,
                                                 const int32_t* rows, const Places& places,
                                                 int64_t n, int64_t* out) {
  const __m256i block_size = _mm256_set1_epi64x(group.block_size);
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) {
    const int32_t* at = places.indices + i;
    const __m128i block = _mm_setr_epi32(table[at[0]], table[at[1]], table[at[2]], table[at[3]]);
    const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i));
    const __m128i offset = _mm_loadu_si128(reinterpret_cast<const __m128i*>(places.offsets + i));
    // Tokens in dummy requests, and tokens whose entry is not a block id, have no slot.
    const __m128i without = _mm_srai_epi32(_mm_or_si128(block, row), 31);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i),
                        slots_of_four(block, offset, without, block_size));
  }
  return i;
}
#endif

// Returns whether any of these tokens lies beyond its row's entries.
bool any_behind(const int32_t* counts, const int32_t* rows, const int32_t* columns, int64_t n) {
  int64_t i = 0;
  bool found = false;
#ifdef KV_X86
  if (has_avx2()) i = find_behind_avx2(counts, rows, columns, n, &found);
#endif
  for (; i < n; ++i) found |= rows[i] >= 0 && columns[i] >= counts[rows[i]];
  return found;
}

template <class Slot>
void map_scattered(const SlotMapping& m, int g, const int32_t* rows, const Places& places,
                   Slot* out) {
  const TableGroupView& group = m.groups.group[g];
  const int32_t* table = m.tables + group.offset;
  int64_t i = 0;
#ifdef KV_X86
  if constexpr (sizeof(Slot) == sizeof(int64_t)) {
    const int64_t num_entries = int64_t{m.groups.num_rows} * group.num_columns;
    if (num_entries > 0 && num_entries <= INT32_MAX && has_avx2())
      i = map_avx2(table, group, rows, places, m.num_tokens, out);
  }
#endif
  for (; i < m.num_tokens; ++i) {
    const int64_t row = rows[i];
    const int64_t block = row < 0 ? -1 : table[row * group.num_columns + places.columns[i]];
    out[i] = static_cast<Slot>(block < 0 ? kNoSlot : block * group.block_size + places.offsets[i]);
  }
}

template <class Slot>
void map_sharded(const SlotMapping& m, int g, const int32_t* rows, Slot* out) {
  for (int64_t i = 0; i < m.num_tokens; ++i) {
    out[i] = static_cast<Slot>(rows[i] < 0 ? kNoSlot : m.slot(g, rows[i], m.positions[i]));
  }
}

// Runs of tokens ------------------------------------------------------------------------------

// Tokens [first, first + length) in one row, with consecutive positions.
struct TokenRun {
  int64_t first, length;
};

// Writes the slots of a run block by block.
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

// For each token i in [begin, end), sets breaks[i] if the token does not follow token i - 1.
// Returns the number of breaks. The loop is vectorized.
KV_VECTOR_CLONES int64_t find_breaks(const int32_t* rows, const int64_t* positions, int64_t begin,
                                     int64_t end, uint8_t* breaks) {
  int64_t count = 0;
  for (int64_t i = std::max<int64_t>(begin, 1); i < end; ++i) {
    const bool follows = (rows[i] == rows[i - 1]) & (positions[i] == positions[i - 1] + 1);
    breaks[i] = !follows;
    count += !follows;
  }
  return count;
}

// Divides the tokens into runs. Returns nothing if the runs are too short to pay off, as in a
// decode step.
std::vector<TokenRun> runs_of(const int32_t* rows, const int64_t* positions, int64_t n) {
  constexpr int64_t kWorthwhile = 8;  // minimum mean number of tokens per run
  // Tokens are checked in portions of this size, so that a decode step is recognized after its
  // first tokens.
  constexpr int64_t kAtATime = 256;
  std::vector<TokenRun> runs;
  if (n < kWorthwhile) return runs;
  static thread_local std::vector<uint8_t> breaks;
  breaks.resize(static_cast<size_t>(n));
  int64_t num_runs = 1;
  for (int64_t i = 0; i < n; i += kAtATime) {
    num_runs += find_breaks(rows, positions, i, std::min(i + kAtATime, n), breaks.data());
    if (num_runs * kWorthwhile > n) return runs;
  }
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

bool any_run_behind(const SlotMapping& m, int g, const int32_t* rows,
                    const std::vector<TokenRun>& runs) {
  return std::any_of(runs.begin(), runs.end(), [&](const TokenRun& run) {
    const int64_t last = run.first + run.length - 1;  // highest position of the run
    return rows[last] >= 0 && m.positions[last] >= m.num_held(g, rows[last]);
  });
}

template <class Slot>
void map_runs(const SlotMapping& m, int g, const int32_t* rows, const std::vector<TokenRun>& runs,
              Slot* out) {
  const TableGroupView& group = m.groups.group[g];
  const int32_t* table = m.tables + group.offset;
  for (const TokenRun& run : runs) {
    const int64_t row = rows[run.first];
    Slot* place = out + run.first;
    if (row < 0) {
      std::fill(place, place + run.length, static_cast<Slot>(kNoSlot));
    } else {
      map_run(table + row * group.num_columns, group, m.positions[run.first], run.length, place);
    }
  }
}

// ---------------------------------------------------------------------------------------------

template <class Slot>
void fill_tails(const SlotMapping& m, const int64_t* fill_to) {
  for (int g = 0; g < m.groups.num_groups; ++g) {
    Slot* out = static_cast<Slot*>(m.out) + g * m.num_out;
    const int64_t end = fill_to == nullptr ? m.num_out : fill_to[g];
    if (end > m.num_tokens) std::fill(out + m.num_tokens, out + end, static_cast<Slot>(kNoSlot));
  }
}

template <class Slot>
void map_groups(const SlotMapping& m, const int32_t* rows, const PlacesByGroup* places,
                const std::vector<TokenRun>& runs) {
  for (int g = 0; g < m.groups.num_groups; ++g) {
    Slot* out = static_cast<Slot*>(m.out) + g * m.num_out;
    if (m.groups.group[g].by_world.divisor > 1) {
      map_sharded(m, g, rows, out);
    } else if (places == nullptr) {
      map_runs(m, g, rows, runs, out);
    } else {
      map_scattered(m, g, rows, (*places)[g], out);
    }
  }
}

// Expands rows that are given per request to one row per token.
const int32_t* rows_of_tokens(const SlotMapping& m) {
  static thread_local std::vector<int32_t> rows;
  rows.assign(static_cast<size_t>(m.num_tokens), -1);
  for (int64_t r = 0; r < m.num_requests; ++r) {
    std::fill(rows.begin() + m.query_start[r], rows.begin() + m.query_start[r + 1], m.rows[r]);
  }
  return rows.data();
}

std::string first_wrong(const SlotMapping& m, const int32_t* rows) {
  int64_t i = 0;
  while (!m.bad_row(rows[i]) && !m.bad_position(rows[i], i)) ++i;
  return wrong_token(m, i, rows[i], m.positions[i]);
}

}  // namespace

std::optional<std::string> map_slots(const SlotMapping& m, const int64_t* fill_to) {
  const int32_t* rows = m.rows;
  if (m.query_start != nullptr) {
    const BadQueryStart bad{m.query_start, m.num_tokens};
    for (int64_t r = 0; r <= m.num_requests; ++r) {
      if (bad(r)) return wrong_query_start(r, m.num_tokens);
    }
    rows = rows_of_tokens(m);
  }
  const std::vector<TokenRun> runs = runs_of(rows, m.positions, m.num_tokens);
  std::optional<PlacesByGroup> places;
  if (runs.empty() && m.groups.num_groups > 0) places.emplace(m, rows);
  if (places
          ? places->any_bad()
          : any_bad(rows, m.positions, m.num_tokens, m.groups.num_rows, m.groups.num_positions)) {
    return first_wrong(m, rows);
  }
  for (int g = 0; g < m.groups.num_groups && m.counts != nullptr; ++g) {
    const int32_t* counts = m.counts + int64_t{m.groups.group[g].counts_row} * m.groups.num_rows;
    const bool behind = places ? any_behind(counts, rows, (*places)[g].columns, m.num_tokens)
                               : any_run_behind(m, g, rows, runs);
    if (behind) return first_wrong(m, rows);
  }
  const PlacesByGroup* known = places ? &*places : nullptr;
  if (m.wide) {
    map_groups<int64_t>(m, rows, known, runs);
    fill_tails<int64_t>(m, fill_to);
  } else {
    map_groups<int32_t>(m, rows, known, runs);
    fill_tails<int32_t>(m, fill_to);
  }
  return std::nullopt;
}

}  // namespace kvcache
