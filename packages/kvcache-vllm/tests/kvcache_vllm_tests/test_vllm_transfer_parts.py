# SPDX-License-Identifier: Apache-2.0
"""The components of the vLLM connector, tested without an engine: reads, offers, leases, options
and rejections.

These tests run in `make test-vllm` and are skipped where vLLM is not installed.
"""

import json
import random

import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvcache_exchange.disaggregation.layout import check_like, is_complete
from kvcache_exchange.disaggregation.leases import Lease
from kvcache_exchange.disaggregation.offer import Offer, RankAddress, digest_of
from kvcache_exchange.identity import KVIdentity
from kvcache_vllm.disaggregation.params import offer_in, params_of
from kvcache_vllm.disaggregation.windows import first_needed
from tests.machinery import vllm_schedulers
from tests.machinery.vllm_engine import MODULE
from tests.machinery.vllm_layouts import Side, check_blocks, random_case, read_all, some_blocks

IDENTITY = KVIdentity({"head_size": 4}, hashing={"algorithm": "a", "seed": "s"})
SIZES = [(32, 32), (32, 64), (64, 32), (96, 64)]


@pytest.mark.parametrize("heads,local_tp,remote_tp", [(2, 1, 1), (2, 1, 2), (4, 2, 1), (2, 4, 2)])
@pytest.mark.parametrize("local_size,remote_size", SIZES)
@pytest.mark.parametrize("seed", range(4))
def test_every_element_of_a_cpu_cache_arrives(
    seed, local_size, remote_size, heads, local_tp, remote_tp
):
    local, remote, *blocks = random_case(seed, local_size, remote_size, local_tp, remote_tp, heads)
    read_all(local, remote, *blocks)
    check_blocks(local, *blocks, remote_size)


@pytest.mark.parametrize("orders", [("HND", "NHD"), ("NHD", "HND"), ("NHD", "NHD")])
@pytest.mark.parametrize("tp_sizes", [(1, 2), (2, 1)])
@pytest.mark.parametrize("pages_per_block", [1, 2])
def test_every_element_of_a_cache_by_tokens_arrives(pages_per_block, tp_sizes, orders):
    rng = random.Random(7)
    options = {"interior": "by token", "pages_per_block": pages_per_block}
    local = Side((2, 4, 4), 32, tp_sizes[0], order=orders[0], **options)
    remote = Side((2, 4, 4), 64, tp_sizes[1], order=orders[1], interior="by token")
    blocks = some_blocks(rng, 200, 32), some_blocks(rng, 200, 64)
    remote.fill(blocks[1])
    read_all(local, remote, *blocks)
    check_blocks(local, *blocks, 64)


@pytest.mark.parametrize("interiors", [("vec", "by token"), ("by token", "vec")])
@pytest.mark.parametrize("order,tp_sizes", [("HND", (1, 2)), ("NHD", (2, 1)), ("NHD", (1, 1))])
@pytest.mark.parametrize("sizes", SIZES)
def test_every_element_arrives_between_cpu_kernels_and_other_engines(
    sizes, order, tp_sizes, interiors
):
    rng = random.Random(8)
    local, remote = (
        Side((2, 4, 4), *each, order="HND" if interior == "vec" else order, interior=interior)
        for *each, interior in zip(sizes, tp_sizes, interiors)
    )
    blocks = [some_blocks(rng, 200, size) for size in sizes]
    remote.fill(blocks[1])
    read_all(local, remote, *blocks)
    check_blocks(local, *blocks, sizes[1])


def test_adjacent_blocks_of_equal_engines_need_one_read_per_layer():
    local, remote = Side((3, 2, 4), 32, 1), Side((3, 2, 4), 32, 1)
    blocks = [4, 5, 6, 7], [1, 2, 3, 4]
    remote.fill(blocks[1])
    assert read_all(local, remote, *blocks) == 3
    check_blocks(local, *blocks, 32)


