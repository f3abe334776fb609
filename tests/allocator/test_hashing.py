# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
import pickle
import random
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache import Admit, KVCacheManager, Request, StepReport, hash_blocks
from kvcache.allocator import check_invariants
from kvcache.allocator.hashing import encode_extra_keys, encoded_blocks
from kvcache.native.load import core
from tests.machinery.shared import shared_file

DIGESTS = {  # a test below compares `core.xxh3_128` with the xxhash package
    "sha256_cbor": lambda data: hashlib.sha256(data).digest(),
    "xxh3_128_cbor": core.xxh3_128,
}


def reference(tokens, size, keys=None, seed="vllm-none-hash", algorithm="sha256_cbor"):
    """Compute the hashes as documented, with a CBOR library and hashlib."""
    cbor2 = pytest.importorskip("cbor2", reason="cbor2 is not installed")
    digest = DIGESTS[algorithm]
    parent, out = digest(cbor2.dumps(seed, canonical=True)), []
    for block in range(len(tokens) // size):
        ids = [int(t) for t in tokens[block * size :][:size]]
        content = [parent, ids, (keys and keys[block]) or None]
        parent = digest(cbor2.dumps(content, canonical=True))
        out.append(parent.hex())
    return out


def hexes(hashes):
    return [bytes(row).hex() for row in hashes]


def unpack(key):
    return tuple(bytes.fromhex(x["bytes_hex"]) if isinstance(x, dict) else x for x in key)


def vector_cases():
    return json.loads(shared_file("vectors/block_hash_sha256_cbor.json").read_text())["cases"]


def test_hash_equals_the_known_digests():
    for case in vector_cases():
        extra = case["extra_keys_per_block"]
        if extra is not None:
            extra = [keys and [unpack(key) for key in keys] for keys in extra]
        found = hash_blocks(
            case["token_ids"], case["block_size"], extra_keys=extra, seed=case["seed"]
        )
        assert hexes(found) == case["block_hashes"], case["name"]


@pytest.mark.parametrize("name", core.sha256_implementations())
def test_every_sha256_implementation_agrees_with_hashlib(name):
    random = np.random.default_rng(0)
    for size in [*range(301), 1000, 4096, 65_537, 1_000_000]:
        data = random.bytes(size)
        assert core.sha256(data, name) == hashlib.sha256(data).digest(), size


def test_unknown_sha256_implementation_is_rejected():
    with pytest.raises(ValueError, match="implementation is 'md5'"):
        core.sha256(b"", "md5")


def test_xxh3_agrees_with_the_xxhash_package():
    xxhash = pytest.importorskip("xxhash", reason="xxhash is not installed")
    random = np.random.default_rng(0)
    for size in [*range(1300), 2047, 2048, 2049, 4096, 8191, 8193, 100_000]:
        data = random.bytes(size)
        assert core.xxh3_128(data) == xxhash.xxh3_128_digest(data), size


@pytest.mark.parametrize("block_size", [1, 4, 16, 64, 512])
def test_xxh3_hashes_the_documented_cbor_encoding(block_size):
    tokens = np.random.default_rng(block_size).integers(0, 152_000, 2100).tolist()
    keys = [[("cache_salt", "t")], *[None] * (2100 // block_size - 1)]
    found = hash_blocks(tokens, block_size, extra_keys=keys, algorithm="xxh3_128_cbor")
    assert found.shape == (2100 // block_size, 16)
    assert hexes(found) == reference(tokens, block_size, keys, algorithm="xxh3_128_cbor")
    rest = hash_blocks(
        tokens[block_size:], block_size, parent=bytes(found[0]), algorithm="xxh3_128_cbor"
    )
    assert np.array_equal(rest, found[1:])


def test_an_unknown_algorithm_is_reported():
    expected = "expected one of sha256_cbor, xxh3_128_cbor"
    for name in ("md5", "engine:x"):
        with pytest.raises(ValueError, match=rf"algorithm is '{name}': {expected}$"):
            hash_blocks(range(16), 16, algorithm=name)
    with pytest.raises(ValueError, match="parent has 32 bytes: expected 16"):
        hash_blocks(range(16), 16, parent=bytes(32), algorithm="xxh3_128_cbor")
    for options, message in (
        ({"hash_algorithm": "md5"}, f"'md5': {expected}, or engine:NAME for hashes"),
        ({"hash_algorithm": "engine:"}, f"'engine:': {expected}, or engine:NAME for hashes"),
        ({"hash_algorithm": "engine:x", "hash_bytes": 0}, "hash_bytes is 0: expected 1 to 32"),
        ({"hash_algorithm": "engine:x", "hash_bytes": 33}, "hash_bytes is 33: expected 1 to 32"),
        ({"hash_bytes": 16}, "hash_bytes is 16: expected 32 with sha256_cbor"),
    ):
        with pytest.raises(ValueError, match=message):
            KVCacheManager(16, 9, 100, **options)


def test_token_ids_below_0_are_hashed_as_negative_integers():
    """Negative token ids are image placeholders. The extra keys identify the image."""
    tokens = [5, -1, -24, -25, -256, -257, -(2**31), 2**31 - 1]
    keys = [[("mm", "a", 1)], None]
    assert hexes(hash_blocks(tokens, 4, extra_keys=keys)) == reference(tokens, 4, keys)


def test_extra_keys_have_the_known_encodings():
    """Expected bytes written by hand from RFC 8949: an array that contains a one-element array."""
    for value, encoded in (
        *((None, "f6"), (False, "f4"), (True, "f5"), (0, "00"), (23, "17"), (24, "1818")),
        *((255, "18ff"), (256, "190100"), (65_535, "19ffff"), (65_536, "1a00010000")),
        *((2**32 - 1, "1affffffff"), (2**32, "1b0000000100000000"), (2**64 - 1, "1b" + "f" * 16)),
        *((-1, "20"), (-24, "37"), (-25, "3818"), (-(2**63), "3b7fffffffffffffff")),
        *(("", "60"), ("é", "62c3a9"), (b"\0\xff", "4200ff")),
    ):
        assert encode_extra_keys([(value,)]).hex() == "8181" + encoded


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


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_every_integer_dtype_gives_the_same_hash(dtype):
    assert np.array_equal(hash_blocks(np.arange(100, dtype=dtype), 16), hash_blocks(range(100), 16))


@pytest.mark.parametrize(("arguments", "error", "message"), [
    (([1, -2, 3], 1), ValueError, r"token_ids\[1\] is -2: expected 0 to 2147483647"),
    ((np.array([5, -1], np.int32), 1), ValueError, r"token_ids\[1\] is -1"),
    ((np.array([2**63], np.uint64), 1), ValueError, r"token_ids\[0\] is 9223372036854775808"),
    (([2**70], 1), ValueError, rf"token_ids\[0\] is {2**70}: expected 0 to 2147483647"),
    (([1.5], 1), TypeError, "token_ids has dtype float64: expected integers"),
    ((np.zeros((2, 2), np.int32), 1), ValueError, "token_ids has 2 dimensions: expected 1"),
    (([1, 2], 0), ValueError, "block_size is 0: expected 1 to 2147483647"),
    (([1, 2], 2**64), ValueError, "block_size is 18446744073709551616: expected at most"),
])  # fmt: skip
def test_invalid_input_is_reported(arguments, error, message):
    with pytest.raises(error, match=message):
        hash_blocks(*arguments)


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"extra_keys": [None]}, ValueError, "extra_keys has 1 entries: expected 3, one per full b"),
    ({"extra_keys": [[("x", 1.5)]] * 3}, TypeError, r"extra key 1\.5 has type float"),
    ({"extra_keys": [[("x", 2**64)]] * 3}, ValueError, "does not fit in 64 bits"),
    ({"extra_keys": [[("x", "\ud800")]] * 3}, ValueError, r"extra key is '\\ud800': expected te"),
    ({"seed": "\ud800"}, ValueError, r"seed is '\\ud800': expected text that UTF-8 can hold"),
    ({"parent": b"short"}, ValueError, "parent has 5 bytes: expected 32"),
])  # fmt: skip
def test_invalid_options_are_reported(options, error, message):
    with pytest.raises(error, match=message):
        hash_blocks(range(48), 16, **options)


