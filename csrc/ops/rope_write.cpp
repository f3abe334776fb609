// SPDX-License-Identifier: Apache-2.0
#include "ops/rope_write.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "ops/cpu_clones.h"
#include "ops/parallel.h"

namespace kvcache {
namespace {

constexpr int64_t kGrainElements = 1 << 15;  // minimum elements per thread

// A row of `n` numbers, followed by zeros up to a multiple of kLanes.
struct Row {
  float numbers[kMaxHeadSize];
  int64_t n;
};

template <class Element>
KV_CLONES void load(const char* from, int64_t n, Row& row) {
  const auto* elements = reinterpret_cast<const Element*>(from);
  for (int64_t j = 0; j < n; ++j) row.numbers[j] = widen(elements[j]);
  for (int64_t j = n; j % kLanes != 0; ++j) row.numbers[j] = 0.0f;
  row.n = n;
}

template <class Element>
void load(const char* from, int64_t n, bool is_float, Row& row) {
  is_float ? load<float>(from, n, row) : load<Element>(from, n, row);
}

template <class Element>
KV_CLONES void store(const Row& row, Element* to) {
  for (int64_t j = 0; j < row.n; ++j) narrow(row.numbers[j], to[j]);
}

template <class Element>
KV_CLONES void normalize(const Row& weight, bool has_float_weight, float eps, Row& row) {
  float sums[kLanes] = {};
  for (int64_t j = 0; j < row.n; j += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums[lane] += product(row.numbers[j + lane], row.numbers[j + lane]);
    }
  }
  for (int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (int64_t lane = 0; lane < step; ++lane) sums[lane] += sums[lane + step];
  }
  const float factor = norm_factor(sums[0], row.n, eps);
  if (has_float_weight) {
    for (int64_t j = 0; j < row.n; ++j) {
      row.numbers[j] = normalized<Element>(row.numbers[j], factor, weight.numbers[j], true);
    }
  } else {
    for (int64_t j = 0; j < row.n; ++j) {
      row.numbers[j] = normalized<Element>(row.numbers[j], factor, weight.numbers[j], false);
    }
  }
}

template <class Element>
KV_CLONES void rotate(const Row& cos_sin, bool is_neox, Row& row) {
  const int64_t num_pairs = cos_sin.n / 2;
  const float* const sin = cos_sin.numbers + num_pairs;
  float* const x = row.numbers;
  if (is_neox) {
    for (int64_t j = 0; j < num_pairs; ++j) {
      rotate_pair<Element>(x[j], x[j + num_pairs], cos_sin.numbers[j], sin[j]);
    }
  } else {
    for (int64_t j = 0; j < num_pairs; ++j) {
      rotate_pair<Element>(x[2 * j], x[2 * j + 1], cos_sin.numbers[j], sin[j]);
    }
  }
}

// Returns the pages of one head, with `row` as its only token.
TokenPages head_of(const TokenPages& p, int64_t head, void* row) {
  TokenPages one = p;
  one.num_heads = 1;
  one.tokens = static_cast<char*>(row);
  one.token_stride = 0;
  one.pages += head * p.page_head_stride;
  if (p.scales != nullptr) one.scales += head * p.scale_head_stride;
  one.scale_head_stride = 0;
  if (p.group_scales != nullptr) one.group_scales += head * p.group_head_stride;
  return one;
}

template <class Element>
void run(const RopeWrite& r) {
  const TokenIo& io = r.io;
  const TokenMove moves[] = {write_move(io.k()), write_move(io.v())};
  int64_t width = 1;
  for (const Rows& rows : r.rows) width += rows.num_heads * rows.head_size;
  const int64_t grain = std::max<int64_t>(kGrainElements / width, 1);
  parallel_for(0, io.num_tokens, grain, [&](int64_t begin, int64_t end) {
    Row weights[3], cos_sin, row;
    Element elements[kMaxHeadSize];
    for (int side = 0; side < 3; ++side) {
      const Rows& rows = r.rows[side];
      if (rows.weight == nullptr) continue;
      load<Element>(rows.weight, rows.head_size, rows.has_float_weight, weights[side]);
    }
    for (int64_t i = begin; i < end; ++i) {
      load<Element>(r.cos_sin + r.position(i) * r.cos_sin_stride, r.rotary_dim, r.has_float_cos_sin,
                    cos_sin);
      const int64_t slot = io.slots[i];
      for (int side = 0; side < 3; ++side) {
        const Rows& rows = r.rows[side];
        const bool is_written = side > 0 && slot >= io.first_slot() && rows.num_heads > 0;
        if (is_written && rows.is_unchanged() && rows.out == nullptr) {
          moves[side - 1](io.sides[side - 1], 0, i, slot);
          continue;
        }
        if (!is_written && rows.out == nullptr) continue;
        const auto bytes = static_cast<size_t>(rows.head_size) * sizeof(Element);
        for (int64_t head = 0; head < rows.num_heads; ++head) {
          load<Element>(rows.row(i, head), rows.head_size, row);
          if (rows.weight != nullptr) {
            normalize<Element>(weights[side], rows.has_float_weight, r.eps, row);
          }
          if (rows.is_rotated) rotate<Element>(cos_sin, r.is_neox, row);
          store(row, elements);
          if (rows.out != nullptr) std::memcpy(rows.out_row(i, head), elements, bytes);
          if (is_written) moves[side - 1](head_of(io.sides[side - 1], head, elements), 0, 0, slot);
        }
      }
    }
  });
}

void rope_write_kv(Tensor positions, Tensor query, Tensor key, Tensor value, Tensor cos_sin_cache,
                   Tensor key_cache, Tensor value_cache, Tensor slot_mapping,
                   std::optional<Tensor> k_scale, std::optional<Tensor> v_scale, int64_t scale_rule,
                   bool is_neox, bool rotates_value, std::optional<Tensor> q_weight,
                   std::optional<Tensor> k_weight, double eps, std::optional<Tensor> query_out,
                   std::optional<Tensor> key_out, std::optional<Tensor> value_out) {
  const RopeWrite r =
      checked_rope_write(positions, query, key, value, cos_sin_cache, key_cache, value_cache,
                         slot_mapping, k_scale, v_scale, scale_rule, is_neox, rotates_value,
                         q_weight, k_weight, eps, query_out, key_out, value_out);
  for (int64_t i = 0; i < r.io.num_tokens; ++i) {
    if (r(i)) fail_rope_write(r, i, r.position(i), r.io.slots[i]);
  }
  with_token_type(r, [&](auto element) { run<decltype(element)>(r); });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(kvcache, CPU, m) { m.impl("rope_write_kv", TORCH_BOX(&rope_write_kv)); }

}  // namespace kvcache
