// SPDX-License-Identifier: Apache-2.0
// RMS norm, rotary embedding and the write to the paged cache, for the query, key and value of new
// tokens. The write is that of token_io.h.
//
// A row is one head of one token. Each step rounds the row to the tokens' dtype: first the norm,
// then its weight, then the rotation. Sums have a fixed order, so that CPU and CUDA give the same
// bits, except for those of NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <optional>
#include <string>

#include "ops/checks.h"
#include "ops/overlap.h"
#include "ops/token_io.h"
#include "worker/host_device.h"

namespace kvcache {

constexpr int64_t kMaxHeadSize = 1024;  // rows are held on the stack and in shared memory
constexpr int64_t kLanes = 32;          // partial sums of the norm

// The rows of query, key or value. Strides are in bytes.
struct Rows {
  const char* in;  // [num_tokens, num_heads, head_size]
  int64_t in_token_stride, in_head_stride;
  char* out;  // the same shape; nullptr: rows are only written to the cache
  int64_t out_token_stride, out_head_stride;
  int64_t num_heads, head_size;
  const char* weight;  // [head_size]; nullptr: no norm
  bool has_float_weight, is_rotated;

  KV_HOST_DEVICE bool is_unchanged() const { return weight == nullptr && !is_rotated; }
  KV_HOST_DEVICE const char* row(int64_t i, int64_t head) const {
    return in + i * in_token_stride + head * in_head_stride;
  }
  KV_HOST_DEVICE char* out_row(int64_t i, int64_t head) const {
    return out + i * out_token_stride + head * out_head_stride;
  }
};

// Returns number j of an array of float32 or of the tokens' dtype.
template <class Element>
KV_HOST_DEVICE float number_at(const char* numbers, int64_t j, bool is_float) {
  return is_float ? reinterpret_cast<const float*>(numbers)[j]
                  : widen(reinterpret_cast<const Element*>(numbers)[j]);
}

// Rounds to the tokens' dtype.
template <class Element>
KV_HOST_DEVICE float rounded_to(float x) {
  Element element;
  narrow(x, element);
  return widen(element);
}

// Returns the factor of a row with n elements and this sum of squares. Lane l of kLanes sums the
// squares of elements l, l + kLanes, ... in this order. Then, it adds the sum of lane l ^ step, for
// each step from kLanes / 2 down to 1.
KV_HOST_DEVICE float norm_factor(float sum, int64_t n, float eps) {
  return 1.0f / sqrtf(sum / static_cast<float>(n) + eps);
}

// A float32 weight is multiplied before the first rounding.
template <class Element>
KV_HOST_DEVICE float normalized(float x, float factor, float weight, bool has_float_weight) {
  x = product(x, factor);
  return rounded_to<Element>(product(has_float_weight ? x : rounded_to<Element>(x), weight));
}

// Rotates a pair of numbers.
template <class Element>
KV_HOST_DEVICE void rotate_pair(float& x, float& y, float cos, float sin) {
  const float first = product(x, cos) - product(y, sin);
  const float second = product(y, cos) + product(x, sin);
  x = rounded_to<Element>(first);
  y = rounded_to<Element>(second);
}

struct RopeWrite {
  Rows rows[3];  // query, key and value
  TokenIo io;
  const void* positions;  // [num_tokens]
  bool has_long_positions, has_float_cos_sin, is_neox;
  const char* cos_sin;  // [max_position, rotary_dim]: cosines, then sines
  int64_t cos_sin_stride, max_position, rotary_dim;
  float eps;

  KV_HOST_DEVICE int64_t position(int64_t i) const {
    return has_long_positions ? static_cast<const int64_t*>(positions)[i]
                              : static_cast<const int32_t*>(positions)[i];
  }
  KV_HOST_DEVICE bool has_bad_position(int64_t i) const {
    const int64_t its = position(i);
    return its < 0 || its >= max_position;
  }
  // Returns whether token i's position or slot is out of range.
  KV_HOST_DEVICE bool operator()(int64_t i) const { return has_bad_position(i) || io(i); }
};

// --- checks

inline bool is_same_view(const Tensor& a, const Tensor& b) {
  if (a.data_ptr() != b.data_ptr()) return false;
  for (int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && a.stride(i) != b.stride(i)) return false;
  }
  return true;
}