def request_extra_keys(request, block_size, num_blocks):
    """Return the extra keys of each block in the documented order."""
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
            mask = np.zeros(len(content), bool)
            if request.prompt_is_token_ids is not None:
                mask = request.prompt_is_token_ids[start:stop]
            if not mask.all():
                found.append(("prompt_embeds", digest_of_embeds(content, mask)))
        keys.append(found)
    return keys


def digest_of_embeds(rows, mask=()):
    """Hash embeddings as documented: SHA-256 of the dtype, the dimensions of a row, and the bytes.

    If a block has tokens and rows, the word "mixed", a byte per token and the used rows follow.
    """
    header = rows.dtype.str + "".join(f",{size}" for size in rows.shape[1:])
    if not any(mask):
        return hashlib.sha256(header.encode() + b":" + rows.tobytes()).digest()
    used = b"".join(row.tobytes() for row, is_token in zip(rows, mask) if not is_token)
    return hashlib.sha256(f"{header},mixed:".encode() + bytes(map(int, mask)) + used).digest()


def manager_hashes(request, block_size=16):
    return KVCacheManager(block_size, 100, 2**31 - 1).cache.hashes(request)


def defined_hashes(request, block_size=16):
    tokens = request.token_ids
    keys = request_extra_keys(request, block_size, len(tokens) // block_size)
    return hash_blocks(tokens, block_size, extra_keys=keys)


def test_embeddings_with_equal_bytes_but_different_type_or_shape_have_different_hashes():
    rows = np.arange(32 * 4, dtype="<f2").reshape(32, 4)
    views = [rows, rows.view("<u2"), rows.view(">f2"), rows.view("<f8"), rows.view("<f4")]
    views += [rows.reshape(32, 2, 2), rows.view("<i2")]
    requests = [Request("r", range(32), prompt_embeds=each) for each in views]
    assert len({manager_hashes(each).tobytes() for each in requests}) == len(views)


items = st.lists(st.tuples(st.text(max_size=300), st.integers(0, 90), st.integers(1, 70)))


@given(
    num_tokens=st.integers(1, 90),
    later=st.lists(st.integers(1, 40), max_size=3),
    block_size=st.integers(1, 20),
    lora=st.none() | st.tuples(st.text(), st.text()) | st.tuples(st.text(), st.text(), st.text()),
    items=items,
    salt=st.none() | st.text(),
    num_rows=st.none() | st.integers(0, 120),
    mask=st.none() | st.lists(st.booleans(), min_size=120, max_size=120) | st.just([True] * 120),
)
def test_native_extra_keys_match_the_definition(
    num_tokens, later, block_size, lora, items, salt, num_rows, mask
):
    """Compares native code with the reference, including overlapping items in any order and items
    that cover future tokens.
    """
    rows = None if num_rows is None else np.arange(num_rows * 3, dtype=np.float16).reshape(-1, 3)
    request = Request(
        "r",
        range(num_tokens),
        lora=lora,
        mm_items=items,
        cache_salt=salt,
        prompt_embeds=rows,
        prompt_is_token_ids=None if rows is None or mask is None else mask[:num_rows],
    )
    assert np.array_equal(manager_hashes(request, block_size), defined_hashes(request, block_size))
    for n in later:
        request.append_tokens(range(n))
        assert np.array_equal(
            manager_hashes(request, block_size), defined_hashes(request, block_size)
        )


MIXED_ROWS = np.arange(32 * 3, dtype=np.float32).reshape(32, 3)


def mixed(mask, rows=MIXED_ROWS, name="r", **options):
    return Request(name, range(32), prompt_embeds=rows, prompt_is_token_ids=mask, **options)


def test_mixed_prompts_are_pickled_forked_and_announced_with_their_masks():
    mask = np.arange(32) % 5 == 0
    request = mixed(mask)
    copied = pickle.loads(pickle.dumps(request))
    assert np.array_equal(manager_hashes(copied), manager_hashes(request))
    mask[:] = True  # the mask was copied
    assert not request.prompt_is_token_ids.all()
    with pytest.raises(ValueError, match="read-only"):
        request.prompt_is_token_ids[0] = False
    manager = KVCacheManager(4, 40, 64, enable_events=True)
    manager.step(new=[request])
    (event,) = manager.cache.drain_events()
    hashes = hash_blocks(event.token_ids, 4, parent=event.parent_hash, extra_keys=event.extra_keys)
    assert np.array_equal(hashes, event.block_hashes)
    assert manager.fork(request, mixed(request.prompt_is_token_ids, name="a")) >= 0
    with pytest.raises(ValueError, match="the child's tokens or extra keys differ"):
        manager.fork(request, mixed(~request.prompt_is_token_ids, name="b"))


@pytest.mark.parametrize(("mask", "rows", "error", "message"), [
    ([True], None, ValueError, r"prompt_is_token_ids is \[True\]: expected None without"),
    ([True] * 31, MIXED_ROWS, ValueError, r"has shape \[31\]: expected \[32\], one entry per"),
    (np.ones((32, 1), bool), MIXED_ROWS, ValueError, r"has shape \[32, 1\]: expected \[32\]"),
    (np.ones(32), MIXED_ROWS, TypeError, "prompt_is_token_ids has dtype float64: expected bool"),
    ([1] * 32, MIXED_ROWS, TypeError, r"prompt_is_token_ids\[0\] is 1"),
])  # fmt: skip
def test_invalid_masks_are_rejected(mask, rows, error, message):
    with pytest.raises(error, match=message):
        mixed(mask, rows)


def test_hashes_as_computed_by_vllm_are_accepted_for_embeddings():
    """vLLM's digest of embeddings has no dtype and row shape, and the mask is not hashed."""
    digests = [hashlib.sha256(MIXED_ROWS[i : i + 16].tobytes()).digest() for i in (0, 16)]
    hashes = hash_blocks([0] * 32, 16, extra_keys=[[("prompt_embeds", each)] for each in digests])
    manager = KVCacheManager(16, 9, 64, hash_algorithm="engine:vllm")
    given = [each.tobytes() for each in hashes]
    request = Request("r", [0] * 32, prompt_embeds=MIXED_ROWS, block_hashes=given)
    manager.step(new=[request])
    assert (manager.cache.find(hashes).device > 0).all()
    own = KVCacheManager(16, 9, 64).cache.hashes(Request("r", [0] * 32, prompt_embeds=MIXED_ROWS))
    assert not np.array_equal(own, hashes)


def test_embedding_rows_without_tokens_are_not_hashed():
    """The request has 3 tokens but 2**31 embedding rows. Hashing all rows would take hours and
    gigabytes.
    """
    rows = np.broadcast_to(np.float32(1), (2**31 - 1, 4))
    request = Request("r", range(3), prompt_embeds=rows)
    few = Request("r", range(3), prompt_embeds=np.ones((4, 4), np.float32))
    manager = KVCacheManager(2, 9, 64)
    assert np.array_equal(manager.cache.hashes(request), manager.cache.hashes(few))
    manager.step(new=[request])
    request.append_tokens([3])
    few.append_tokens([3])
    assert np.array_equal(manager.cache.hashes(request), manager.cache.hashes(few))


def test_more_rows_than_any_request_has_tokens_are_rejected():
    rows = np.broadcast_to(np.float32(1), (2**33, 1))
    with pytest.raises(ValueError, match=r"^prompt_embeds has 8589934592 rows: expected at most"):
        Request("r", [1, 2, 3], prompt_embeds=rows)


def test_many_images_of_a_long_prompt_are_hashed_as_defined():
    images = [(f"image-{i}", 1000 * i, 576) for i in range(130)]
    request = Request("r", np.arange(131_072), mm_items=[*images, ("video", 0, 2**31 - 1)])
    assert np.array_equal(manager_hashes(request), defined_hashes(request))


# --- hashes given by the engine -------------------------------------------------------------------


def given_hashes(tokens, size, num_bytes=32):
    """Return chained hashes from an algorithm that only the engine knows."""
    return [
        hashlib.blake2b(repr(tokens[: n * size]).encode(), digest_size=num_bytes).digest()
        for n in range(1, len(tokens) // size + 1)
    ]


def engine_manager(num_bytes=32, **options):
    return KVCacheManager(
        4, 20, 100, hash_algorithm="engine:blake2b", hash_bytes=num_bytes, **options
    )


@pytest.mark.parametrize("num_bytes", [1, 5, 16, 20, 31, 32])
def test_blocks_are_found_under_their_given_hashes(num_bytes):
    tokens = list(range(30))
    manager = engine_manager(num_bytes, enable_events=True)
    hashes = given_hashes(tokens, 4, num_bytes)
    assert manager.cache.hash_bytes == num_bytes
    assert manager.cache.hash_algorithm == "engine:blake2b"
    first = Request("a", tokens, block_hashes=list(hashes))
    plan = manager.step(new=[first])
    assert [bytes(each) for each in manager.cache.hashes(first)] == hashes
    (event,) = manager.cache.drain_events()
    assert [bytes(each) for each in event.block_hashes] == hashes
    assert (event.hash_algorithm, event.parent_hash) == ("engine:blake2b", None)
    assert manager.cache.find(hashes).device.tolist() == plan.append_ids[0][:7].tolist()
    again = Request("b", tokens, block_hashes=list(hashes))
    assert manager.cache.find_prefix(again).num_tokens == 28
    # Only hashes are compared, so different tokens with equal hashes count as equal.
    other = Request("c", list(range(100, 130)), block_hashes=hashes[:3] + [bytes(num_bytes)] * 4)
    assert manager.cache.find_prefix(other).num_tokens == 12


def test_given_and_computed_hashes_of_one_algorithm_match():
    for algorithm in ("sha256_cbor", "xxh3_128_cbor"):
        manager = KVCacheManager(16, 20, 200, hash_algorithm=algorithm)
        manager.step(new=[Request("computed", range(100))])
        given = [bytes(each) for each in hash_blocks(range(100), 16, algorithm=algorithm)]
        request = Request("given", range(100), block_hashes=given)
        assert manager.cache.find_prefix(request).num_tokens == 96


EXPECTED = "of request 'r' has {} entries: expected 2, one per full block of 4 tokens"


@pytest.mark.parametrize(("given", "error", "message"), [
    ([bytes(32)], ValueError, EXPECTED.format(1)),
    ([bytes(32)] * 3, ValueError, EXPECTED.format(3)),
    ([], ValueError, EXPECTED.format(0)),
    ([bytes(32), bytes(16)], ValueError, r"block_hashes\[1\] of request 'r' has 16 bytes: expect"),
    ([bytes(33), bytes(32)], ValueError, r"block_hashes\[0\] of request 'r' has 33 bytes"),
    (["a" * 32, bytes(32)], TypeError, r"block_hashes\[0\] of request 'r' has type str: expecte"),
    (None, ValueError, r"block_hashes of request 'r' is None: expected its hashes"),
])  # fmt: skip
def test_invalid_given_hashes_are_reported_and_change_nothing(given, error, message):
    manager = engine_manager(enable_events=True)
    request = Request("r", range(10), block_hashes=given)
    for call in (
        lambda: manager.step(new=[request]),
        lambda: manager.cache.find_prefix(request),
        lambda: manager.admit(Admit(request, num_tokens=10), ()),
        lambda: manager.would_fit(request),
        lambda: manager.cache.hashes(request),
    ):
        with pytest.raises(error, match=message):
            call()
    check_invariants(manager)
    assert manager.pool.num_free == 19 and manager.cache.drain_events() == []
    with pytest.raises(TypeError, match="block_hashes has type tuple: expected a list of bytes"):
        Request("r", range(10), block_hashes=(bytes(32),))
    with pytest.raises(ValueError, match=r"has 16 bytes: expected 32"):
        KVCacheManager(4, 20, 100).step(new=[Request("r", [0] * 8, block_hashes=[bytes(16)] * 2)])


def test_tokens_without_a_given_hash_are_rejected_on_arrival():
    """The call that adds the tokens fails, rather than a later call such as a report about other
    requests.
    """
    tokens = list(range(8))
    hashes, mine = given_hashes(tokens, 4), given_hashes(tokens[:7], 4)
    manager, second = (engine_manager(num_preallocate_tokens=0) for _ in range(2))
    request = Request("r", tokens[:7], block_hashes=mine)
    other = Request("s", tokens[:7], block_hashes=hashes[:1])
    for each in (manager, second):
        each.step(new=[request, other])
    expected = "block_hashes of request 'r' has 1 entries: expected 2, one per full block of 4"
    with pytest.raises(ValueError, match=expected):
        request.append_tokens([7, 8])
    mine.append(bytes(31))
    with pytest.raises(ValueError, match=r"block_hashes\[1\] of request 'r' has 31 bytes"):
        request.append_tokens([7])
    assert request.num_tokens == 7
    other.block_hashes.append(hashes[1])
    with pytest.raises(ValueError, match=r"block_hashes\[1\] of request 'r' has 31 bytes"):
        manager.step([1, 0], [1, 1], token_ids=[7, 7])
    assert other.num_tokens == 7 and second.cache.hashes(other).shape == (1, 32)
    mine[1] = hashes[1]
    manager.step([0, 1], [1, 1], token_ids=[7, 7])
    mine.clear()  # hashes that were read are kept
    second.report(StepReport(0, completed=False))
    assert manager.invalidate(manager.block_ids(other)[1:2]) == {"r": 4, "s": 4}
    check_invariants(manager)


@pytest.mark.parametrize("ids", [[1, True], [False, 2], [3, np.True_]])
def test_bools_are_not_token_ids(ids):
    manager = KVCacheManager(4, 50, 100)
    request = Request("r", range(7))
    manager.step(new=[request])
    for call in (
        lambda: Request("s", ids),
        lambda: request.append_tokens(ids),
        lambda: hash_blocks(ids, 1),
        lambda: manager.step([0], [1], token_ids=ids, num_token_ids=[2]),
    ):
        with pytest.raises(TypeError, match=r"token_ids\[.\] is (True|False): expected an integer"):
            call()
    with pytest.raises(TypeError, match="token_ids has dtype bool: expected integers"):
        request.append_tokens(np.array([True, False]))
    assert request.num_tokens == 7
    check_invariants(manager)


class TestHashedTokens:
    """`HashedTokens`, a sequence of block hashes that a request can use instead of a list with one
    object per block.
    """

    @pytest.mark.parametrize("num_lookahead", [0, 1, 3, 30])
    @pytest.mark.parametrize("algorithm", ["sha256_cbor", "xxh3_128_cbor"])
    def test_tokens_appended_in_parts_have_the_documented_hashes(self, algorithm, num_lookahead):
        """With lookahead, the hash of a block also covers the tokens after it."""
        cbor2 = pytest.importorskip("cbor2", reason="cbor2 is not installed")
        rng, size = random.Random(5), 4
        parent = bytes(range(core.digest_bytes(algorithm)))
        for number in range(30):
            tokens = [rng.choice([1, 30, 300, 70_000, 2**31 - 1, -7]) for _ in range(50)]
            hashed, known = core.HashedTokens(size, parent, algorithm, num_lookahead), []
            while len(known) < len(tokens):
                known = tokens[: len(known) + rng.randint(1, 20)]
                num_full = max(len(known) - num_lookahead, 0) // size
                keys = [[("s", i)] if i % 2 else None for i in range(len(hashed), num_full)]
                hashed.extend_to(known, encoded_blocks(keys))
                assert len(hashed) == num_full
                if not num_lookahead and rng.random() < 0.3:  # other tokens after a common prefix
                    kept = rng.randint(0, len(hashed))
                    del hashed[kept:]
                    tokens[kept * size :] = tokens[kept * size :][::-1]
                    known = tokens[: hashed.num_tokens]
                if rng.random() < 0.2:
                    assert hashed.take_tokens().copy().tolist() in (known, [])
            before = parent
            for i, found in enumerate(hashed):
                stop = (i + 1) * size
                covered = tokens[stop : stop + num_lookahead]
                keys = [["s", i]] if i % 2 else None
                last = [keys, *covered] if num_lookahead else keys
                content = [before, tokens[stop - size : stop], last]
                before = DIGESTS[algorithm](cbor2.dumps(content, canonical=True))
                assert found == before, number
            assert hashed.num_tokens == len(tokens)
            assert hashed[-1] == hashed[len(hashed) - 1] and hashed[2:5] == list(hashed)[2:5]

    def test_manager_reads_hashed_tokens_as_tokens_arrive(self):
        manager = KVCacheManager(4, 40, 100, hash_algorithm="engine:x")
        tokens = list(range(18))
        hashed = core.HashedTokens(4, bytes(32), "sha256_cbor")
        hashed.extend_to(tokens[:17])
        request = Request("a", tokens, block_hashes=hashed)
        manager.admit(Admit(request, num_tokens=18), ())
        tokens += [99, 98, 97, 96, 95]
        with pytest.raises(ValueError, match="hashes of 4 blocks are known: expected 5"):
            request.append_tokens(tokens[18:])
        hashed.extend_to(tokens)
        assert request.num_tokens == 18 and len(hashed.take_tokens()) == 0
        request.append_tokens(tokens[18:])
        manager.extend(request, 5)
        assert request.token_ids.tolist() == tokens
        assert manager.cache.hashes(request).tobytes() == b"".join(hashed)
        manager.free(request)
        again = Request("b", [*tokens, 1], block_hashes=[*hashed, bytes(32)])
        assert manager.cache.find_prefix(again).num_tokens == 20

    def test_blocks_are_cached_once_the_tokens_that_their_hashes_cover_are_known(self):
        manager = KVCacheManager(
            4, 40, 100, hash_algorithm="engine:x", num_hash_lookahead_tokens=2, enable_events=True
        )
        tokens = list(range(12))
        hashed = core.HashedTokens(4, bytes(32), "sha256_cbor", 2)
        hashed.extend_to(tokens)
        request = Request("a", tokens, block_hashes=hashed, lora=("x", "/x"))
        manager.admit(Admit(request, num_tokens=12), ())
        assert len(manager.cache.hashes(request)) == 2
        for token, num_cached in ((12, 2), (13, 3), (14, 3)):
            tokens.append(token)
            hashed.extend_to(tokens)
            request.append_tokens([token])
            manager.extend(request, 1)
            assert (manager.cache.find(list(hashed)).device > 0).sum() == num_cached == len(hashed)
        (event,) = manager.cache.drain_events()
        assert event.token_ids.tolist() == tokens[:12]
        assert event.lookahead_token_ids.tolist() == [[4, 5], [8, 9], [12, 13]]
        manager.free(request)
        check_invariants(manager)
        # The hash of the last block also covers the 2 tokens after it.
        for num_tokens, num_hit in ((12, 8), (13, 8), (14, 12)):
            given = list(hashed)[: (num_tokens - 2) // 4]
            other = Request(f"b{num_tokens}", tokens[:num_tokens], block_hashes=given)
            assert manager.cache.find_prefix(other).num_tokens == num_hit

    def test_lookahead_is_rejected_if_hashes_cover_no_later_tokens(self):
        with pytest.raises(
            ValueError, match="num_hash_lookahead_tokens is 1: expected 0 with sha2"
        ):
            KVCacheManager(4, 40, 100, num_hash_lookahead_tokens=1)
        manager = KVCacheManager(4, 40, 100, hash_algorithm="engine:x", num_hash_lookahead_tokens=1)
        request = Request("r", range(8), block_hashes=[bytes(32)] * 2)
        with pytest.raises(ValueError, match="expected 1, one per full block of 4 tokens followed"):
            manager.step(new=[request])

    def test_invalid_arguments_change_nothing(self):
        hashed = core.HashedTokens(4, bytes(32), "sha256_cbor")
        hashed.extend_to(list(range(9)))
        for call, error, message in (
            (lambda: hashed.extend_to([1, 2]), ValueError, "token_ids has 2 entries"),
            (lambda: hashed.extend_to((1, 2)), TypeError, "list"),
            (lambda: hashed.extend_to([*range(9), 1.5]), TypeError, "not an int"),
            (lambda: hashed.extend_to([*range(9), 2**31]), ValueError, "32-bit"),
            (lambda: hashed.extend_to(list(range(12)), []), ValueError, "extra_keys has 0 entries"),
            (lambda: hashed.__delitem__(slice(0, 1)), ValueError, "the last ones"),
            (lambda: hashed[2], IndexError, "there are 2"),
            (lambda: core.HashedTokens(0, bytes(32), "sha256_cbor"), ValueError, "block_size is 0"),
            (lambda: core.HashedTokens(4, b"1", "sha256_cbor"), ValueError, "parent has 1 bytes"),
            (lambda: core.HashedTokens(4, b"1", "md5"), ValueError, "'md5' is unknown"),
        ):
            with pytest.raises(error, match=re.escape(message)):
                call()
            assert len(hashed) == 2 and hashed.num_tokens == 9


@pytest.mark.parametrize("num_blocks", [1, 5, 64])
def test_reading_embeddings_may_hash_another_request(num_blocks):
    """Regression: both calls stored their hashes in the same buffer."""
    manager, other = (KVCacheManager(16, 4000, 100_000) for _ in range(2))
    rows = np.arange(10 * 16 * 4, dtype=np.float32).reshape(-1, 4)

    class Rows(np.ndarray):
        def __getitem__(self, key):
            other.cache.hashes(Request("other", range(num_blocks * 16)))
            return super().__getitem__(key)

    tokens = list(range(10 * 16))
    expected = manager.cache.hashes(Request("a", tokens, prompt_embeds=rows))
    found = manager.cache.hashes(Request("b", tokens, prompt_embeds=rows.view(Rows)))
    assert found.tobytes() == expected.tobytes()
