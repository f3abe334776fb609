// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/sha256.h"

#include <algorithm>
#include <vector>

#include "tests/check.h"

using namespace kvcache;

namespace {

TEST(hashing_two_messages_gives_both_digests) {
  for (const Sha256Implementation& each : sha256_implementations()) {
    if (each.digest_two == nullptr) continue;
    for (size_t size = 0; size < 300; ++size) {
      std::vector<uint8_t> first(size + kSha256Padding, 'a'), second(size + kSha256Padding, 'b');
      for (size_t i = 0; i < size; ++i) second[i] = static_cast<uint8_t>(i * i);
      const std::vector<uint8_t> texts[] = {first, second};
      const size_t num_chunks = sha256_pad(first.data(), size);
      CHECK_EQ(sha256_pad(second.data(), size), num_chunks);
      uint8_t out[2][32], expected[32];
      const Sha256Message messages[] = {{first.data(), out[0]}, {second.data(), out[1]}};
      each.digest_two(messages, num_chunks);
      for (size_t i = 0; i < 2; ++i) {
        sha256(texts[i].data(), size, expected, sha256_implementations().back());
        CHECK(std::equal(out[i], out[i] + 32, expected));
      }
    }
  }
}

TEST(a_linked_message_has_the_digest_of_the_complete_message) {
  for (const Sha256Implementation& each : sha256_implementations()) {
    for (size_t size = 35; size < 300; ++size) {
      std::vector<uint8_t> texts[2], padded[2];
      uint8_t links[2][32], out[2][32], expected[2][32];
      Sha256Message messages[2];
      size_t num_chunks = 0;
      for (size_t k = 0; k < 2; ++k) {
        texts[k].resize(size);
        for (size_t i = 0; i < size; ++i) texts[k][i] = static_cast<uint8_t>((k + 3) * i * i + k);
        padded[k] = texts[k];
        padded[k].resize(size + kSha256Padding);
        num_chunks = sha256_pad(padded[k].data(), size);
        std::copy_n(texts[k].data() + Sha256Message::kLinkAt, 32, links[k]);
        std::fill_n(padded[k].data() + Sha256Message::kLinkAt, 32, uint8_t{0xEE});
        messages[k] = {padded[k].data(), out[k], links[k]};
        sha256(texts[k].data(), size, expected[k], sha256_implementations().back());
        each.digest(messages[k], num_chunks);
        CHECK(std::equal(out[k], out[k] + 32, expected[k]));
      }
      if (each.digest_two == nullptr) continue;
      std::fill_n(&out[0][0], sizeof(out), uint8_t{0});
      each.digest_two(messages, num_chunks);
      for (size_t k = 0; k < 2; ++k) CHECK(std::equal(out[k], out[k] + 32, expected[k]));
    }
  }
}

TEST(unaligned_data_is_hashed_without_out_of_bounds_reads) {
  for (size_t size : {size_t{3}, size_t{55}, size_t{56}, size_t{64}, size_t{150}}) {
    for (size_t offset = 0; offset < 16; ++offset) {
      // The data ends at the end of the allocation, so that a sanitizer detects reads beyond it.
      const std::vector<uint8_t> bytes(offset + size, 'a');
      for (const Sha256Implementation& each : sha256_implementations()) {
        uint8_t out[32], expected[32];
        sha256(bytes.data() + offset, size, out, each);
        sha256(std::vector<uint8_t>(size, 'a').data(), size, expected, each);
        CHECK(std::equal(out, out + 32, expected));
      }
    }
  }
}

TEST(in_place_padding_gives_the_same_digest) {
  for (size_t size = 0; size < 300; ++size) {
    for (const Sha256Implementation& each : sha256_implementations()) {
      // A sanitizer detects writes beyond the padding.
      std::vector<uint8_t> data(size + kSha256Padding, 0xEE);
      std::fill_n(data.begin(), size, uint8_t{'a'});
      const std::vector<uint8_t> text(data.begin(), data.begin() + static_cast<int64_t>(size));
      uint8_t out[32], expected[32];
      each.digest({data.data(), out}, sha256_pad(data.data(), size));
      sha256(text.data(), size, expected, each);
      CHECK(std::equal(out, out + 32, expected));
    }
  }
}

}  // namespace

TEST_MAIN()
