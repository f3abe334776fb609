# SPDX-License-Identifier: Apache-2.0
"""Integers with more digits than Python converts to text (4,300) are rejected with an error that
names the argument.
"""

import ast

import numpy as np
import pytest
import torch

import kvcache
from kvcache import (
    Admit,
    BlockPool,
    CacheOptions,
    ContextParallel,
    GroupSpec,
    KVCacheManager,
    KVStorage,
    LayerSpec,
    Pages,
    Request,
    StepReport,
    hash_blocks,
    plan_cache,
)
from kvcache.checks import byte_count, integer, number, seconds, shown
from kvcache.compat import BlockSpaceManager, copy_kv_blocks
from kvcache.compat.vllm_block_table import BlockTable, MultiGroupBlockTable
from kvcache.layouts import AttentionBackend
from kvcache.transfer import permute_received_blocks
from tests.machinery.shared import REPO

HUGE = 10**5000
LAYER = LayerSpec("a", "full_attention", 16, 1, 8)


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


def admitted():
    made = manager()
    request = Request("r", range(20))
    made.admit(Admit(request, num_tokens=20), ())
    return made, request


def table():
    return BlockTable(16, 4, 8, 64)


CALLS = {
    "checks": {
        "size": lambda: integer(HUGE, "size"),
        "share": lambda: number(HUGE, "share"),
        "wait": lambda: seconds(HUGE, "wait"),
        "room": lambda: byte_count(HUGE, "room"),
    },
    "KVCacheManager": {
        "block_size": lambda: KVCacheManager(HUGE, 9, 128),
        "num_gpu_blocks": lambda: KVCacheManager(16, HUGE, 128),
        "max_model_len": lambda: KVCacheManager(16, 9, HUGE),
        "window": lambda: KVCacheManager(16, 9, 128, sliding_window=HUGE),
        "num_preallocate_tokens": lambda: manager(num_preallocate_tokens=HUGE),
        "num_host_blocks": lambda: manager(num_host_blocks=HUGE),
        "watermark": lambda: manager(watermark=HUGE),
        "hash_block_size": lambda: manager(hash_block_size=HUGE),
    },
    "calls of KVCacheManager": {
        "rows": lambda: manager().step([HUGE], [1]),
        "num_tokens": lambda: manager().step([0], [HUGE]),
        "token_ids": lambda: manager().step([0], [1], token_ids=[HUGE]),
        "new[0].num_tokens": lambda: manager().step(
            new=[Admit(Request("r", [1]), num_tokens=HUGE)]
        ),
        "num_lookahead_tokens": lambda: manager().step(num_lookahead_tokens=HUGE),
        "step_id": lambda: manager().abort(HUGE),
        "step_id of a report": lambda: manager().report(StepReport(HUGE, True)),
        "ids": lambda: manager().invalidate([HUGE]),
        "seconds": lambda: manager().cache.set_now(HUGE),
        "group": lambda: manager().cache.find(np.zeros((1, 32), np.uint8), HUGE),
        "num_tokens of slots": lambda: manager().admit(
            Admit(Request("r", [1]), num_tokens=HUGE), ()
        ),
        "computed_blocks": lambda: manager().admit(
            Admit(Request("r", [1, 2]), num_tokens=1), [HUGE]
        ),
        "num_tokens of more slots": lambda: (lambda m, r: m.extend(r, HUGE))(*admitted()),
        "num_running_requests": lambda: (lambda m, r: m.cache.num_common_prefix_blocks(r, HUGE))(
            *admitted()
        ),
        "starts": lambda: admitted()[0].advance([0], [HUGE], [1]),
    },
    "other parts of the allocator": {
        "token_ids": lambda: Request("r", [HUGE]),
        "mm_items[0]": lambda: Request("r", [1], mm_items=[("i", HUGE, 1)]),
        "num_encoder_tokens": lambda: Request("r", [1], num_encoder_tokens=HUGE),
        "lora": lambda: Request("r", [1], lora=[HUGE]),
        "cache_salt": lambda: Request("r", [1], cache_salt=HUGE),
        "num_blocks": lambda: BlockPool(HUGE),
        "n": lambda: BlockPool(9).allocate(HUGE),
        "block_size": lambda: hash_blocks([1], HUGE),
        "extra key": lambda: hash_blocks([1], 1, extra_keys=[[("a", HUGE)]]),
        "eviction_options": lambda: CacheOptions(eviction_options={"a": HUGE}, eviction="learned"),
        "num_cpu_blocks": lambda: BlockSpaceManager(4, 9, HUGE),
        "watermark": lambda: BlockSpaceManager(4, 9, 9, watermark=HUGE),
        "get_len() of seq": lambda: BlockSpaceManager(4, 9, 9).allocate(Group()),
        "num_lookahead_slots": lambda: BlockSpaceManager(4, 9, 9).can_allocate(Group(), HUGE),
    },
    "specs and plans": {
        "block_size": lambda: LayerSpec("a", "full_attention", HUGE, 1, 8),
        "head_size": lambda: LayerSpec("a", "full_attention", 16, 1, HUGE),
        "window": lambda: GroupSpec("sliding_window", 4, {"window": HUGE}),
        "dcp_world_size": lambda: ContextParallel(dcp_world_size=HUGE),
        "max_model_len": lambda: plan_cache([LAYER], 2**20, max_model_len=HUGE),
        "budget_bytes": lambda: plan_cache([LAYER], HUGE, max_model_len=64),
    },
    "worker": {
        "block_size": lambda: BlockTable(HUGE, 4, 8, 64),
        "max_num_reqs": lambda: BlockTable(16, HUGE, 8, 64),
        "row": lambda: table().add_row([1], HUGE),
        "block_ids": lambda: table().add_row([HUGE], 0),
        "num_reqs": lambda: table().commit_block_table(HUGE),
        "num_tokens": lambda: table().commit_slot_mapping(HUGE),
        "positions": lambda: table().compute_slot_mapping([0], [HUGE]),
        "block_sizes": lambda: MultiGroupBlockTable(4, 64, 32, False, "cpu", [HUGE], [HUGE]),
        "num_blocks": lambda: KVStorage(HUGE, 16, 2, 8),
        "num_blocks of pages": lambda: Pages.allocate(HUGE, [[8]]),
        "sizes[0][0]": lambda: Pages.allocate(2, [[HUGE]]),
        "pairs": lambda: Pages.allocate(2, [[8]]).copy([(0, HUGE)]),
        "region": lambda: Pages.allocate(2, [[8]]).fragment(HUGE),
        "block_dim": lambda: Pages.over([torch.zeros(2, 2)], HUGE),
    },
    "transfer": {
        "src_block_ids": lambda: copy_kv_blocks(
            {"a": torch.zeros(2, 2)}, {"a": torch.zeros(2, 2)}, [HUGE], [1], "h2d"
        ),
        "remote_block_size": lambda: permute_received_blocks(
            torch.zeros(2, 2, 2, 2), [0], remote_block_size=HUGE
        ),
        "indices": lambda: permute_received_blocks(torch.zeros(2, 2, 2, 2), [HUGE]),
        "name": lambda: AttentionBackend(HUGE, HUGE, HUGE),
    },
}


