# SPDX-License-Identifier: Apache-2.0
"""The cache shapes and memory orders of attention backends, and the layouts that connectors require."""

import subprocess
import sys

import numpy as np
import pytest

from kvcache import layouts
from kvcache.layouts import (
    AttentionBackend,
    backend,
    backend_names,
    choose_layout,
    described_backend,
    register_backend,
)

NB, BS, H, D, L = 7, 16, 4, 64, 3
SIZES = {"kv": 2, "block": NB, "token": BS, "head": H, "element": D, "layer": L}


@pytest.fixture
def registry(monkeypatch):
    """Redirect registrations to a copy of the registry."""
    monkeypatch.setattr(layouts, "_BACKENDS", dict(layouts._BACKENDS))


@pytest.mark.parametrize(("name", "shape"), [
    ("FLASH_ATTN", (2, NB, BS, H, D)),
    ("FLASHINFER", (NB, 2, BS, H, D)),
    ("TRITON_ATTN", (NB, 2, BS, H, D)),
    ("MLA", (NB, BS, D)),
    ("FLASH_ATTN_DIFFKV", (NB, BS, H, 2 * D)),
])  # fmt: skip
def test_built_in_backends_have_the_expected_shapes(name, shape):
    assert backend(name).shape(NB, BS, H, D) == shape
    assert backend(name).shape(num_blocks=NB, block_size=BS, num_kv_heads=H, head_size=D) == shape
    assert backend(name).blocks_first == (
        name in ("FLASHINFER", "TRITON_ATTN", "FLASH_ATTN_DIFFKV")
    )
    assert backend(name).is_mla == (name == "MLA")


@pytest.mark.parametrize(("name", "layout", "cross_layers", "order"), [
    ("FLASH_ATTN", "NHD", False, (0, 1, 2, 3, 4)),
    ("FLASH_ATTN", "HND", False, (0, 1, 3, 2, 4)),
    ("FLASH_ATTN", "NHD", True, (2, 0, 1, 3, 4, 5)),
    ("FLASH_ATTN", "HND", True, (2, 4, 0, 1, 3, 5)),
    ("FLASHINFER", "NHD", True, (1, 0, 2, 3, 4, 5)),
    ("FLASHINFER", "HND", True, (1, 2, 4, 0, 3, 5)),
    ("TRITON_ATTN", "HND", True, (1, 4, 0, 2, 3, 5)),
    ("FLASH_ATTN_DIFFKV", "HND", False, (0, 2, 1, 3)),
    ("FLASH_ATTN_DIFFKV", "HND", True, (1, 3, 0, 2, 4)),
    ("MLA", "HND", False, (0, 1, 2)),
    ("MLA", "HND", True, (1, 0, 2, 3)),
])  # fmt: skip
def test_stride_orders_equal_the_engines(name, layout, cross_layers, order):
    assert backend(name).stride_order(layout, cross_layers) == order


