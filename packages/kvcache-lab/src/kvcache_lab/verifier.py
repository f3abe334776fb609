# SPDX-License-Identifier: Apache-2.0
"""Attaches real storage to the replayed manager and verifies the KV of every token.

The KV of a token is a fixed mix of its content key, so the expected content of every read is known.
Verification detects hits on the wrong block, wrong slots, and blocks that are reused while held. It
also detects blocks that were released from a window too early, states or parts of blocks that were
not copied, and pages that were assigned to two groups, because all groups share the pages but use
different mixes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvcache.formats import KVFormat, format_named
from kvcache.kinds import KindProperties, make_kind
from kvcache.specs import GroupSpec
from kvcache.step import StepPlan
from kvcache.worker import BlockTables, GroupTable, KVStorage, Pages, TableShape, Worker
from kvcache_lab.content import feature_factors
from kvcache_lab.groups import checked_groups
from kvcache_lab.running import Span
from kvcache_lab.verified_group import (
    FormatGroup,
    Found,
    StateGroup,
    TokenGroup,
    VerifiedGroup,
)

_NO_VALUE = 255  # no token has K and V that consist of this byte
_ELEMENT_BYTES = 4  # int32


class KVVerifier:
    """Storage and block tables for a manager. Writes the new KV of each request and reads it back.

    Call `reserve` before each step. Then `apply` the step's plan, call `check_arrival` for all of
    its rows, and finally call `write` and `check` for all rows.

    Args:
        block_size: Tokens per block of one full-attention group. Alternative to `groups`.
        groups: The manager's groups.
        num_blocks: Pool size, including the null block.
        num_host_blocks: Size of the host tier, including its null block. 0: no host tier.
        kv_format: Name of a quantized format (`kvcache.formats`) in which all tokens are stored. The
            sizes of a small token that it can hold then replace `num_kv_heads` and `head_size`.
        chunk_tokens: Maximum number of tokens processed at once. Limits the working memory, not the
            length of requests. Values from 4,096 to 131,072 were equally fast within noise on the
            development machine.

    Raises:
        MemoryError: There is not enough memory.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int | None = None,
        groups: Sequence[GroupSpec] | None = None,
        num_host_blocks: int = 0,
        max_num_reqs: int = 1,
        device: str = "cpu",
        num_kv_heads: int = 2,
        head_size: int = 2,
        num_layers: int = 1,
        layout: str = "NHD",
        kv_format: str | None = None,
        chunk_tokens: int = 16_384,
    ) -> None:
        specs = checked_groups(block_size, groups)
        kinds = [make_kind(spec.kind, spec.options) for spec in specs]
        # Number of block columns for kinds whose blocks form a circular buffer.
        self._buffers = [
            -(-kind.buffer // spec.block_size) if kind.pages.wraps else None
            for spec, kind in zip(specs, kinds)
        ]
        self._specs, self._device = specs, device
        self._has_slots = [kind.pages.has_slots for kind in kinds]
        self._max_num_reqs, self._num_blocks = max_num_reqs, num_blocks
        self._chunk_tokens = chunk_tokens
        features = {"num_kv_heads": num_kv_heads, "head_size": head_size, "v_head_size": head_size}
        token_bytes = 2 * num_kv_heads * head_size * _ELEMENT_BYTES
        if kv_format is not None:
            known = format_named(kv_format)
            features = _smallest(known)
            stored = known.stored(**features)
            data = features["num_kv_heads"] * (stored.head_size + stored.v_head_size)
            token_bytes = data + stored.scale_bytes_per_token  # all elements have one byte
        sizes = [spec.block_size for spec, slots in zip(specs, self._has_slots) if slots]
        # The K or V of a page holds the largest block of tokens, or a state of the same size.
        page_features = -(-token_bytes * max(sizes, default=1) // (2 * _ELEMENT_BYTES))
        page_bytes = 2 * page_features * _ELEMENT_BYTES
        table_bytes = 4 * len(specs) * max_num_reqs * num_blocks
        device_bytes = num_layers * num_blocks * page_bytes + table_bytes
        host_bytes = num_layers * num_host_blocks * page_bytes
        on_host = torch.device(device).type == "cpu"
        _check_memory(device_bytes + host_bytes if on_host else device_bytes, device)
        pages = Pages.allocate(num_blocks, [[page_bytes]] * num_layers, device=device)
        self._host = None
        if num_host_blocks:
            _check_memory(host_bytes, "cpu")
            self._host = pages.on_host(num_host_blocks)
        # Memory freed by an earlier verifier may still contain the values that this verifier
        # expects.
        for each in (pages, self._host):
            if each is not None:
                each.memory.fill_(_NO_VALUE)
        stored_as = {"kv_format": kv_format} if kv_format else {"dtype": torch.float32}
        self.storages = [
            KVStorage.over(pages, spec.block_size, **features, **stored_as, layout=layout)
            if slots
            else KVStorage.over(pages, 1, 1, page_features, dtype=torch.float32, layout=layout)
            for spec, slots in zip(specs, self._has_slots)
        ]
        # A request can hold every block except the null block. With a sliding window, the request's
        # row may have more columns than that, and `reserve` then widens the tables.
        self._make_tables([max(num_blocks - 1, 1)] * len(specs), last_step_id=-1)
        self.groups = self._make_groups(kinds, num_layers)

    @property
    def storage(self) -> KVStorage:
        """The storage of the first group."""
        return self.storages[0]

    @property
    def table(self) -> GroupTable:
        """The block table of the first group."""
        return self.tables[0]

    def reserve(self, num_tokens: int) -> None:
        """Widen the tables, if necessary, for a request with `num_tokens` tokens."""
        widths = [table.max_num_blocks_per_req for table in self.tables.block_tables]
        needed = [
            1 if buffer else -(-num_tokens // spec.block_size)
            for spec, buffer in zip(self._specs, self._buffers)
        ]
        if all(width >= blocks for width, blocks in zip(widths, needed)):
            return
        old = self.tables.block_tables
        self._make_tables(
            [max(2 * width, blocks) for width, blocks in zip(widths, needed)],
            self.worker.last_step_id,
        )
        for row in range(self._max_num_reqs):
            held = [each.block_table.np[row, : each.num_blocks_per_row[row]] for each in old]
            self.tables.add_row(held, row)
        self.tables.commit_updates()
        for group, table in zip(self.groups, self.tables.block_tables):
            group.table = table

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan to pages and block tables. Every plan must be applied in order."""
        self.worker.apply(plan)

    def check_arrival(self, span: Span) -> Found:
        """Check the content that the plan had to move for these tokens, before the step writes new KV."""
        return _all(group.check_arrival(span) for group in self.groups)

    def write(self, span: Span) -> None:
        """Write the KV of the tokens, and the states after them."""
        for group in self.groups:
            group.write(span)

    def check(self, span: Span) -> Found:
        """Read all tokens that the given tokens attend to, including themselves, in all groups.

        Returns the number of wrong tokens and the first wrong token. A token is correct if reading
        through the block table and reading through the manager's blocks both return exactly the
        token's K and V.
        """
        return _all(group.check(span) for group in self.groups)

    def _make_tables(self, widths: list[int], last_step_id: int) -> None:
        shapes = [
            TableShape(
                spec.block_size,
                buffer or width,
                circular=buffer is not None,
                slot_mapping=has_slots,
            )
            for spec, buffer, width, has_slots in zip(
                self._specs, self._buffers, widths, self._has_slots
            )
        ]
        self.tables = BlockTables(
            shapes,
            max_num_reqs=self._max_num_reqs,
            max_num_tokens=self._chunk_tokens,
            device=self._device,
            pin_memory=False,
        )
        self.worker = Worker(self.storages, self.tables, self._host, last_step_id=last_step_id)

    def _group_class(self, g: int) -> type[VerifiedGroup]:
        if not self._has_slots[g]:
            return StateGroup
        return TokenGroup if self.storages[g].kv_format is None else FormatGroup

    def _make_groups(self, kinds: list[KindProperties], num_layers: int) -> list[VerifiedGroup]:
        features = [each.num_kv_heads * each.token_sizes[0] for each in self.storages]
        ends = np.cumsum([2 * num_layers * n for n in features])
        factors = np.split(feature_factors(int(ends[-1])), ends[:-1])
        return [
            self._group_class(g)(
                g,
                len(kinds) == 1,
                kind,
                self.storages[g],
                self.tables[g],
                factors[g].reshape(-1, features[g]),
                self._chunk_tokens,
                self._specs[g].cached,
            )
            for g, kind in enumerate(kinds)
        ]


def _smallest(known: KVFormat) -> dict[str, int]:
    """Return the sizes of a small token that a format can hold."""
    size = known.group_size or 4
    sizes = (1, size, 4) if known.is_row else (2, size, size)
    return dict(zip(("num_kv_heads", "head_size", "v_head_size"), sizes))


def _all(found: Iterable[Found]) -> Found:
    """Return the number of wrong tokens over all groups, and the first wrong token."""
    count, first = 0, None
    for number, mismatch in found:
        count += number
        first = first or mismatch
    return count, first


def _check_memory(num_bytes: int, device: str) -> None:
    """Raise MemoryError if the sizes do not fit into memory, before the system kills the process."""
    if torch.device(device).type == "cuda":
        available = torch.cuda.mem_get_info(device)[0]
    elif hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    else:
        return
    if num_bytes > available:
        raise MemoryError(
            f"verification needs {num_bytes / 2**30:,.1f} GiB on {device}: "
            f"expected at most the {available / 2**30:,.1f} GiB that are available"
        )