inline void check_row_stride(const Tensor& t, const char* name) {
  const int64_t last = t.dim() - 1;
  if (t.numel() > 0 && t.size(last) > 1 && t.stride(last) != 1) {
    fail(std::string(name) + " has stride " + std::to_string(t.stride(last)) +
         " in its last dimension: expected 1");
  }
}

inline Rows checked_rows(const Tensor& tokens, const char* name, const Tensor& key,
                         const std::optional<Tensor>& out, const char* out_name,
                         const std::optional<Tensor>& weight, const char* weight_name) {
  check_dim(tokens, name, 3, "[num_tokens, num_heads, head_size]");
  check_same_dtype(tokens, name, key, "key");
  check_same_device(tokens, name, key, "key");
  check_size(tokens, name, 0, key.size(0), "the tokens of key");
  check_row_stride(tokens, name);
  const int64_t head_size = tokens.size(2);
  if (head_size > kMaxHeadSize) {
    fail(std::string(name) + " has shape " + shape_of(tokens) + ": expected a head size up to " +
         std::to_string(kMaxHeadSize));
  }
  const auto stride = [](const Tensor& t, int64_t dim) {
    return t.size(dim) > 1 ? t.stride(dim) * static_cast<int64_t>(t.element_size()) : 0;
  };
  Rows rows{};
  rows.in = static_cast<const char*>(tokens.data_ptr());
  rows.in_token_stride = stride(tokens, 0);
  rows.in_head_stride = stride(tokens, 1);
  rows.num_heads = head_size > 0 ? tokens.size(1) : 0;
  rows.head_size = head_size;
  if (out) {
    check_dim(*out, out_name, 3, "[num_tokens, num_heads, head_size]");
    check_same_dtype(*out, out_name, tokens, name);
    check_same_device(*out, out_name, tokens, name);
    for (int64_t i = 0; i < 3; ++i) check_size(*out, out_name, i, tokens.size(i), "as its input");
    check_row_stride(*out, out_name);
    rows.out = static_cast<char*>(out->data_ptr());
    rows.out_token_stride = stride(*out, 0);
    rows.out_head_stride = stride(*out, 1);
  }
  if (weight) {
    check_dim(*weight, weight_name, 1, "[head_size]");
    check_dtype(*weight, weight_name, {tokens.scalar_type(), ScalarType::Float});
    check_contiguous(*weight, weight_name);
    check_same_device(*weight, weight_name, tokens, name);
    check_size(*weight, weight_name, 0, head_size, "the head size");
    rows.weight = static_cast<const char*>(weight->data_ptr());
    rows.has_float_weight = weight->scalar_type() == ScalarType::Float;
  }
  return rows;
}

