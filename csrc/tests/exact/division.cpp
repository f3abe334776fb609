// SPDX-License-Identifier: Apache-2.0
// Compares the fp8 codes of ScaleDivisor with those of a true division, for
//   - every bfloat16 and every float16, with `num_scales` scales each;
//   - `num_floats` pairs of a random float32 and a scale, most of them near a boundary between
//     fp8 codes. For these pairs, the quotients themselves must be equal.
// Usage: division num_scales num_floats seed. Prints counts. The exit code is 1 if codes differ.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>

#include "ops/quantize.h"
#include "ops/scale_divisor.h"

using namespace kvcache;

namespace {

using Random = std::mt19937_64;

uint64_t num_compared = 0, num_different = 0;

void report(const char* what, float x, float scale, float got, float wanted) {
  if (num_different++ < 20) std::printf("%s: %a / %a: %a, not %a\n", what, x, scale, got, wanted);
}

template <class Format>
bool same_code(float a, float b) {
  const uint8_t x = Format::encode(a), y = Format::encode(b);
  return x == y || ((x & y & 0x7F) == 0x7F && std::isnan(a) && std::isnan(b));
}

bool same_codes(float a, float b) { return same_code<E4M3>(a, b) && same_code<E5M2>(a, b); }

template <class Element>
void every_pattern(const char* name, float scale) {
  const ScaleDivisor<Element> divisor(scale);
  if (!divisor.is_exact()) return;
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    Element element;
    element.x = static_cast<uint16_t>(bits);
    const float x = widen(element), got = divisor.divide(x), wanted = x / scale;
    if (!same_codes(got, wanted)) report(name, x, scale, got, wanted);
  }
  num_compared += 65536;
}

void one_float(float x, float scale) {
  const ScaleDivisor<float> divisor(scale);
  if (!divisor.is_exact()) return;
  const float got = divisor.divide(x), wanted = x / scale;
  const bool matters = std::fabs(wanted) > 0x1p-20f && std::fabs(wanted) < 0x1p18f;
  if (matters ? bits_of(got) != bits_of(wanted) : !same_codes(got, wanted)) {
    report("float", x, scale, got, wanted);
  }
  ++num_compared;
}

// Returns a number with 5 significant bits, like the boundaries between fp8 codes.
float random_step(Random& random) {
  return std::ldexp(static_cast<float>(16 + random() % 16), static_cast<int>(random() % 40) - 25);
}

float neighbour(Random& random, float x, uint32_t reach) {
  return float_of(bits_of(x) + static_cast<uint32_t>(random() % (2 * reach + 1)) - reach);
}

// Returns a scale within the exact range. Most scales are the hardest cases for rounding: their
// mantissa has all, nearly all or few bits set, or the quotient of some 11-bit number and the scale
// is close to a boundary between fp8 codes.
float random_scale(Random& random) {
  const uint32_t exponent = 127 - 78 + static_cast<uint32_t>(random() % 156);
  uint32_t mantissa = random() & 0x7FFFFF;
  switch (random() % 8) {
    case 0:
      mantissa = 0x7FFFFF - random() % 16;
      break;
    case 1:
      mantissa = random() % 16;
      break;
    case 2:
      mantissa &= 0x7FFFFFu << random() % 23;
      break;
    case 3:
      break;
    default:
      mantissa &= 0x7FE000;
      return neighbour(random, float_of(exponent << 23 | mantissa) / (16 + random() % 16), 3);
  }
  return float_of(exponent << 23 | (mantissa & 0x7FFFFF));
}

float random_float(Random& random, float scale) {
  if (random() % 4 == 0) return float_of(static_cast<uint32_t>(random()));
  const float x = neighbour(random, random_step(random) * scale, 4);
  return random() % 2 ? x : -x;
}

void special_floats(float scale) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (float x : {0.0f, 0x1p-149f, 0x1p-130f, 0x1p-126f, 0x1p100f, 0x1.fffffep127f, kInfinity,
                  std::numeric_limits<float>::quiet_NaN()}) {
    one_float(x, scale);
    one_float(-x, scale);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  const uint64_t num_scales = std::strtoull(argv[1], nullptr, 10);
  const uint64_t num_floats = std::strtoull(argv[2], nullptr, 10);
  Random random(std::strtoull(argv[3], nullptr, 10));
  for (float scale : {1.0f, 0x1.fffffep0f, 0x1.fffffep-9f, 0.37f, 1e-3f, 0x1p-80f, 0x1p80f}) {
    every_pattern<c10::BFloat16>("bfloat16", scale);
    every_pattern<c10::Half>("float16", scale);
    special_floats(scale);
  }
  for (uint64_t i = 0; i < num_scales; ++i) {
    const float scale = random_scale(random);
    every_pattern<c10::BFloat16>("bfloat16", scale);
    every_pattern<c10::Half>("float16", scale);
    special_floats(scale);
  }
  for (uint64_t i = 0; i < num_floats; ++i) {
    const float scale = random_scale(random);
    one_float(random_float(random, scale), scale);
  }
  std::printf("%llu quotients, %llu differ\n", static_cast<unsigned long long>(num_compared),
              static_cast<unsigned long long>(num_different));
  return num_different > 0;
}