class TestOffers:
    """`kv_transfer_params` are sent by clients and are not trusted."""

    def offer(self):
        layout = Side((2, 2, 4), 32, 2).layout
        ranks = [RankAddress("tcp", "bQ==", ((4096, 8192),), 64) for _ in range(2)]
        return Offer(
            *("engine", "r0", 70, digest_of(range(70), None, []), IDENTITY),
            *((layout,), ((3, 4, 5),), tuple(ranks), Lease(7, 99, 1.5)),
        )

    def test_offers_round_trip_through_json(self):
        offer = self.offer()
        assert offer_in(json.loads(json.dumps(params_of(offer)))) == offer

    def test_request_without_an_offer_is_computed(self):
        for params in (None, {}, {"do_remote_decode": True}):
            assert offer_in(params) is None

    def test_another_connectors_params_are_rejected(self):
        with pytest.raises(ValueError, match=r"expected 'kvcache'.*use the same connector in both"):
            offer_in({"do_remote_prefill": True, "remote_block_ids": [1]})

    def test_other_layers_dtypes_and_kernels_are_rejected(self):
        mine = Side((2, 2, 4), 32, 1).layout
        check_like([mine], [Side((2, 2, 4), 64, 2).layout])
        for theirs, message in (
            (Side((3, 2, 4), 32, 1), "serve the same model"),
            (Side((2, 4, 4), 32, 1), "total_num_kv_heads is 2"),
            (Side((2, 2, 8), 32, 1), "head_size is 8"),
            (Side((2, 2, 4), 32, 1, interior="amx"), "'vec', but the remote .* use 'amx'"),
        ):
            with pytest.raises(ValueError, match=message):
                check_like([mine], [theirs.layout])
        amx = [Side((2, 2, 4), size, 1, interior="amx").layout for size in (32, 64)]
        with pytest.raises(
            ValueError, match=r"32 tokens, but the remote .* 64: .*same --block-size"
        ):
            check_like(amx[:1], amx[1:])


class TestWindows:
    def test_first_token_to_read_depends_on_the_window(self):
        specs = {name: make() for name, make in vllm_schedulers.SPECS.items()}
        assert first_needed(specs["full"], 150) == 0
        # The window has 100 tokens, including the token itself.
        assert first_needed(specs["window"], 150) == 51
        assert first_needed(specs["window"], 60) == 0
        assert first_needed(specs["chunked"], 150) == 128

    def test_blocks_are_complete_if_none_is_null(self):
        assert is_complete([0, 5, 6], 32, 32, 96)
        assert not is_complete([0, 5, 6], 32, 31, 96)
        assert not is_complete([0, 5, 6], 32, 32, 97)
        assert is_complete([], 32, 8, 8)


class TestRefusalsAtTheStart:
    """Unsupported options are rejected before any request is served, with a one-line error that
    says what to change.
    """

    def connector(self, folder, extra=None, groups=("full",), **options):
        transfer = KVTransferConfig(
            kv_connector="KVCacheConnector",
            kv_connector_module_path=MODULE,
            kv_role="kv_both",
            kv_connector_extra_config=extra or {},
        )
        config = vllm_schedulers.engine_config(folder, kv_transfer_config=transfer, **options)
        specs = [vllm_schedulers.SPECS[kind]() for kind in groups]
        cache = KVCacheConfig(
            100, [], [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        )
        return KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, cache)

    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps(vllm_schedulers.TINY_LLAMA))
        return str(tmp_path)

    def test_valid_configuration_is_accepted(self, folder):
        transfer = self.connector(folder, {"lease_s": 5})._vllm_config.kv_transfer_config
        assert transfer.kv_load_failure_policy == "recompute"
        assert KVConnectorFactory.get_connector_class(transfer).supports_sleep_mode(transfer)

    def test_unsupported_kind_of_group_is_rejected(self, folder, monkeypatch):
        mamba = MambaSpec(block_size=16, shapes=((4,),), dtypes=(vllm_schedulers.torch.float32,))
        monkeypatch.setitem(vllm_schedulers.SPECS, "mamba", lambda: mamba)
        with pytest.raises(ValueError, match="a KV cache group of MambaSpec: this connector"):
            self.connector(folder, groups=("full", "mamba"))

    def test_random_hash_seed_is_rejected(self, folder, monkeypatch):
        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        with pytest.raises(ValueError, match="set PYTHONHASHSEED to the same value in all engines"):
            self.connector(folder, prefix_caching_hash_algo="xxhash_cbor")
        monkeypatch.setenv("PYTHONHASHSEED", "0")
        self.connector(folder, prefix_caching_hash_algo="xxhash_cbor")

    def test_pipeline_parallelism_is_rejected(self, folder):
        with pytest.raises(
            ValueError, match="pipeline_parallel_size is 2: this connector supports only 1"
        ):
            self.connector(folder, pipeline_parallel_size=2, distributed_executor_backend="mp")
