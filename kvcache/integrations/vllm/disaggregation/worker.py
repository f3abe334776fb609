"""The connector in a worker: registers its caches, keeps leases, and loads blocks in a thread."""

from __future__ import annotations

import base64
import logging
import os
import queue
import threading
from collections.abc import Mapping

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from kvcache.integrations.vllm.disaggregation.fetching import Fetch, Rank
from kvcache.integrations.vllm.disaggregation.layout import BY_TOKEN, GroupLayout, layout_of_group
from kvcache.integrations.vllm.disaggregation.leases import Leases
from kvcache.integrations.vllm.disaggregation.offer import Offer, RankAddress
from kvcache.integrations.vllm.disaggregation.options import Options
from kvcache.integrations.vllm.disaggregation.steps import Load, RankHandshake, Step
from kvcache.transfer.transport.base import make_transport
from kvcache.worker.pages.pages import Pages

SECRET = "KVCACHE_TRANSFER_SECRET"  # environment variable: what peers must have to connect
_log = logging.getLogger(__name__)
_BUSY_S, _IDLE_S = 0.0005, 0.05
_NUM_CELLS = 4096  # slots of leases that can be read at once


class Worker:
    """A rank's transport, used by one thread: that of the loads."""

    def __init__(
        self, options: Options, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
    ) -> None:
        self._options, self._config, self._cache = options, vllm_config, kv_cache_config
        self._leases = Leases()
        self._jobs: queue.SimpleQueue[Step | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._thread: threading.Thread | None = None
        self.handshake: RankHandshake | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Takes the caches by layer, and begins to listen. ValueError for a layout that is not known."""
        groups = self._cache.kv_cache_groups
        chosen = [
            [kv_caches[name] for name in groups[group].layer_names]
            for group in self._cache.transfer_group_ids
        ]
        layouts = [
            self._layout(groups[group], tensors)
            for group, tensors in zip(self._cache.transfer_group_ids, chosen)
        ]
        rank = get_tensor_model_parallel_rank()
        port = self._options.port + rank if self._options.port else 0
        transport = make_transport(
            f"{self._config.kv_transfer_config.engine_id}/{rank}",
            self._options.transport,
            host=self._options.host,
            port=port,
            advertise=self._options.advertise,
            secret=os.environ.get(SECRET, "").encode(),
        )
        inbox = np.zeros(_NUM_CELLS, np.int64)
        storages = _storages(kv_caches.values())
        for storage in storages:
            transport.register(Pages.over([storage.view(1, -1)]))
        own = (self._leases.slots, inbox)
        transport.register([(each.ctypes.data, each.nbytes) for each in own])
        addresses = tuple(tuple(each.data_ptr() for each in tensors) for tensors in chosen)
        begins = np.array(sorted(storage.data_ptr() for storage in storages))
        self._rank = Rank(transport, layouts, addresses, rank, inbox, begins)
        metadata = base64.b64encode(transport.metadata()).decode()
        address = RankAddress(transport.name, metadata, addresses, self._leases.slots.ctypes.data)
        self.handshake = RankHandshake(tuple(layouts), address)
        self._thread = threading.Thread(target=self._run, name="kvcache loads", daemon=True)
        self._thread.start()

    def begin(self, step: Step) -> None:
        """Begins what the scheduler's side has decided."""
        if step.loads or step.leases or step.unread:
            self._jobs.put(step)

    def take_results(self) -> tuple[set[str], set[str], set[str]]:
        """Since the last call: requests that were sent, those that were received, and of these the
        failed ones."""
        with self._lock:
            results = self._sent, self._received, self._failed
            self._sent, self._received, self._failed = set(), set(), set()
        return results

    def close(self) -> None:
        """Ends the thread and the transport."""
        if self._thread is not None and self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join(timeout=10)

    def _layout(self, group: KVCacheGroupSpec, tensors: list[torch.Tensor]) -> GroupLayout:
        spec, model = group.kv_cache_spec, self._config.model_config
        is_mla = "MLA" in type(spec).__name__
        interior = BY_TOKEN
        if current_platform.is_cpu() and not is_mla:
            # vLLM keeps it on the builders of metadata; the function is that of 0.32.
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

            dtype = self._config.cache_config.cache_dtype
            interior = _get_attn_isa(spec.dtype, spec.block_size, spec.head_size, dtype)
        return layout_of_group(
            group.layer_names,
            tensors,
            engine_id=self._config.kv_transfer_config.engine_id,
            num_blocks=self._cache.num_blocks,
            total_num_kv_heads=model.get_total_num_kv_heads(),
            tp_size=self._config.parallel_config.tensor_parallel_size,
            is_mla=is_mla,
            interior=interior,
        )

    def _run(self) -> None:
        """Until `close`: new jobs, loads under way, messages of readers, leases."""
        fetches: dict[str, Fetch] = {}
        transport = self._rank.transport
        while True:
            try:
                step = self._jobs.get(timeout=_BUSY_S if fetches else _IDLE_S)
            except queue.Empty:
                step = Step()
            if step is None:
                break
            for request_id, (lease, seconds) in step.leases.items():
                self._leases.begin(request_id, lease, seconds)
            for request_id, load in step.loads.items():
                fetches[request_id] = Fetch(self._rank, load, self._options.timeout_s)
            for offer in step.unread:
                self._begin_unread(offer, fetches)
            ended = [request_id for request_id, fetch in fetches.items() if fetch.step()]
            for peer, message in transport.notifications():
                self._leases.note(message, peer)
            self._report(fetches, ended, self._leases.ended())
        transport.close()

    def _begin_unread(self, offer: Offer, fetches: dict[str, Fetch]) -> None:
        """An offer that is not read is a load of nothing: the producer hears of it all the same."""
        nothing = Load(offer, 0, 0, tuple([] for _ in offer.blocks))
        fetches[f"\0{offer.request_id}"] = Fetch(self._rank, nothing, self._options.timeout_s)

    def _report(self, fetches: dict[str, Fetch], ended: list[str], sent: set[str]) -> None:
        for request_id in ended:
            if error := fetches[request_id].error:
                _log.warning("KV of request %s is not loaded: %s", request_id.strip("\0"), error)
        with self._lock:
            self._sent |= sent
            for request_id in ended:
                fetch = fetches.pop(request_id)
                if request_id.startswith("\0"):
                    continue
                self._received.add(request_id)
                if fetch.error is not None:
                    self._failed.add(request_id)


def _storages(tensors) -> list[torch.Tensor]:
    """The memory of tensors, each allocation once, as bytes."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            storage
        )
    return list(found.values())