@pytest.mark.parametrize(
    ("name", "call"),
    [(name, call) for calls in CALLS.values() for name, call in calls.items()],
    ids=[f"{where}: {name}" for where, calls in CALLS.items() for name in calls],
)
def test_integer_of_5000_digits_is_rejected_by_name(name, call):
    with pytest.raises((ValueError, TypeError)) as error:
        call()
    text = str(error.value)
    assert name.split(" of ")[0] in text, text
    assert "4300" not in text and "Exceeds the limit" not in text
    assert len(text) < 1000


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


def modules():
    root = REPO / "kvcache"
    own = ("allocator", "worker", "kinds", "native")
    found = [path for folder in own for path in (root / folder).rglob("*.py")]
    others = (
        "transfer/receive.py",
        "compat/kv_transfer/kv_blocks.py",
        "compat/kv_transfer/postprocess.py",
    )
    return sorted([*found, *root.glob("*.py"), *(root / name for name in others)])


@pytest.mark.slow
def test_errors_format_values_with_the_function_that_never_raises():
    """An error message with `{value!r}: expected` would itself raise if the value cannot be
    converted to text.
    """
    assert kvcache.__file__ and len(modules()) > 50
    found = []
    for path in modules():
        tree = ast.parse(path.read_text())
        for text in (node for node in ast.walk(tree) if isinstance(node, ast.JoinedStr)):
            for value, after in zip(text.values, text.values[1:]):
                if (
                    isinstance(value, ast.FormattedValue)
                    and value.conversion == ord("r")
                    and isinstance(after, ast.Constant)
                    and str(after.value).startswith(": expected")
                ):
                    found.append(f"{path.relative_to(REPO)}:{value.lineno}")
    assert not found
