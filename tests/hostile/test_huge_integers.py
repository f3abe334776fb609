# SPDX-License-Identifier: Apache-2.0
"""Integers with more digits than Python converts to text (4,300) are rejected with an error that
names the argument.
"""

import pytest

from kvcache import (
    Admit,
    CacheOptions,
    GroupSpec,
    KVCacheManager,
    Pages,
    Request,
    StepReport,
    hash_blocks,
)
from kvcache.checks import byte_count, integer, number, seconds, shown
from kvcache.compat import BlockSpaceManager
from kvcache.layouts import AttentionBackend
from tests.machinery.hostile.messages import is_clear
from tests.machinery.hostile.world import huge_calls

HUGE = 10**5000


class Seq:
    seq_id, status = 1, "WAITING"

    def get_len(self):
        return HUGE

    def get_token_ids(self):
        return [HUGE]


class Group:
    request_id = "g"

    def get_seqs(self):
        return [Seq()]

    def is_encoder_decoder(self):
        return False


def manager(**options):
    return KVCacheManager(16, 9, 128, **options)


# Huge integers inside another argument. The others are derived from the right calls.
CALLS = {
    "new[0].num_tokens": lambda: manager().step(new=[Admit(Request("r", [1]), num_tokens=HUGE)]),
    "step_id": lambda: manager().report(StepReport(HUGE, True)),
    "num_tokens": lambda: manager().admit(Admit(Request("r", [1]), num_tokens=HUGE), ()),
    "mm_items[0]": lambda: Request("r", [1], mm_items=[("i", HUGE, 1)]),
    "lora": lambda: Request("r", [1], lora=[HUGE]),
    "cache_salt": lambda: Request("r", [1], cache_salt=HUGE),
    "extra key": lambda: hash_blocks([1], 1, extra_keys=[[("a", HUGE)]]),
    "eviction_options": lambda: CacheOptions(eviction_options={"a": HUGE}, eviction="learned"),
    "get_len() of seq": lambda: BlockSpaceManager(4, 9, 9).allocate(Group()),
    "num_lookahead_slots": lambda: BlockSpaceManager(4, 9, 9).can_allocate(Group(), HUGE),
    "watermark": lambda: manager(watermark=HUGE),
    "window": lambda: GroupSpec("sliding_window", 4, {"window": HUGE}),
    "sizes[0][0]": lambda: Pages.allocate(2, [[HUGE]]),
    "pairs": lambda: Pages.allocate(2, [[8]]).copy([(0, HUGE)]),
    "size": lambda: integer(HUGE, "size"),
    "share": lambda: number(HUGE, "share"),
    "wait": lambda: seconds(HUGE, "wait"),
    "room": lambda: byte_count(HUGE, "room"),
    "name": lambda: AttentionBackend(HUGE, HUGE, HUGE),
}
# Calls that accept any integers: what receives their result checks it, or it is only counted with.
ANY = (
    *("kvcache.Admit", "kvcache.External", "kvcache.Pages", "kvcache.StepPlan"),
    *("kvcache.StepReport", "kvcache.compat.KVConnectorOutput", "kvcache.events", "kvcache.kinds"),
    *("kvcache.formats.StoredSizes", "kvcache.formats.CacheParts"),
    *("kvcache.layouts.AttentionBackend.v_size", "kvcache.worker.HostDeviceBuffer.upload"),
    *("kvcache_exchange", "kvcache_serve"),
)


@pytest.mark.parametrize(("name", "call"), CALLS.items(), ids=CALLS)
def test_integer_of_5000_digits_is_rejected_by_name(name, call):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    assert name in str(error.value)
    assert "4300" not in str(error.value) and len(str(error.value)) < 1000


@pytest.mark.slow
def test_every_public_call_rejects_integers_of_5000_digits_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    num_refused = 0
    for call, name, error in huge_calls(HUGE):
        if error is None:
            assert call.startswith(ANY), (call, name)
            continue
        num_refused += 1
        text = str(error)
        assert is_clear(error, text, [name]), (call, name, text)
        assert "4300" not in text and len(text) < 1000, (call, name)
    assert num_refused > 600


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (HUGE, f"an integer of {HUGE.bit_length()} bits"),
        (-HUGE, f"an integer of {HUGE.bit_length()} bits"),
        ([HUGE], "a list"),
        ({"a": HUGE}, "a dict"),
        (range(3), "range(0, 3)"),
        ("x" * 300, "'" + "x" * 199 + "..."),
    ],
    ids=["positive", "negative", "list", "dict", "range", "string"],
)
def test_every_value_can_be_formatted(value, text):
    assert shown(value) == text


def test_value_whose_repr_raises_is_formatted_as_its_type():
    class Broken:
        def __repr__(self):
            raise RuntimeError("no repr")

    assert shown(Broken()) == "a Broken"
    with pytest.raises(TypeError, match=r"^block_size is a Broken: expected an integer"):
        KVCacheManager(Broken(), 9, 128)
    with pytest.raises(TypeError, match=r"^request.num_tokens is a Broken: expected an integer"):
        manager().admit(Admit(Request("r", [1]), num_tokens=Broken()), ())
