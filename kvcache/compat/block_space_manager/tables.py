# SPDX-License-Identifier: Apache-2.0
"""Block tables of sequences and encoders on both tiers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from kvcache.allocator import KVCacheManager, Request
from kvcache.allocator.held_rows import HeldRow, HeldRows
from kvcache.checks import integer, refuse_pickle, shown
from kvcache.compat.block_space_manager.protocol import (
    SequenceGroupLike,
    SequenceLike,
    fail_ids,
    id_of,
    token_ids_of,
)
from kvcache.compat.block_space_manager.tokens import TokenSource

Pairs = list[tuple[int, int]]


class SequenceRow(HeldRow):
    """The row of a sequence or of an encoder, with what was marked as computed."""

    __slots__ = (
        *("num_cached", "num_marked", "num_prompt", "num_with_kv", "reads_ids", "skips_blocks"),
    )

    def __init__(self, request: Request, num_cached: int = 0, skips_blocks: bool = False) -> None:
        super().__init__(request)
        self.reads_ids = request.read_cache  # whether token ids are needed
        # If the prompt is longer than the window, only the blocks within the window at the end of
        # the prompt are allocated.
        self.skips_blocks = skips_blocks
        self.num_prompt = self.num_tokens  # number of tokens with slots at allocation
        self.num_cached = num_cached  # number of prompt tokens that hit the cache at allocation
        self.num_marked = 0  # sum of all marks, at most the number of tokens with slots
        self.num_with_kv = 0  # number of tokens with KV after the last mark

    def forked(self, request: Request) -> SequenceRow:
        """Return the initial state of a child, without a row."""
        child = SequenceRow(request, self.num_cached, self.skips_blocks)
        child.num_prompt, child.num_marked = self.num_prompt, self.num_marked
        child.num_with_kv = self.num_with_kv
        return child


class SequenceTables:
    """Block tables. Each sequence with blocks, and each encoder, is a row of the native manager."""

    def __init__(
        self,
        manager: KVCacheManager,
        *,
        block_size: int,
        sliding_window: int | None,
        enable_caching: bool,
        watermark_blocks: int,
    ) -> None:
        self._manager = manager
        self._held = HeldRows(manager)
        self._pool, self._host = manager.pool, manager.host_pool
        self._block_size = block_size
        self._window = sliding_window
        self._enable_caching = enable_caching
        self._max_model_len = manager.max_model_len
        self._watermark_blocks = watermark_blocks
        self._tokens = TokenSource(block_size)
        # Entries are added before their rows, and entries without a row count as missing.
        self._sequences: dict[object, SequenceRow] = {}  # by seq_id
        self._encoders: dict[object, SequenceRow] = {}  # by request_id
        self._num_changes = 0

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "its results, which can be sent between processes")

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self._block_size

    @property
    def sliding_window(self) -> int | None:
        """Window in tokens, or None."""
        return self._window

    @property
    def enable_caching(self) -> bool:
        """Whether later sequences can hit blocks."""
        return self._enable_caching

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens in a sequence."""
        return self._max_model_len

    @property
    def watermark_blocks(self) -> int:
        """Number of device blocks that admissions and swap-ins leave free."""
        return self._watermark_blocks

    @watermark_blocks.setter
    def watermark_blocks(self, value: int) -> None:
        self._watermark_blocks = integer(value, "watermark_blocks")

    def get_num_free_gpu_blocks(self) -> int:
        """Return the number of device blocks without references, cached or not."""
        return self._pool.num_free

    def get_num_free_cpu_blocks(self) -> int:
        """Return the number of host blocks without references, cached or not."""
        return 0 if self._host is None else self._host.num_free

    def get_block_table(self, seq: SequenceLike) -> list[int]:
        """Return the device blocks of a sequence, including lookahead blocks.

        Args:
            seq: The sequence.

        Returns:
            The manager's own list, which later calls update. Copy the list before changing or
            keeping it. Blocks that left the window are 0.
        """
        each = self._known(seq)
        self._held.check_reader()
        return each.table or self._table(each, seq)

    def get_cross_block_table(self, seq_group: SequenceGroupLike) -> list[int]:
        """Return the blocks of the group's encoder."""
        request_id = id_of(seq_group, "request_id")
        encoder = self._entry(self._encoders, request_id)
        if encoder is None:
            raise ValueError(
                f"group {request_id!r} has no cross-attention table: expected a group that "
                "was allocated with an encoder"
            )
        self._check_tier(encoder, "the encoder of group", request_id, on_host=False)
        return self._held.blocks(encoder)

    def free(self, seq: SequenceLike) -> None:
        """Release the blocks of a sequence on either tier. Does nothing for a sequence without blocks."""
        seq_id = id_of(seq)
        self._free(self._sequences, seq_id)
        self._tokens.forget(seq_id)

    def free_cross(self, seq_group: SequenceGroupLike) -> None:
        """Release the blocks of the group's encoder. Does nothing without an encoder."""
        self._free(self._encoders, id_of(seq_group, "request_id"))

    def check_invariants(self) -> None:
        """Raise an error if the pools or the tables are inconsistent. For tests."""
        held = (*self._sequences.values(), *self._encoders.values())
        self._held.check([each for each in held if each.row >= 0])

    # Rows ------------------------------------------------------------------------------------------

    @staticmethod
    def _entry(held: dict[object, SequenceRow], name: object) -> SequenceRow | None:
        each = held.get(name)
        return each if each is not None and each.row >= 0 else None

    def _find(self, seq: SequenceLike) -> SequenceRow | None:
        try:
            each = self._sequences.get(seq.seq_id)
        except (AttributeError, TypeError):
            each = self._sequences.get(id_of(seq))  # raises if the id is missing or not hashable
        return each if each is not None and each.row >= 0 else None

    def _known(self, seq: SequenceLike) -> SequenceRow:
        try:
            each = self._sequences[seq.seq_id]
        except (AttributeError, KeyError, TypeError):
            each = self._find(seq)
        if each is None or each.row < 0:
            raise ValueError(
                f"seq {shown(id_of(seq))} has no blocks: expected one that was allocated"
            )
        return each

    def _table(self, each: SequenceRow, seq: SequenceLike) -> list[int]:
        """Return the table of a sequence, which must be on the device."""
        if each.table is None:
            self._check_tier(each, "seq", id_of(seq), on_host=False)
            each.table = self._held.blocks(each)
        return each.table

    def _check_tier(self, each: SequenceRow, what: str, name: object, on_host: bool) -> None:
        if self._held.is_on_host(each.row) != on_host:
            found = "on the device: expected one that is swapped out"
            if not on_host:
                found = "swapped out: expected one on the device"
            raise ValueError(f"{what} {name!r} is {found}")

    def _rows(
        self, seq_group: SequenceGroupLike, seqs: list[SequenceLike], on_host: bool
    ) -> list[int]:
        """Return the rows of these sequences and of the encoder, which must all be on the given tier."""
        rows = []
        for seq in seqs:
            each = self._known(seq)
            self._check_tier(each, "seq", id_of(seq), on_host)
            rows.append(each.row)
        encoder = self._entry(self._encoders, id_of(seq_group, "request_id"))
        if encoder is not None and self._held.is_on_host(encoder.row) == on_host:
            rows.append(encoder.row)
        return rows

    def _free(self, held: dict[object, SequenceRow], name: object) -> None:
        each = held.get(name)
        if each is None:
            return
        self._num_changes += 1
        if each.row >= 0:
            self._held.free(each)
        if each.row < 0:  # a broken manager frees nothing
            held.pop(name, None)

    def _begin_change(self, since: int) -> None:
        """Count a change. Raises RuntimeError if there were other changes after the first `since`.

        Reading the engine's objects may run code that calls the manager. Calls that change the
        manager therefore read `_num_changes` first, and call this method when they have read all
        objects.
        """
        if self._num_changes != since:
            self._fail_nested()
        self._num_changes = since + 1

    @staticmethod
    def _fail_nested() -> NoReturn:
        raise RuntimeError(
            "another call changed the manager during this call (from the code of a sequence or a "
            "signal handler): only one call can run at a time"
        )

    # Tokens ----------------------------------------------------------------------------------------

    @staticmethod
    def _fail_length(each: SequenceRow, seq: SequenceLike, length: int) -> NoReturn:
        raise ValueError(
            f"seq {shown(id_of(seq))} has {length} tokens: expected {each.num_tokens} or more, the "
            "tokens that have slots"
        )

    def _new_ids(self, each: SequenceRow, seq: SequenceLike, num_new: int) -> Sequence[int]:
        """Return the ids of the tokens without slots.

        The ids of the last block with slots must not have changed: otherwise, a block whose KV belongs
        to other tokens would be cached.
        """
        first = each.num_tokens
        begin = (first - 1) // self._block_size * self._block_size
        ids = token_ids_of(seq)[begin:]
        before, num_known = each.ids_from(begin), first - begin
        known = ids[:num_known]
        if known != before if type(known) is list else [*known] != before:
            for i, (found, expected) in enumerate(zip(ids, before), begin):
                if found != expected:
                    raise ValueError(
                        f"get_token_ids()[{i}] of seq {shown(id_of(seq))} is {shown(found)}: expected "
                        f"{expected}, as before, because tokens with slots must not change"
                    )
        if begin + len(ids) != first + num_new:
            fail_ids(seq, begin + len(ids), first + num_new)
        return ids[num_known:]

    def _num_required(self, num_slots: int, num_encoder_tokens: int) -> int:
        """Return the number of blocks of a prompt with these slots and of its encoder."""
        size = self._block_size
        required = -(-num_slots // size)
        if self._window is not None:
            required = min(required, self._window // size + 2)
        return required + -(-num_encoder_tokens // size)
