# SPDX-License-Identifier: Apache-2.0
"""Draft trees, compared with a reference model that maps each slot to a tuple of tokens."""

from itertools import chain

import numpy as np
import pytest

from kvcache.sanitizer import SanitizedGroup, Sanitizer, replay_record

GROUPS = [SanitizedGroup("full", 4), SanitizedGroup("window", 8, window=5)]
TABLES = {
    "a": [list(range(1, 17)), list(range(40, 48))],
    "b": [list(range(17, 33)), list(range(50, 58))],
}


def slot_of(group, table, position):
    size = GROUPS[group].block_size
    return table[position // size] * size + position % size


def path_of(tokens, parents, node):
    """Return the tokens from the root of a tree to a node."""
    path = []
    while node >= 0:
        path.append(tokens[node])
        node = parents[node]
    return tuple(path[::-1])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_trees_match_a_dict_of_slots(seed, tmp_path):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    sanitizer = Sanitizer(
        GROUPS, 64, log=lambda report: None, max_reports=10**6, record=tmp_path / "a"
    )
    known, slots, num_bad = {name: [1] for name in TABLES}, {}, 0
    for name, tokens in known.items():
        sanitizer.observe_request(name, tokens)
        for g, table in enumerate(TABLES[name]):
            sanitizer.observe_load(g, [name], [0], [1], [table])
            slots[g, slot_of(g, table, 0)] = (1,)
    for step in range(60):
        sanitizer.observe_step(step)
        for name in known:
            if len(known[name]) > 50:
                known[name] = [1]
                sanitizer.observe_request(name, [1])
        names = list(known)
        starts = [len(known[name]) for name in names]
        counts = rng.integers(1, 6, len(names)).tolist()
        trees = [[int(rng.integers(-1, i)) for i in range(count)] for count in counts]
        drafts = [rng.integers(0, 3, count).tolist() for count in counts]
        given, parents = (list(chain.from_iterable(each)) for each in (drafts, trees))
        sanitizer.observe_tokens(names, starts, counts, given, parents=parents)
        for g, group in enumerate(GROUPS):
            mapping, bad, before = [], set(), len(sanitizer.reports)
            tables = [TABLES[name][g] for name in names]
            for name, start, tree, draft, table in zip(names, starts, trees, drafts, tables):
                own = [slot_of(g, table, start + i) for i in range(len(tree))]
                if rng.random() < 0.05:
                    own.reverse()
                for i, slot in enumerate(own):
                    slots[g, slot] = (*known[name], *path_of(draft, tree, i))
                mapping += own
            sanitizer.observe_write(g, names, starts, counts, mapping)
            stops = np.add(starts, counts)
            sanitizer.observe_read(g, names, starts, stops, tables)
            firsts = group.first_needed(starts)
            for r, (name, start, table) in enumerate(zip(names, starts, tables)):
                for p in range(firsts[r], stops[r]):
                    wanted = tuple(known[name][: p + 1])
                    if p >= start:
                        wanted = (*known[name], *path_of(drafts[r], trees[r], p - start))
                    if slots.get((g, slot_of(g, table, p))) != wanted:
                        bad.add((name, table[p // group.block_size]))
            new = {(report.request, report.block) for report in sanitizer.reports[before:]}
            found = {(each.request, each.block) for each in sanitizer.reports if each.group == g}
            assert new <= bad <= found, (step, g, new, bad)
            num_bad += len(new)
        for name, start, tree, draft in zip(names, starts, trees, drafts):
            nodes, node = [], int(rng.integers(len(tree)))
            while node >= 0:
                nodes.insert(0, node)
                node = tree[node]
            known[name] += path_of(draft, tree, nodes[-1])
            sanitizer.observe_tokens([name], [start], [len(nodes)], known[name][start:])
            for g, table in enumerate(TABLES[name]):
                src = [slot_of(g, table, start + node) for node in nodes]
                dst = [slot_of(g, table, start + i) for i in range(len(nodes))]
                if rng.random() < 0.05:
                    src, dst = src[:-1], dst[:-1]  # the KV of the last accepted token is not moved
                sanitizer.observe_slot_copy(g, src, dst)
                before = dict(slots)
                slots |= {(g, to): before[g, at] for at, to in zip(src, dst)}
    assert num_bad > 3
    sanitizer.close()
    assert replay_record(tmp_path / "a", log=lambda report: None).counts == sanitizer.counts


def sanitizer_with_tree() -> Sanitizer:
    """Observe a step of request "a" whose draft tree has two roots, the second of which has a child."""
    sanitizer = Sanitizer(GROUPS, 64, log=lambda report: None)
    sanitizer.observe_request("a", [7])
    sanitizer.observe_tokens(["a"], [1], [3], [8, 9, 10], parents=[-1, -1, 1])
    return sanitizer


def test_accepted_tokens_whose_kv_was_not_moved_are_reported():
    sanitizer = sanitizer_with_tree()
    sanitizer.observe_load(0, ["a"], [0], [1], [[1]])
    sanitizer.observe_write(0, ["a"], [1], [3], [5, 6, 7])
    sanitizer.observe_tokens(["a"], [1], [2], [9, 10])
    sanitizer.observe_slot_copy(0, [6], [5])
    sanitizer.observe_read(0, ["a"], [2], [3], [[1]])
    (report,) = sanitizer.reports
    assert (report.kind, report.position) == ("wrong-content", 2)
    assert report.events[-1].kind == "copied"
    sanitizer.observe_slot_copy(0, [7], [6])
    sanitizer.observe_read(0, ["a"], [2], [3], [[1]])
    assert sanitizer.num_reports == 1


def test_slots_with_content_of_another_group_count_as_never_written():
    sanitizer = Sanitizer(GROUPS, 64, log=lambda report: None)
    sanitizer.observe_request("a", [7])
    sanitizer.observe_write(1, ["a"], [0], [1], [8])
    sanitizer.observe_slot_copy(0, [4], [8])
    sanitizer.observe_read(0, ["a"], [0], [1], [[2]])
    assert sanitizer.counts == {"read-before-written": 1}


def test_tokens_of_a_tree_must_be_set_again_once_they_are_accepted():
    sanitizer = sanitizer_with_tree()
    assert sanitizer.num_tokens("a") == 4
    sanitizer.observe_tokens(["a"], [3], [1], [11])
    assert sanitizer.counts == {"skipped-token": 1} and sanitizer.reports[0].position == 2
    # The first root was accepted and is already in the right slot.
    sanitizer.observe_tokens(["a"], [2], [1], [11])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1, 1, 0], r"parents\[1\] is 1: expected -1 to 0, an earlier token of the request"),
        ([-2, 0, 0], r"parents\[0\] is -2: expected -1 to -1"),
        ([-1], "parents has 1 entries: expected 3, the sum of query_lens"),
    ],
)
def test_invalid_parents_are_rejected(parents, message):
    sanitizer = Sanitizer(GROUPS, 64)
    sanitizer.observe_request("a", [7])
    with pytest.raises(ValueError, match=message):
        sanitizer.observe_tokens(["a"], [1], [3], [8, 9, 10], parents=parents)
    assert sanitizer.num_tokens("a") == 1


def test_invalid_slots_to_copy_are_rejected():
    sanitizer = Sanitizer(GROUPS, 64)
    with pytest.raises(ValueError, match="dst_slots has 1 entries: expected 2"):
        sanitizer.observe_slot_copy(0, [4, 5], [6])
    with pytest.raises(ValueError, match=r"src_slots\[0\] is 256: expected 0 to 255"):
        sanitizer.observe_slot_copy(0, [256], [6])
