import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import Request, hash_blocks
from kvcache.allocator.hashing import encode_extra_keys, request_extra_keys
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
from kvcache._native import core
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
        (([1, 2], 0), ValueError, "block_size is 0: expected 1 or more"),
        (([1, 2], -3), ValueError, "block_size is -3"),
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
    with pytest.raises(ValueError, match="parent has 5 bytes: expected 32"):
        hash_blocks(range(50), 16, parent=b"short")
    with pytest.raises(TypeError, match=r"extra key 1\.5 has type float"):
        hash_blocks(range(16), 16, extra_keys=[[("x", 1.5)]])
    with pytest.raises(ValueError, match="does not fit in 64 bits"):
        encode_extra_keys([("x", 2**64)])


def test_extra_keys_of_a_request_come_in_their_order():
    embeds = np.arange(40 * 3, dtype=np.float32).reshape(40, 3)
    request = Request(
        "r",
        range(40),
        lora=("sql", "/adapters/sql"),
        mm_items=[("img-a", 12, 24), ("img-b", 38, 10)],
        cache_salt="tenant",
        prompt_embeds=embeds,
    )

    def digest(start, stop):
        return ("prompt_embeds", hashlib.sha256(embeds[start:stop].tobytes()).digest())

    lora = ("lora", "sql", "/adapters/sql")
    assert request_extra_keys(request, 16, 0, 4) == [
        [lora, ("mm", "img-a", 12), ("cache_salt", "tenant"), digest(0, 16)],
        [lora, ("mm", "img-a", -4), digest(16, 32)],
        [lora, ("mm", "img-a", -20), ("mm", "img-b", 6), digest(32, 40)],
        [lora],
    ]


def test_an_image_changes_its_blocks_and_all_later_ones():
    """Images that only the extra keys tell apart: the second must not hit behind the first."""
    from kvcache import KVCacheManager

    manager = KVCacheManager(16, 100, 1000)
    plain, a, b = (
        manager.block_hashes(Request(name, range(80), mm_items=items))
        for name, items in (("p", []), ("a", [("img-a", 20, 4)]), ("b", [("img-b", 20, 4)]))
    )
    assert np.array_equal(plain[0], a[0]) and np.array_equal(a[0], b[0])
    for block in range(1, 5):
        assert len({bytes(h[block]) for h in (plain, a, b)}) == 3


def test_blocks_that_generation_fills_carry_the_adapter_but_not_the_salt():
    from kvcache import KVCacheManager

    manager = KVCacheManager(16, 100, 1000)
    request = Request("r", range(10), lora=("sql", "/a"), cache_salt="t")
    manager.block_hashes(request)
    request.append_tokens(range(10, 48))
    lora = ("lora", "sql", "/a")
    want = reference(range(48), 16, [[lora, ("cache_salt", "t")], [lora], [lora]])
    assert hexes(manager.block_hashes(request)) == want
