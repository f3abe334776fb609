# SPDX-License-Identifier: Apache-2.0
"""A rank that serves the KV in an engine's tensors to peers and loads KV into them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvcache.worker import Pages
from kvcache_exchange.disaggregation.layout import GroupLayout
from kvcache_exchange.disaggregation.options import ConnectorOptions, secret_from_environment
from kvcache_exchange.disaggregation.rank import RankThread
from kvcache_exchange.plugins.fetching import RankReader, RequestFetch
from kvcache_exchange.transport.factory import make_transport


class TensorRank(RankThread):
    """Serves the tensors of one rank to other engines, and loads KV into them, until `close`.

    Args:
        engine_id: Name of the engine.
        rank: Index of the rank.
        layouts: Layouts of the transferred groups.
        tensors: The tensors of each group, one per region of its description.
        others: Tensors that share allocations with `tensors` but are not transferred.
        options: Connection options.

    Raises:
        ValueError: `make_transport` rejects an option.
    """

    def __init__(
        self,
        engine_id: str,
        rank: int,
        layouts: Sequence[GroupLayout],
        tensors: Sequence[Sequence[torch.Tensor]],
        options: ConnectorOptions,
        others: Iterable[torch.Tensor] = (),
    ) -> None:
        self._transport = make_transport(
            f"{engine_id}/{rank}",
            options.transport,
            host=options.host,
            port=options.port_of(rank),
            advertise=options.advertise,
            secret=secret_from_environment(),
            digest=options.digest,
        )
        try:
            self._storages = _storages([*(each for group in tensors for each in group), *others])
            self._register()
            addresses = tuple(tuple(each.data_ptr() for each in group) for group in tensors)
            begins = np.array(sorted(storage.data_ptr() for storage in self._storages))
            device = self._storages[0].device
            reader = RankReader(self._transport, layouts, addresses, rank, begins, device)
            super().__init__(
                reader,
                layouts,
                addresses,
                lambda load: RequestFetch(reader, load, options.timeout_s),
                rank,
            )
        except BaseException:
            self._transport.close()
            raise
        self._is_registered = True

    def unregister(self) -> None:
        """Deregister the tensors from the transport before the engine unmaps their memory.

        The addresses in offers remain valid, but until `restore` is called, peers that read them
        fail and recompute.
        """
        if self._is_registered:
            self.call(self._unregister)
            self._is_registered = False

    def restore(self) -> None:
        """Register the tensors again after the engine has mapped memory at the same addresses."""
        if not self._is_registered:
            self.call(self._restore)
            self._is_registered = True

    def _register(self) -> None:
        for storage in self._storages:
            self._transport.register(Pages.over([storage.view(1, -1)]))

    def _restore(self) -> None:
        self._register()
        for peer in self._transport.peers():  # connected while the memory was deregistered
            self._transport.disconnect(peer)

    def _unregister(self) -> None:
        for storage in self._storages:
            self._transport.unregister(Pages.over([storage.view(1, -1)]))


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory of the tensors as byte tensors, one per allocation."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            storage
        )
    return list(found.values())
