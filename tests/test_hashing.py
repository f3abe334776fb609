import hashlib
import json
import subprocess
import sys
import threading
from time import perf_counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import KVCacheManager, Request, hash_blocks
from kvcache.allocator.hashing import encode_extra_keys
from tests.shared import shared_file


def reference(tokens, block_size, extra_keys=None, seed="vllm-none-hash", parent=None):
    """The definition, with a CBOR library and hashlib."""
    cbor2 = pytest.importorskip("cbor2", reason="cbor2 is not installed")
    parent = parent or hashlib.sha256(cbor2.dumps(seed, canonical=True)).digest()
    out = []
    for block in range(len(tokens) // block_size):
        keys = extra_keys[block] if extra_keys else None
        content = [
            parent,
            [int(t) for t in tokens[block * block_size :][:block_size]],
            keys or None,
        ]
        parent = hashlib.sha256(cbor2.dumps(content, canonical=True)).digest()
        out.append(parent.hex())
    return out


def hexes(hashes):
    return [bytes(row).hex() for row in hashes]


def unpack(key):
    return tuple(bytes.fromhex(x["bytes_hex"]) if isinstance(x, dict) else x for x in key)


def vector_cases():
    return json.loads(shared_file("vectors/block_hash_sha256_cbor.json").read_text())["cases"]


def test_known_answers():
    for case in vector_cases():
        extra = case["extra_keys_per_block"]
        if extra is not None:
            extra = [keys and [unpack(key) for key in keys] for keys in extra]
        found = hash_blocks(
            case["token_ids"], case["block_size"], extra_keys=extra, seed=case["seed"]
        )
        assert hexes(found) == case["block_hashes"], case["name"]


def test_known_answers_without_libcrypto():
    shared_file("vectors/block_hash_sha256_cbor.json")
    program = """
import hashlib
from kvcache.native.load import core
from tests.test_hashing import test_known_answers
import kvcache.allocator
count = 0
def digest(data):
    global count
    count += 1
    return hashlib.sha256(data).digest()
core.set_sha256_fallback(digest, force=True)
test_known_answers()
print(count)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100  # it was the fallback that hashed


extra_key = st.one_of(
    st.tuples(st.just("lora"), st.text(max_size=30), st.text(max_size=300)),
    st.tuples(st.just("mm"), st.text(max_size=5), st.integers(-(2**63), 2**64 - 1)),
    st.tuples(st.just("prompt_embeds"), st.binary(max_size=40)),
    st.tuples(st.none(), st.booleans()),
)


@given(
    st.lists(st.one_of(st.integers(0, 300), st.integers(0, 2**31 - 1)), max_size=80),
    st.integers(1, 20),
    st.text(max_size=30),
    st.data(),
)
def test_agrees_with_a_cbor_library(tokens, block_size, seed, data):
    n = len(tokens) // block_size
    keys = data.draw(
        st.none() | st.lists(st.none() | st.lists(extra_key, max_size=3), min_size=n, max_size=n)
    )
    found = hash_blocks(tokens, block_size, extra_keys=keys, seed=seed)
    assert hexes(found) == reference(tokens, block_size, keys, seed)


def test_a_parent_continues_a_chain():
    whole = hash_blocks(range(96), 16)
    rest = hash_blocks(range(48, 96), 16, parent=bytes(whole[2]))
    assert np.array_equal(whole[3:], rest)


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_dtype_hashes_alike(dtype):
    assert np.array_equal(hash_blocks(np.arange(100, dtype=dtype), 16), hash_blocks(range(100), 16))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1, -2, 3], 1), ValueError, r"token_ids\[1\] is -2: expected 0 to 2147483647"),
        (([1, 2**31], 1), ValueError, r"token_ids\[1\] is 2147483648"),
        ((np.array([5, -1], np.int32), 1), ValueError, r"token_ids\[1\] is -1"),
        ((np.array([2**63], np.uint64), 1), ValueError, r"token_ids\[0\] is 9223372036854775808"),
        (([1.5], 1), TypeError, "token_ids has dtype float64: expected integers"),
        ((np.zeros((2, 2), np.int32), 1), ValueError, "token_ids has 2 dimensions: expected 1"),
        (([2**70], 1), ValueError, rf"token_ids\[0\] is {2**70}: expected 0 to 2147483647"),
        ((5, 1), TypeError, "token_ids is 5: expected integers"),
        (([1, 2], 0), ValueError, "block_size is 0: expected 1 to 2147483647"),
        (([1, 2], -3), ValueError, "block_size is -3"),
        (([1, 2], 2**31), ValueError, "block_size is 2147483648: expected 1 to 2147483647"),
        (([1, 2], 2**64), ValueError, "block_size is 18446744073709551616: expected at most"),
        (([1, 2], 1.0), TypeError, "block_size is 1.0: expected an integer"),
    ],
)
def test_wrong_input_is_named(arguments, error, message):
    with pytest.raises(error, match=message):
        hash_blocks(*arguments)


def test_wrong_keywords_are_named():
    with pytest.raises(
        ValueError, match="extra_keys has 1 entries: expected 3, one per full block"
    ):
        hash_blocks(range(50), 16, extra_keys=[None])


def test_text_that_utf_8_cannot_hold_is_named():
    said = r"is '\\ud800': expected text that UTF-8 can hold"
    with pytest.raises(ValueError, match=f"extra key {said}"):
        hash_blocks(range(16), 16, extra_keys=[[("image", "\ud800")]])
    with pytest.raises(ValueError, match=f"seed {said}"):
        hash_blocks(range(16), 16, seed="\ud800")
    with pytest.raises(ValueError, match="parent has 5 bytes: expected 32"):
        hash_blocks(range(50), 16, parent=b"short")
    for parent in (32, "a" * 32, np.zeros(32, np.uint8)):
        with pytest.raises(
            TypeError, match=f"parent has type {type(parent).__name__}: expected 32"
        ):
            hash_blocks(range(50), 16, parent=parent)
    with pytest.raises(TypeError, match="seed is 5: expected a string"):
        hash_blocks(range(50), 16, seed=5)
    with pytest.raises(TypeError, match=r"extra_keys\[0\] is 'lora': expected None or a list"):
        hash_blocks(range(16), 16, extra_keys=["lora"])
    with pytest.raises(TypeError, match=r"extra_keys\[1\] holds 'lora': expected a tuple"):
        hash_blocks(range(32), 16, extra_keys=[None, ["lora"]])
    with pytest.raises(TypeError, match="extra_keys is 'abc': expected a list"):
        hash_blocks(range(48), 16, extra_keys="abc")
    with pytest.raises(TypeError, match=r"extra key 1\.5 has type float"):
        hash_blocks(range(16), 16, extra_keys=[[("x", 1.5)]])
    with pytest.raises(ValueError, match="does not fit in 64 bits"):
        encode_extra_keys([("x", 2**64)])


def request_extra_keys(request, block_size, num_blocks):
    """The definition: the extra keys of each block, in their fixed order."""
    keys = []
    for block in range(num_blocks):
        start, stop = block * block_size, (block + 1) * block_size
        found = []
        if request.lora is not None:
            found.append(("lora", *request.lora))
        for identifier, first, length in request.mm_items:
            if first < stop and first + length > start:
                found.append(("mm", identifier, first - start))
        if request.cache_salt is not None and block == 0:
            found.append(("cache_salt", request.cache_salt))
        if request.prompt_embeds is not None and start < len(request.prompt_embeds):
            content = np.ascontiguousarray(request.prompt_embeds[start:stop])
            found.append(("prompt_embeds", hashlib.sha256(content.tobytes()).digest()))
        keys.append(found)
    return keys


def manager_hashes(request, block_size=16):
    return KVCacheManager(block_size, 100, 2**31 - 1).block_hashes(request)


def defined_hashes(request, block_size=16):
    tokens = request.token_ids
    keys = request_extra_keys(request, block_size, len(tokens) // block_size)
    return hash_blocks(tokens, block_size, extra_keys=keys)


def test_extra_keys_of_a_request_come_in_their_order():
    embeds = np.arange(40 * 3, dtype=np.float32).reshape(40, 3)
    request = Request(
        "r",
        range(64),
        lora=("sql", "/adapters/sql"),
        mm_items=[("img-a", 12, 24), ("img-b", 38, 10)],
        cache_salt="tenant",
        prompt_embeds=embeds,
    )

    def digest(start, stop):
        return ("prompt_embeds", hashlib.sha256(embeds[start:stop].tobytes()).digest())

    lora = ("lora", "sql", "/adapters/sql")
    keys = [
        [lora, ("mm", "img-a", 12), ("cache_salt", "tenant"), digest(0, 16)],
        [lora, ("mm", "img-a", -4), digest(16, 32)],
        [lora, ("mm", "img-a", -20), ("mm", "img-b", 6), digest(32, 40)],
        [lora],
    ]
    assert request_extra_keys(request, 16, 4) == keys
    assert hexes(manager_hashes(request)) == reference(range(64), 16, keys)


items = st.lists(st.tuples(st.text(max_size=300), st.integers(0, 90), st.integers(1, 70)))


@given(
    num_tokens=st.integers(1, 90),
    later=st.lists(st.integers(1, 40), max_size=3),
    block_size=st.integers(1, 20),
    lora=st.none() | st.tuples(st.text(), st.text()),
    items=items,
    salt=st.none() | st.text(),
    num_rows=st.none() | st.integers(0, 120),
)
def test_extra_keys_of_any_request(num_tokens, later, block_size, lora, items, salt, num_rows):
    """Native code against the definition: items that overlap, in any order, of tokens yet to come."""
    rows = None if num_rows is None else np.arange(num_rows * 3, dtype=np.float16).reshape(-1, 3)
    request = Request(
        "r", range(num_tokens), lora=lora, mm_items=items, cache_salt=salt, prompt_embeds=rows
    )
    assert np.array_equal(manager_hashes(request, block_size), defined_hashes(request, block_size))
    for n in later:
        request.append_tokens(range(n))
        assert np.array_equal(
            manager_hashes(request, block_size), defined_hashes(request, block_size)
        )


@pytest.mark.parametrize(
    "options",
    [
        lambda name: {"mm_items": [(name, 40, 30)]},
        lambda name: {"mm_items": [("both", 2, 5), (name, 100, 1)]},
        lambda name: {"prompt_embeds": np.full((70, 2), float(len(name)))},
    ],
)
def test_what_stands_for_tokens_yet_to_come_counts_when_they_come(options):
    """An image that the prompt's chunks had not reached: another image must not hit its blocks."""
    whole, grown, other = (
        Request(str(i), range(n), **options(name))
        for i, (name, n) in enumerate([("a", 112), ("a", 10), ("bb", 10)])
    )
    for request in (grown, other):
        assert len(manager_hashes(request)) == 0
        request.append_tokens(range(10, 112))
    assert np.array_equal(manager_hashes(grown), manager_hashes(whole))
    assert not (manager_hashes(grown)[-1] == manager_hashes(other)[-1]).all()


def test_images_of_a_long_prompt_cost_little():
    """130 images over 131,072 tokens: a Python loop over the blocks took 77 ms more."""
    tokens = np.arange(131_072, dtype=np.int32)
    images = [(f"image-{i}", 1000 * i, 576) for i in range(130)]

    def seconds(**options):
        taken = []
        for _ in range(5):
            start = perf_counter()
            manager_hashes(Request("r", tokens, **options))
            taken.append(perf_counter() - start)
        return min(taken)

    assert seconds(mm_items=images) < 3 * seconds() + 0.01
    # An item may also claim tokens that never come: nothing is made for them beforehand.
    assert seconds(mm_items=[("video", 0, 2**31 - 1)], cache_salt="s") < 3 * seconds() + 0.01


def test_threads_hash_prompts_side_by_side():
    prompts = [np.arange(i, i + 100_000, dtype=np.int32) for i in range(4)]
    want = [hash_blocks(prompt, 16)[-1].tolist() for prompt in prompts]
    found = {}

    def hash_one(i):
        found[i] = hash_blocks(prompts[i], 16)[-1].tolist()

    threads = [threading.Thread(target=hash_one, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(4)] == want


def test_an_image_changes_its_blocks_and_all_later_ones():
    """Images that only the extra keys tell apart: the second must not hit behind the first."""
    manager = KVCacheManager(16, 100, 1000)
    plain, a, b = (
        manager.block_hashes(Request(name, range(80), mm_items=items))
        for name, items in (("p", []), ("a", [("img-a", 20, 4)]), ("b", [("img-b", 20, 4)]))
    )
    assert np.array_equal(plain[0], a[0]) and np.array_equal(a[0], b[0])
    for block in range(1, 5):
        assert len({bytes(h[block]) for h in (plain, a, b)}) == 3


def test_blocks_that_generation_fills_carry_the_adapter_but_not_the_salt():
    manager = KVCacheManager(16, 100, 1000)
    request = Request("r", range(10), lora=("sql", "/a"), cache_salt="t")
    manager.block_hashes(request)
    request.append_tokens(range(10, 48))
    lora = ("lora", "sql", "/a")
    want = reference(range(48), 16, [[lora, ("cache_salt", "t")], [lora], [lora]])
    assert hexes(manager.block_hashes(request)) == want
