# SPDX-License-Identifier: Apache-2.0
"""Fetches the KV of a request's tokens from another engine, using transfer plans and a transport."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from kvcache.checks import as_array, instance, listed, seconds, shown
from kvcache.transfer.plan.fragments import Runs
from kvcache.transfer.plan.token_range import RangeRuns, plan_range
from kvcache.transfer.plan.transfer_plan import TransferPlan
from kvcache.transfer.states import StateTransferPlan
from kvcache.transfer.transport.base import Transfer, TransferError, Transport
from kvcache.transfer.transport.spans import Spans

if TYPE_CHECKING:
    from kvcache.worker.pages.storage import KVStorage
    from kvcache.worker.swap.streams import Event

_POLL_S = 50e-6


@dataclass(frozen=True, eq=False)
class GroupFetch:
    """What to fetch for one cache group of a request.

    Args:
        plan: This rank's transfer plan.
        local_ids: int[n]. The request's block table or state pages. 0 is the null page.
        remote_ids: int[n]. The peer's block table, as one array for all remote ranks or a mapping
            from remote rank to array.
        local_addresses: int64[r]. Start address of each of the plan's regions (`region_addresses`).
        remote_addresses: The same for each remote rank, as received from the peers.
        storage: The storage whose pages are permuted. Required if the plan has a permutation.
    """

    plan: TransferPlan | StateTransferPlan
    local_ids: np.ndarray
    remote_ids: Mapping[int, np.ndarray] | np.ndarray
    local_addresses: np.ndarray
    remote_addresses: Mapping[int, np.ndarray]
    storage: KVStorage | None = None


class Fetch:
    """A fetch of a request's pages that is in flight. Created by `fetch`.

    Attributes:
        missing: For each group, int64[k]: the local pages whose tokens the remote engine does not
            hold.
        num_bytes: Number of bytes to transfer for all groups.
    """

    def __init__(
        self,
        transport: Transport,
        peers: Mapping[int, str],
        groups: Sequence[GroupFetch],
        found: Sequence[RangeRuns],
        notify: bytes,
        timeout_s: float,
    ) -> None:
        self.missing = [each.missing for each in found]
        self.num_bytes = sum(each.runs.num_bytes for each in found)
        self._transport, self._notify = transport, notify
        self._names = sorted({peers[r] for group in groups for r in group.plan.remote_ranks})
        self._deadline, self._timeout_s = time.monotonic() + timeout_s, timeout_s
        self._permuted = [
            (group.storage, each.permuted, group.plan.permutation)
            for group, each in zip(groups, found)
            if len(each.permuted)
        ]
        self._is_done, self._error = False, None
        self._permuting: list[Event] | None = None  # events to wait for once permuting has begun
        self.transfers: list[Transfer] = []
        try:
            for group, each in zip(groups, found):
                for runs in each.runs.by_rank:
                    spans = spans_of(group, runs)
                    read = transport.read_spans(
                        peers[runs.remote_rank], *spans, timeout_s=timeout_s
                    )
                    self.transfers.append(read)
        except BaseException as error:
            self.cancel(f"another part was rejected: {error}")
            if not self.transfers or not isinstance(error, TransferError | ValueError):
                raise  # `poll` raises it later, because transfers in flight may still write

    def poll(self) -> bool:
        """Return whether all pages have arrived, are in local order, and the peers have been
        notified.

        On a CUDA device, pages are permuted on a separate stream. Work launched on any stream after
        this method has returned True sees the final pages.

        Raises:
            TransferError: The fetch failed.
        """
        if self._is_done:
            return True
        if self._error is not None:
            raise TransferError(self._error)
        try:
            if not all(transfer.poll() for transfer in self.transfers):
                return False
            if self._permuting is None:
                self._permuting = []
                self._permute()
            self._permuting = [each for each in self._permuting if not each.query()]
            if self._permuting:
                return False
            for name in self._names:
                if self._notify:
                    self._transport.send(name, self._notify)
        except (TransferError, ValueError) as error:
            self.cancel(str(error))
            raise
        self._is_done = True
        return True

    def _permute(self) -> None:
        from kvcache.transfer.memory import permute_pages
        from kvcache.worker.swap.streams import own_stream

        for storage, pages, permutation in self._permuted:
            streams, stream = own_stream(storage.pages.device)
            streams.launch(stream, partial(permute_pages, storage, pages, permutation))
            self._permuting.append(streams.record(stream))

    def wait(self, timeout_s: float) -> None:
        """Wait until all pages have arrived.

        Args:
            timeout_s: Maximum time to wait, in seconds.

        Raises:
            TransferError: The fetch failed or did not finish in time.
        """
        timeout_s = seconds(timeout_s, "timeout_s")
        deadline = time.monotonic() + timeout_s
        for transfer in self.transfers:
            try:
                transfer.wait(max(deadline - time.monotonic(), 0.0))
            except TransferError as error:
                self.cancel(str(error))
                raise
        while not self.poll():
            if time.monotonic() >= deadline:
                self.cancel(f"not finished within {timeout_s:g} s")
                continue  # `poll` raises
            time.sleep(_POLL_S)

    def cancel(self, reason: str) -> None:
        """Cancel the fetch. See `Transfer.cancel`."""
        if not self._is_done and self._error is None:
            self._error = reason
            for transfer in self.transfers:
                transfer.cancel(reason)

    @property
    def is_released(self) -> bool:
        """Whether no transfer can write to the pages any more.

        Until then, they must not be reused.
        """
        ended = self._is_done or self._error is not None
        return (
            ended
            and all(transfer.is_released for transfer in self.transfers)
            and all(each.query() for each in self._permuting or ())
        )


def fetch(
    transport: Transport,
    peers: Mapping[int, str],
    groups: Sequence[GroupFetch],
    first_token: int,
    end_token: int,
    *,
    notify: bytes = b"",
    timeout_s: float = 30.0,
) -> Fetch:
    """Start reading a request's tokens [first_token, end_token) in all groups, without waiting.

    State pages are transferred as a whole. Null pages on either side are skipped (see
    `plan_range`). Fragments are passed to the transport in factored form, and the transport packs
    small fragments. Reads are started one after another. If a later read is rejected, the earlier
    reads are canceled, and `poll` and `wait` raise TransferError. Do not reuse the pages before
    `is_released` is True.

    Args:
        transport: The transport.
        peers: Name of each remote rank's transport, keyed by rank.
        groups: The request's cache groups.
        first_token: First token to read.
        end_token: End of the tokens to read, exclusive.
        notify: Message for all peers that were read, sent by `poll` or `wait` once the pages have
            arrived.
        timeout_s: Maximum duration of the transfers, in seconds.

    Returns:
        The fetch in flight.

    Raises:
        TypeError: IDs or tokens have the wrong type. Nothing has been transferred.
        ValueError: IDs or tokens do not fit the plans, a rank is unknown, or the first read is
            rejected, for example because memory is not registered. Nothing has been transferred.
        TransferError: The first read is rejected because its peer is not connected.
    """
    timeout_s = seconds(timeout_s, "timeout_s")
    if not hasattr(transport, "read_spans"):
        raise TypeError(f"transport is {shown(transport)}: expected a Transport")
    instance(peers, Mapping, "peers")
    for rank, peer in peers.items():
        instance(peer, str, f"peers[{shown(rank)}]")
    groups = listed(groups, "groups")
    found = [_runs(group, first_token, end_token) for group in groups]
    for number_, (group, each) in enumerate(zip(groups, found)):
        for rank in group.plan.remote_ranks:
            for name, known in (("peers", peers), ("remote_addresses", group.remote_addresses)):
                if rank not in known:
                    raise ValueError(
                        f"{name} of group {number_} is missing rank {rank} "
                        f"(ranks present: {shown(list(known))})"
                    )
        if len(each.permuted) and group.storage is None:
            raise ValueError(f"storage of group {number_} is None: expected a storage to permute")
    return Fetch(transport, peers, groups, found, notify, timeout_s)


def spans_of(group: GroupFetch, runs: Runs) -> tuple[Spans, Spans]:
    """Return the local and remote fragments of the given runs, in factored form."""
    remote_region, remote_at, local_region, local_at = runs.descriptors.T
    local = np.asarray(group.local_addresses, np.int64)[local_region] + local_at
    remote = np.asarray(group.remote_addresses[runs.remote_rank], np.int64)[remote_region]
    return (
        Spans(local, runs.local_offset, runs.length),
        Spans(remote + remote_at, runs.remote_offset, runs.length),
    )


def _runs(group: GroupFetch, first_token: int, end_token: int) -> RangeRuns:
    instance(group, GroupFetch, "groups")
    if not isinstance(group.plan, StateTransferPlan):
        return plan_range(group.plan, group.local_ids, group.remote_ids, first_token, end_token)
    local = as_array(group.local_ids, "local_ids")
    remote = group.remote_ids
    tables = list(remote.values()) if isinstance(remote, Mapping) else [remote]
    held = np.logical_and.reduce(
        [local > 0, *(as_array(each, "remote_ids") > 0 for each in tables)]
    )
    if isinstance(remote, Mapping):
        remote = {rank: as_array(ids, "remote_ids")[held] for rank, ids in remote.items()}
    else:
        remote = as_array(remote, "remote_ids")[held]
    runs = group.plan.apply(local[held], remote)
    return RangeRuns(runs, np.empty((0, 1), np.int64), local[(local > 0) & ~held])
