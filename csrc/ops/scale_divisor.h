// SPDX-License-Identifier: Apache-2.0
// Divides values by a scale before they are converted to fp8, without a division per element.
//
// The result must be converted to the same fp8 code as the result of a true division. The code
// changes only at quotients M with at most 5 significant bits, halfway between two codes.
// Therefore, for 16-bit elements, it suffices to round correctly near these M. For float32
// elements, one additional correction yields the true quotient. The proofs are below;
// tests/ops/test_fp8_exact.py checks them.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "ops/float_bits.h"
#include "worker/host_device.h"

namespace kvcache {

// Returns a * b + c, rounded once.
KV_HOST_DEVICE float fused(float a, float b, float c) { return fmaf(a, b, c); }

// `Element` is the dtype of the dividend: float, Half or BFloat16.
//
// Let u = 2^-24 and s be the scale. `high_` is 1 / s rounded towards zero, and `low_` is the
// remainder, increased by 2^-46 of `high_`. Therefore x * high_ and x * low_ have the sign of x /
// s, even if x is zero or infinite, and their sum before its only rounding is x / s (1 + d) with
// |d| < 2^-44.
//
// Proof for 16 bits (x has p <= 11 significant bits). A wrong code requires a midpoint M' = M +-
// ulp / 2 between x / s and the sum. Scale by powers of two so that M and s lie in [1, 2), M = m /
// 16 and s = S 2^-23. Then |x / s - M'| = |t| 2^-47 / s with the integer t = X 2^(48 - p) - S (m
// 2^20 +- 1), X < 2^p. Solving for S modulo 2^17 leaves two cases. Either |t| > 4000, so the
// distance is at least 2^-37, which is far more than d. Or t = 1 with S = 2^24 - 1, M = 1 and x a
// power of two. In this case, x / s lies just above M' = 1 + u, and the increased `low_` puts the
// sum above M' too.
//
// Proof for float32. The sum q is x / s rounded, or the other neighbor if x / s is within 2^-44 of
// a midpoint M'. The remainder r = x - s q is exact, and the correction adds r / s with a relative
// error of |1 - s nearest_| <= s 2^-25. With |x / s - M'| = D >= 2^-47 / s, the error is below (u +
// D) s 2^-25 < D for every s < 2, so the corrected sum is on the correct side of M'.
template <class Element>
class ScaleDivisor {
 public:
  KV_HOST_DEVICE explicit ScaleDivisor(float scale)
      : scale_(scale), nearest_(1.0f / scale), high_(nearest_) {
    float rest = fused(-scale, high_, 1.0f);
    if (rest < 0.0f) {
      high_ = float_of(bits_of(high_) - 1);
      rest = fused(-scale, high_, 1.0f);
    }
    low_ = high_ * (rest + 0x1p-46f);
  }

  KV_HOST_DEVICE float scale() const { return scale_; }

  // Returns whether the proofs hold for this scale, that is, whether no intermediate value
  // overflows or becomes subnormal. They do not hold for zero, infinity, NaN or a negative scale,
  // for which the caller uses a true division.
  KV_HOST_DEVICE bool is_exact() const {
    return bits_of(scale_) - kSmallest <= kLargest - kSmallest;
  }

  // Returns a number that has the same sign as x / scale and is converted to the same fp8 code. If
  // x / scale is infinite or NaN, so is the result.
  KV_HOST_DEVICE float divide(float x) const {
    const float quotient = fused(x, high_, x * low_);
    if constexpr (std::is_same_v<Element, float>) {
      // The remainder is negated so that, if it is zero, adding it preserves the quotient's sign.
      const float minus_rest = fused(scale_, quotient, -x);
      const float corrected = fused(minus_rest, -nearest_, quotient);
      return fabsf(quotient) < kBeyondFp8 ? corrected : quotient;
    }
    return quotient;
  }

 private:
  static constexpr uint32_t kSmallest = 0x17800000u;  // 2^-80
  static constexpr uint32_t kLargest = 0x67800000u;   // 2^80
  static constexpr float kBeyondFp8 = 0x1p20f;        // all larger quotients saturate

  float scale_, nearest_, high_, low_;
};

}  // namespace kvcache