@pytest.mark.parametrize("name", ["FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "MLA"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("num_layers", [None, L])
def test_stride_order_gives_the_memory_order(name, layout, num_layers):
    described = backend(name)
    logical = described.shape(NB, BS, H, D)
    logical = logical if num_layers is None else (num_layers, *logical)
    order = described.stride_order(layout, num_layers is not None)
    physical = np.zeros(logical).transpose(order).shape
    roles = described.memory_order(layout, num_layers is not None)
    assert physical == tuple(SIZES[role] for role in roles)
    if "head" in roles and layout == "HND":
        assert roles.index("head") < roles.index("token")
    if "head" in roles and layout == "NHD":
        assert roles.index("token") < roles.index("head")


def test_k_and_v_may_have_different_head_sizes():
    joined = backend("FLASH_ATTN_DIFFKV")
    assert joined.shape(NB, BS, H, 192, v_head_size=128) == (NB, BS, H, 320)
    assert joined.shape(NB, BS, H, 192, 192) == joined.shape(NB, BS, H, 192)
    assert backend("MLA").shape(NB, BS, 1, 512, v_head_size=64) == (NB, BS, 576)
    assert backend("FLASH_ATTN").shape(NB, BS, H, D, D) == (2, NB, BS, H, D)
    with pytest.raises(ValueError, match=r"head_size is 192, v_head_size is 128: .*FLASH_ATTN"):
        backend("FLASH_ATTN").shape(NB, BS, H, 192, 128)


@pytest.mark.parametrize(("dims", "shape"), [
    (("block", "token", "head", "element"), (NB, BS, H, D)),
    (("block", "token", "element"), (NB, BS, D)),
])  # fmt: skip
def test_backend_without_v_has_no_v_size(dims, shape):
    keys = AttentionBackend("KEYS", dims)
    assert keys.shape(NB, BS, H, D) == keys.shape(NB, BS, H, D, v_head_size=0) == shape
    for size in (D, D // 2):
        message = f"v_head_size is {size}: expected 0 or None for backend 'KEYS'"
        with pytest.raises(ValueError, match=message):
            keys.shape(NB, BS, H, D, v_head_size=size)
    with pytest.raises(ValueError, match=r"v_head_size is 0: .*FLASH_ATTN"):
        backend("FLASH_ATTN").shape(NB, BS, H, D, 0)


def test_custom_backend_can_be_registered(registry):
    mine = AttentionBackend(
        "MINE",
        ("block", "token", "kv", "head", "element"),
        hnd=("head", "block", "kv", "token", "element"),
        nhd_cross_layers=("layer", "block", "token", "kv", "head", "element"),
    )
    assert register_backend(mine) is mine
    assert backend("MINE") is mine and "MINE" in backend_names()
    assert mine.shape(NB, BS, H, D) == (NB, BS, 2, H, D)
    assert mine.stride_order("HND") == (3, 0, 2, 1, 4)
    assert mine.stride_order("NHD", cross_layers=True) == (0, 1, 2, 3, 4, 5)
    with pytest.raises(
        ValueError, match=r"'HND' with cross_layers: .* backend 'MINE' has no order"
    ):
        mine.stride_order("HND", cross_layers=True)


def test_backend_name_must_be_unique(registry):
    dims = ("block", "token", "head", "element")
    first = register_backend(AttentionBackend("AGAIN", dims))
    register_backend(AttentionBackend("AGAIN", list(dims)))
    with pytest.raises(ValueError, match="name is 'AGAIN', which is already registered for"):
        register_backend(AttentionBackend("AGAIN", ("block", "head", "token", "element")))
    assert backend("AGAIN") == first
    with pytest.raises(TypeError, match="backend is 'MLA': expected an AttentionBackend"):
        register_backend("MLA")


def test_unknown_backend_error_lists_known_backends():
    with pytest.raises(ValueError, match="backend is 'FLASH': expected one of ") as error:
        backend("FLASH")
    assert str(error.value).endswith(", ".join(backend_names()))
    built_in = {"FLASHINFER", "FLASH_ATTN", "FLASH_ATTN_DIFFKV", "MLA", "TRITON_ATTN"}
    assert built_in <= set(backend_names())


class Engine:
    """One version of an engine's backend class, with the role of each dimension and the memory
    order for each layout.
    """

    name, dims, layout = "TRITON_ATTN", ("block", "kv", "token", "head", "element"), "HND"
    orders, packed_orders = {}, {}

    @classmethod
    def get_name(cls):
        return cls.name

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"
    ):
        assert block_size % 16 == 0
        sizes = {"block": num_blocks, "token": block_size, "head": num_kv_heads, "kv": 2}
        sizes |= {"element": head_size, "both": 2 * head_size}
        return tuple(sizes[role] for role in cls.dims)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension=False):
        orders = cls.packed_orders if include_num_layers_dimension else cls.orders
        if cls.layout not in orders:
            raise NotImplementedError
        return orders[cls.layout]


def version(**changes):
    return type("Engine", (Engine,), changes)


TOKENS_FIRST, HEADS_FIRST = (0, 1, 2, 3, 4), (0, 1, 3, 2, 4)
MLA_DIMS = ("block", "token", "element")
# Versions of backends in different engine releases, with the expected order of dimensions if the
# engine is configured with HND.
VERSIONS = {
    "TRITON_ATTN that has no orders": (
        version(), ("block", "kv", "token", "head", "element"),
        ("layer", "block", "kv", "token", "head", "element"),
    ),
    "TRITON_ATTN that ignores HND": (
        version(orders={"HND": TOKENS_FIRST}, packed_orders={"HND": (1, 0, 2, 3, 4, 5)}),
        ("block", "kv", "token", "head", "element"),
        ("block", "layer", "kv", "token", "head", "element"),
    ),
    "TRITON_ATTN with heads outermost": (
        version(orders={"HND": HEADS_FIRST}, packed_orders={"HND": (1, 4, 0, 2, 3, 5)}),
        ("block", "kv", "head", "token", "element"),
        ("block", "head", "layer", "kv", "token", "element"),
    ),
    "TRITON_ATTN with K and V in one dimension": (
        version(dims=("block", "head", "token", "both"), orders={"HND": (0, 1, 2, 3)},
                packed_orders={"HND": (1, 0, 2, 3, 4)}),
        ("block", "head", "token", "element"), ("block", "layer", "head", "token", "element"),
    ),
    "MLA packed by blocks": (
        version(dims=MLA_DIMS, orders={"HND": (0, 1, 2)}, packed_orders={"HND": (1, 0, 2, 3)}),
        ("block", "token", "element"), ("block", "layer", "token", "element"),
    ),
    "MLA that is not packed": (
        version(dims=MLA_DIMS, orders={"HND": (0, 1, 2)}, packed_orders={"HND": (0, 1, 2, 3)}),
        ("block", "token", "element"), ("layer", "block", "token", "element"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", VERSIONS)
def test_engine_classes_of_each_version_are_described(case):
    engine, order, packed = VERSIONS[case]
    found = AttentionBackend.from_engine(engine)
    assert found.name == "TRITON_ATTN" and described_backend(engine) == found
    for layout in ("NHD", "HND"):  # layout with which the engine is configured
        assert found.memory_order(layout) == order
        assert found.memory_order(layout, cross_layers=True) == packed
    assert found.is_mla == case.startswith("MLA")
    assert found.shape(NB, BS, H, D) == engine.get_kv_cache_shape(NB, BS, H, D)


def test_engine_class_without_the_layers_argument_is_described():
    class Old(version(orders={"HND": HEADS_FIRST})):
        @classmethod
        def get_kv_cache_stride_order(cls):
            return cls.orders["HND"]

    found = AttentionBackend.from_engine(Old)
    assert found.memory_order() == ("block", "kv", "head", "token", "element")
    assert found.memory_order(cross_layers=True)[0] == "layer"

    class OneHead(version(dims=MLA_DIMS)):
        @classmethod
        def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size):
            if num_kv_heads != 1:
                raise ValueError("one head")
            return super().get_kv_cache_shape(num_blocks, block_size, 1, head_size)

    assert AttentionBackend.from_engine(OneHead).is_mla


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (version(dims=("kv", "token", "head", "element")), "expected one dimension of each"),
        (version(orders={"HND": (0, 1, 2, 3, 3)}), r"stride order \(0, 1, 2, 3, 3\): expected a perm"),
        (
            version(get_kv_cache_shape=lambda num_blocks, block_size, num_kv_heads, head_size:
                    (num_blocks, block_size, num_kv_heads, head_size + 16)),
            r"the shape \(7919, 4096, 11, 592\) for 7919 blocks .*expected only dimensions of these "
            r"sizes",
        ),
    ],
)  # fmt: skip
def test_indescribable_engine_class_is_rejected(engine, message):
    with pytest.raises(ValueError, match=message):
        AttentionBackend.from_engine(engine)
    with pytest.raises(TypeError, match="backend is 3: expected a name"):
        described_backend(3)


GOOD = ("block", "kv", "token", "head", "element")


@pytest.mark.parametrize(("call", "message"), [
    (lambda: AttentionBackend("", GOOD), "name is ''"),
    (lambda: AttentionBackend("X", ("block", "token")), "dims is .*element"),
    (lambda: AttentionBackend("X", (*GOOD, "head")), "dims is .*at most once"),
    (lambda: AttentionBackend("X", (*GOOD, "layer")), "dims is .*'layer'"),
    (lambda: AttentionBackend("X", GOOD, unequal_head_sizes=True), "no 'kv'"),
    (lambda: AttentionBackend("X", GOOD, nhd=GOOD[1:]), "nhd is .*expected a permutation of"),
    (lambda: AttentionBackend("X", GOOD, hnd=("layer", *GOOD)), "hnd is "),
    (lambda: AttentionBackend("X", GOOD, hnd_cross_layers=GOOD), "hnd_cross_layers is "),
    (lambda: backend("MLA").stride_order("NDH"), "layout is 'NDH': expected 'NHD' or 'HND'"),
    (lambda: backend("MLA").shape(-1, BS, 1, D), "num_blocks is -1"),
    (lambda: backend("MLA").shape(NB, BS, 1, D, -1), "v_head_size is -1"),
])  # fmt: skip
def test_invalid_arguments_are_reported(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("required", "layout"), [
    ("HND", "HND"),
    ("NHD", "NHD"),
    (None, "NHD"),
    ([None, None], "NHD"),
    ([None, "HND"], "HND"),
    ({"nixl": "HND", "offload": None}, "HND"),
])  # fmt: skip
def test_layout_required_by_connectors_is_chosen(required, layout):
    assert choose_layout(required) == layout


def test_conflicting_and_unknown_layouts_of_connectors_are_reported():
    message = "connector 'nixl' requires 'HND', connector 'lm' requires 'NHD': expected one"
    with pytest.raises(ValueError, match=message):
        choose_layout({"nixl": "HND", "other": None, "lm": "NHD"})
    with pytest.raises(ValueError, match="connector 0 requires 'NHD', connector 2 requires 'HND'"):
        choose_layout(["NHD", None, "HND"])
    for required in ("hnd", ["HND", "DHN"], {"nixl": 3}):
        with pytest.raises(ValueError, match=r"requires is .*: expected 'NHD' or 'HND'"):
            choose_layout(required)


ASKS_OFTEN = """
import logging
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
from kvcache.transfer import choose_layout
choose_layout("HND")
print("asked", flush=True)
for required in (None, [None, None], {}, None):
    assert choose_layout(required) == "NHD"
"""


def test_missing_requirement_is_logged_once_per_process():
    done = subprocess.run(
        [sys.executable, "-c", ASKS_OFTEN], capture_output=True, text=True, check=True
    )
    assert done.stderr == "kvcache no connector requires a cache layout: using NHD\n"
