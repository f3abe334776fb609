// SPDX-License-Identifier: Apache-2.0
#include "core/manager/session_pins.h"

#include "tests/check.h"
#include "tests/core_fixtures.h"

using namespace kvcache;
using namespace kvcache::test;

namespace {

struct Fixture {
  BlockPool pool{9};
  std::vector<CacheGroup> groups = full_groups(4);
  SessionPins pins{&pool};
  std::vector<Hash> hashes = hashes_from(1, 3);
  std::vector<BlockId> ids = take(&pool, 3);

  Fixture() {
    publish_chain(&pool, ids, hashes);
    release(&pool, {ids[2], ids[1], ids[0]});
  }
  ~Fixture() { pins.check_invariants(); }
};

TEST(pinning_again_replaces_the_pins_of_a_session) {
  Fixture f;
  CHECK_EQ(f.pins.pin("one", f.hashes.data(), 3, f.groups), 3);
  CHECK_EQ(f.pins.pin("two", f.hashes.data(), 1, f.groups), 1);
  CHECK_EQ(f.pins.pin("one", f.hashes.data(), 1, f.groups), 1);
  CHECK_EQ(f.pool.num_pinned(), 1);
  CHECK_EQ(f.pins.unpin("one"), 0);
  CHECK(f.pool.is_pinned(f.ids[0]));  // the other session still pins it
  CHECK_EQ(f.pins.unpin("two"), 0);
  CHECK_EQ(f.pool.num_pinned(), 0);
  CHECK_EQ(f.pins.unpin("two"), 0);  // the session has no pins left
}

TEST(sessions_without_pins_are_removed) {
  Fixture f;
  for (int i = 0; i < 1000; ++i) f.pins.pin("session " + std::to_string(i), nullptr, 0, f.groups);
  CHECK(f.pins.num_sessions() <= 64);
  f.pins.pin("keeps one", f.hashes.data(), 1, f.groups);
  for (int i = 0; i < 1000; ++i) f.pins.pin("session " + std::to_string(i), nullptr, 0, f.groups);
  CHECK_EQ(f.pins.unpin("keeps one"), 0);
  CHECK_EQ(f.pool.num_pinned(), 0);
}

}  // namespace

TEST_MAIN()
