// SPDX-License-Identifier: Apache-2.0
#include "core/hashing/sha256.h"

#include <algorithm>
#include <string>
#include <vector>

#include "tests/check.h"

using namespace kvcache;

namespace {

std::string digest(const std::string& text, const Sha256Implementation& implementation) {
  uint8_t bytes[32];
  sha256(reinterpret_cast<const uint8_t*>(text.data()), text.size(), bytes, implementation);
  std::string out;
  for (const uint8_t byte : bytes) {
    out += "0123456789abcdef"[byte >> 4];
    out += "0123456789abcdef"[byte & 15];
  }
  return out;
}

struct Case {
  std::string text, digest;
};

// Digests of NIST's examples for FIPS 180-4, and of strings of the letter "a" (from Python's
// hashlib). Their lengths are close to the lengths at which the padding needs another chunk.
const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
      {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"},
      {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
       "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"},
      {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmn"
       "opqrsmnopqrstnopqrstu",
       "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1"},
      {std::string(55, 'a'), "9f4390f8d30c2dd92ec9f095b65e2b9ae9b0a925a5258e241c9f1e910f734318"},
      {std::string(56, 'a'), "b35439a4ac6f0948b6d6f9e3c6af0f5f590ce20f1bde7090ef7970686ec6738a"},
      {std::string(63, 'a'), "7d3e74a05d7db15bce4ad9ec0658ea98e3f06eeecf16b4c6fff2da457ddc2f34"},
      {std::string(64, 'a'), "ffe054fe7ae0cb6dc65c3af9b61d5209f439851db43d0ba5997337df154668eb"},
      {std::string(65, 'a'), "635361c48bb9eab14198e76ea8ab7f1a41685d6ad62aa9146d301d4f17eb0ae0"},
      {std::string(119, 'a'), "31eba51c313a5c08226adf18d4a359cfdfd8d2e816b13f4af952f7ea6584dcfb"},
      {std::string(120, 'a'), "2f3d335432c70b580af0e8e1b3674a7c020d683aa5f73aaaedfdc55af904c21c"},
      {std::string(1000000, 'a'),
       "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"},
  };
  return all;
}

TEST(the_portable_implementation_is_always_available) {
  CHECK_EQ(std::string(sha256_implementations().back().name), "portable");
}

TEST(every_implementation_gives_the_known_digests) {
  for (const Sha256Implementation& each : sha256_implementations()) {
    for (const Case& known : cases()) CHECK_EQ(digest(known.text, each), known.digest);
  }
}

TEST(the_implementations_agree_on_every_length) {
  std::string text;
  for (int i = 0; i < 1000; ++i) {
    const std::string expected = digest(text, sha256_implementations().back());
    for (const Sha256Implementation& each : sha256_implementations()) {
      CHECK_EQ(digest(text, each), expected);
    }
    text += static_cast<char>(i * i + 7 * i);
  }
}

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
    const std::string text(size, 'a');
    for (const Sha256Implementation& each : sha256_implementations()) {
      // A sanitizer detects writes beyond the padding.
      std::vector<uint8_t> data(size + kSha256Padding, 0xEE);
      std::copy(text.begin(), text.end(), data.begin());
      uint8_t out[32], expected[32];
      each.digest({data.data(), out}, sha256_pad(data.data(), size));
      sha256(reinterpret_cast<const uint8_t*>(text.data()), size, expected, each);
      CHECK(std::equal(out, out + 32, expected));
    }
  }
}

}  // namespace

TEST_MAIN()
