# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the connector: decides which blocks to load and which to keep for readers."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from kvcache_exchange.disaggregation.layout import is_complete
from kvcache_exchange.disaggregation.leases import LeaseNumbers
from kvcache_exchange.disaggregation.offer import Offer, digest_of
from kvcache_exchange.disaggregation.steps import Load, RankHandshake, check_ranks
from kvcache_exchange.identity import KVIdentity
from kvcache_exchange.plugins.model import model_values
from kvcache_exchange.plugins.moves import CONVERTS
from kvcache_vllm.disaggregation.options import Options
from kvcache_vllm.disaggregation.params import offer_in, params_of
from kvcache_vllm.disaggregation.steps import TransferMetadata
from kvcache_vllm.disaggregation.windows import first_needed

_log = logging.getLogger("kvcache.vllm")
# The settings that determine how vLLM hashes blocks.
_HASH_OPTIONS = {"algorithm": "--prefix-caching-hash-algo", "seed": "PYTHONHASHSEED"}
_DONE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class Scheduling:
    """Decides which transfers to start. The worker side performs them."""

    def __init__(
        self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        self._options, self._engine_id = options, transfer.engine_id
        self._is_producer, self._is_consumer = transfer.is_kv_producer, transfer.is_kv_consumer
        self._groups = kv_cache_config.transfer_group_ids
        self._specs = [
            kv_cache_config.kv_cache_groups[group].kv_cache_spec for group in self._groups
        ]
        self._identity = KVIdentity(model_of(vllm_config))
        cache = vllm_config.cache_config
        self._algorithm = cache.prefix_caching_hash_algo if cache.enable_prefix_caching else None
        self._loading: set[str] = set()
        self._handshakes: list[RankHandshake] = []
        self._offers: dict[str, Offer | None] = {}  # keyed by request id, until loaded
        self._step = TransferMetadata()
        self._numbers = LeaseNumbers()

    def take_handshakes(self, handshakes: Mapping[int, RankHandshake]) -> None:
        """Store the workers' handshakes, by rank. Raises ValueError if the workers differ."""
        ordered = [handshakes[rank] for rank in sorted(handshakes)]
        check_ranks(ordered)
        self._handshakes = ordered

    def num_to_load(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Return the number of tokens to load, and whether to load them in the background."""
        offer = self._offer(request)
        if offer is None:
            return 0, False
        end = min(offer.num_tokens, request.num_tokens - 1)  # the last token must be computed
        if end <= num_computed_tokens:
            return 0, False
        own = self._handshakes[0].groups
        for spec, mine, layout, blocks in zip(self._specs, own, offer.groups, offer.blocks):
            # A loaded block may later belong to a hit of a different length, so all of its tokens
            # must be loaded.
            first = first_needed(spec, end) // mine.block_size * mine.block_size
            first = max(num_computed_tokens, first)
            if not is_complete(blocks, layout.block_size, first, end):
                self._refuse(request, "the producer has freed a window's blocks that are needed")
                self._step.unread.append(offer)
                return 0, False
        return end - num_computed_tokens, True

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_to_load: int) -> None:
        """Record the blocks into which a request's KV is loaded.

        Each request is loaded at most once.
        """
        offer = self._offers.get(request.request_id)
        if offer is None:
            return
        self._offers[request.request_id] = None
        if num_to_load == 0:
            self._step.unread.append(offer)
            return
        self._loading.add(request.request_id)
        end = min(offer.num_tokens, request.num_tokens - 1)
        own = blocks.get_block_ids()
        self._step.loads[request.request_id] = Load(
            offer, end - num_to_load, end, tuple(list(own[group]) for group in self._groups)
        )

    def take_step(self) -> TransferMetadata:
        """Return the transfers that the workers must start."""
        step, self._step = self._step, TransferMetadata()
        return step

    def finished(
        self, request: Request, block_ids: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the blocks must be kept, and the parameters for the other engine."""
        unread = self._offers.pop(request.request_id, None)
        if unread is not None:
            self._step.unread.append(unread)
        params = request.kv_transfer_params
        if (
            not self._is_producer
            or not isinstance(params, Mapping)
            or not params.get("do_remote_decode")
            or request.status not in _DONE
            or request.prompt_token_ids is None
            or request.prompt_embeds is not None
        ):
            return False, None
        num_tokens = min(request.num_prompt_tokens, request.num_computed_tokens)
        if num_tokens < 1:
            return False, None
        lease = self._numbers.take(request.request_id, self._options.lease_s)
        if lease is None:
            return False, None
        self._step.leases[request.request_id] = lease, self._options.lease_s
        offer = Offer(
            self._engine_id,
            request.request_id,
            num_tokens,
            _digest(request, num_tokens),
            self._present_identity(),
            self._handshakes[0].groups,
            tuple(tuple(block_ids[group]) for group in self._groups),
            tuple(each.address for each in self._handshakes),
            lease,
        )
        return True, params_of(offer)

    def start_epoch(self) -> None:
        """End all leases and loads, because the weights may have changed.

        vLLM does not name its weights, so this engine exchanges no KV from then on.
        """
        _log.warning("KV is no longer exchanged with other engines: the cache was reset")
        self._identity = replace(self._identity, version=f"unnamed {uuid.uuid4().hex}")
        self._step.unread += [each for each in self._offers.values() if each is not None]
        self._offers = dict.fromkeys(self._offers)
        self._step.ends |= set(self._numbers)
        self._step.cancels |= self._loading

    def take_output(self, output: KVConnectorOutput) -> None:
        """Process the workers' report, and free the lease numbers of requests that were sent."""
        self._loading -= output.finished_recving or set()
        for request_id in output.finished_sending or ():
            self._numbers.give_back(request_id)  # has no effect for requests of another connector

    def _offer(self, request: Request) -> Offer | None:
        """Return a request's offer, which is checked only once.

        An invalid offer is logged in one line.
        """
        if request.request_id in self._offers:
            return self._offers[request.request_id]
        if not self._is_consumer or not request.kv_transfer_params:
            return None
        offer = None
        try:
            offer = offer_in(request.kv_transfer_params)
            if offer is not None:
                self._check(request, offer)
        except ValueError as error:
            self._refuse(request, f"{error}")
            return None
        self._offers[request.request_id] = offer
        return offer

    def _check(self, request: Request, offer: Offer) -> None:
        if request.prompt_embeds is not None:
            raise ValueError("prompt_embeds are given: expected token ids, as in the offer")
        layouts = self._handshakes[0].groups
        offer.check_like(self._present_identity(), layouts, _HASH_OPTIONS, CONVERTS)
        num_tokens = 0 if request.prompt_token_ids is None else request.num_tokens
        offer.check_prompt(num_tokens, lambda count: _digest(request, count))

    def _refuse(self, request: Request, reason: str) -> None:
        self._offers[request.request_id] = None
        _log.warning("KV of request %s is computed locally: %s", request.request_id, reason)

    def _present_identity(self) -> KVIdentity:
        if self._algorithm is None:
            return self._identity
        seed = hashlib.sha256(kv_cache_utils.NONE_HASH).hexdigest()[:16]
        hashing = {"algorithm": self._algorithm, "seed": seed}
        return replace(self._identity, hashing=hashing)


def model_of(vllm_config: VllmConfig) -> dict[str, Any]:
    """Return, as plain values, the model properties that must be equal in both engines."""
    model, load = vllm_config.model_config, vllm_config.load_config
    cache_dtype = str(vllm_config.cache_config.cache_dtype)
    if cache_dtype in ("fp8", "fp8_e4m3"):  # two names of one format, which depends on the platform
        cache_dtype = "fp8_e4m3fnuz" if current_platform.is_fp8_fnuz() else "fp8_e4m3"
    return model_values(
        model.hf_config,
        model.hf_text_config,
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        dtype=model.dtype,
        cache_dtype=cache_dtype,
        quantization=model.quantization,
        name=model.model,
        revision=model.revision,
        max_model_len=model.max_model_len,
        has_weights=load.load_format != "dummy",
    )


def _digest(request: Request, num_tokens: int) -> str:
    items = [
        (feature.identifier, feature.mm_position.offset, feature.mm_position.length)
        for feature in request.mm_features
        if feature.mm_position.offset < num_tokens
    ]
    adapter = request.lora_request
    lora = (adapter.lora_name, adapter.lora_path) if adapter else None
    tokens = request.all_token_ids[:num_tokens]
    return digest_of(tokens, lora, items, salt=request.cache_salt)