inline RopeWrite checked_rope_write(
    const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& cos_sin_cache, const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& slot_mapping, const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale, int64_t scale_rule, bool is_neox, bool rotates_value,
    const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight, double eps,
    const std::optional<Tensor>& query_out, const std::optional<Tensor>& key_out,
    const std::optional<Tensor>& value_out) {
  check_dim(key, "key", 3, "[num_tokens, num_kv_heads, head_size]");
  check_dtype(key, "key", {ScalarType::Float, ScalarType::Half, ScalarType::BFloat16});
  check_dim(key_cache, "key_cache", 4, "[num_blocks, block_size, num_kv_heads, head_size]");
  RopeWrite r{};
  r.io = checked_token_io(Direction::kWrite, key, value, key_cache, value_cache, slot_mapping,
                          k_scale, v_scale, scale_rule);
  const std::optional<Tensor> query_to = query_out ? query_out : query;
  const char* const query_name = query_out ? "query_out" : "query";
  r.rows[0] = checked_rows(query, "query", key, query_to, query_name, q_weight, "q_weight");
  r.rows[1] = checked_rows(key, "key", key, key_out, "key_out", k_weight, "k_weight");
  r.rows[2] = checked_rows(value, "value", key, value_out, "value_out", std::nullopt, "");
  r.rows[0].is_rotated = true;
  r.rows[rotates_value ? 2 : 1].is_rotated = true;
  if (value_out && !rotates_value) {
    fail("value_out is given: expected None, because rotates_value is False");
  }
  if (r.rows[0].num_heads + r.rows[1].num_heads + r.rows[2].num_heads > UINT16_MAX) {
    fail("query has shape " + shape_of(query) + ": expected fewer heads");
  }
  if (!(eps >= 0)) fail("eps is " + std::to_string(eps) + ": expected at least 0");

  check_dim(positions, "positions", 1, "[num_tokens]");
  check_dtype(positions, "positions", {ScalarType::Int, ScalarType::Long});
  check_contiguous(positions, "positions");
  check_same_device(positions, "positions", key, "key");
  check_size(positions, "positions", 0, key.size(0), "the tokens of key");
  check_dim(cos_sin_cache, "cos_sin_cache", 2, "[max_position, rotary_dim]");
  check_dtype(cos_sin_cache, "cos_sin_cache", {key.scalar_type(), ScalarType::Float});
  check_same_device(cos_sin_cache, "cos_sin_cache", key, "key");
  check_row_stride(cos_sin_cache, "cos_sin_cache");
  const int64_t most = std::min(query.size(2), rotates_value ? value.size(2) : key.size(2));
  if (cos_sin_cache.size(1) % 2 != 0 || cos_sin_cache.size(1) > most) {
    fail("cos_sin_cache has shape " + shape_of(cos_sin_cache) +
         ": expected an even rotary_dim up to the size of the rotated heads, " +
         std::to_string(most));
  }

  NamedTensors written{{"key_cache", key_cache}, {"value_cache", value_cache}};
  if (is_in_pages(k_scale, key_cache)) written.push_back({"k_scale", k_scale});
  if (is_in_pages(v_scale, value_cache)) written.push_back({"v_scale", v_scale});
  const NamedTensors given{{"positions", positions}, {"cos_sin_cache", cos_sin_cache},
                           {"q_weight", q_weight},   {"k_weight", k_weight},
                           {"query", query},         {"key", key},
                           {"value", value},         {"slot_mapping", slot_mapping},
                           {"k_scale", k_scale},     {"v_scale", v_scale},
                           {"key_cache", key_cache}, {"value_cache", value_cache}};
  check_disjoint(written, {given.begin(), given.begin() + 5});
  // Outputs may be their own inputs. Query, key and value may be columns of one tensor.
  const NamedTensors outs{{query_name, query_to}, {"key_out", key_out}, {"value_out", value_out}};
  const Tensor* const inputs[] = {&query, &key, &value};
  for (size_t i = 0; i < outs.size(); ++i) {
    if (outs[i].tensor == nullptr) continue;
    const Tensor& out = *outs[i].tensor;
    check_no_overlap(out, outs[i].name);
    const auto check_apart = [&](const NamedTensor& other) {
      if (other.tensor == nullptr || !span_of(out).meets(span_of(*other.tensor))) return;
      if (other.tensor == inputs[i] && is_same_view(out, *other.tensor)) return;
      if (share_memory(out, *other.tensor)) fail_shared(outs[i].name, other.name);
    };
    for (const NamedTensor& other : given) check_apart(other);
    for (size_t j = 0; j < i; ++j) check_apart(outs[j]);
  }

  r.positions = positions.data_ptr();
  r.has_long_positions = positions.scalar_type() == ScalarType::Long;
  r.has_float_cos_sin = cos_sin_cache.scalar_type() == ScalarType::Float;
  r.is_neox = is_neox;
  r.cos_sin = static_cast<const char*>(cos_sin_cache.data_ptr());
  r.cos_sin_stride = cos_sin_cache.stride(0) * static_cast<int64_t>(cos_sin_cache.element_size());
  r.max_position = cos_sin_cache.size(0);
  r.rotary_dim = cos_sin_cache.size(1);
  r.eps = static_cast<float>(eps);
  return r;
}

// Calls f with an element of the tokens' dtype.
template <class F>
void with_token_type(const RopeWrite& r, F&& f) {
  const ScalarType type = r.io.k().token_type;
  if (type == ScalarType::Float) return f(float{});
  if (type == ScalarType::Half) return f(c10::Half{});
  f(c10::BFloat16{});
}

// Throws the error for token i. Its position and slot are arguments, because the arrays may be on a
// device.
[[noreturn]] inline void fail_rope_write(const RopeWrite& r, int64_t i, int64_t position,
                                         int64_t slot) {
  if (position >= 0 && position < r.max_position) fail_token_io(r.io, i, slot);
  fail("positions[" + std::to_string(i) + "] is " + std::to_string(position) + ": expected 0 to " +
       std::to_string(r.max_position - 1) + ", the rows of cos_sin_cache");
}

}  // namespace kvcache
