"""The tables of sequences and encoders, on both tiers."""

from __future__ import annotations

import numpy as np

from kvcache.allocator.sequences.allocated import AllocatedSequence
from kvcache.allocator.sequences.checks import check_tier, fail_shorter, fail_unknown
from kvcache.allocator.sequences.cross import CrossTables
from kvcache.allocator.sequences.demand import num_touched_blocks
from kvcache.allocator.sequences.protocol import SequenceGroupLike, SequenceLike
from kvcache.allocator.sequences.tokens import TokenSource
from kvcache.native.load import core

Pairs = list[tuple[int, int]]


class SequenceTables:
    """Each sequence that has blocks, and each encoder, is a row of the native manager."""

    def __init__(
        self,
        native: core.Manager,
        tokens: TokenSource,
        *,
        block_size: int,
        sliding_window: int | None,
        enable_caching: bool,
        watermark_blocks: int,
    ) -> None:
        self.block_size = block_size
        self.sliding_window = sliding_window
        self.enable_caching = enable_caching
        self.watermark_blocks = watermark_blocks
        self._native = native
        self._pool = native.pool
        self._host = native.host
        self._tokens = tokens
        self._allocated: dict[object, AllocatedSequence] = {}  # by seq_id
        self._cross = CrossTables(native, tokens)

    def get_num_free_gpu_blocks(self) -> int:
        """Blocks of the device without references, cached or not."""
        return self._pool.num_free

    def get_num_free_cpu_blocks(self) -> int:
        """The same of the host."""
        return 0 if self._host is None else self._host.num_free

    def get_block_table(self, seq: SequenceLike) -> list[int]:
        """Blocks of a sequence on the device, lookahead ones too; 0 where a window left one."""
        return self._native.blocks(self._on_device(seq).row, 0).tolist()

    def get_cross_block_table(self, seq_group: SequenceGroupLike) -> list[int]:
        """Blocks of the group's encoder."""
        return self._cross.blocks(seq_group.request_id)

    def free(self, seq: SequenceLike) -> None:
        """Releases a sequence's blocks, on either tier; does nothing for a sequence without blocks."""
        known = self._allocated.get(seq.seq_id)
        if known is not None:
            self._native.free(known.row)
            del self._allocated[seq.seq_id]
        else:
            self._tokens.forget(seq)

    def free_cross(self, seq_group: SequenceGroupLike) -> None:
        """Releases the blocks of a group's encoder; does nothing without an encoder."""
        self._cross.free(seq_group.request_id)

    def check_invariants(self) -> None:
        """Raises where the pools or these tables are not consistent; for tests."""
        self._native.check_invariants()
        rows = [known.row for known in self._allocated.values()] + self._cross.rows()
        if len({*rows}) != len(rows) or self._native.num_rows != len(rows):
            raise RuntimeError(f"{self._native.num_rows} rows are in use, but {rows} are known")
        for seq_id, known in self._allocated.items():
            num_tokens = self._native.num_computed_tokens(known.row)
            if not num_tokens == known.num_tokens == len(known.tokens.ids):
                raise RuntimeError(
                    f"seq {seq_id!r} has {num_tokens} tokens with slots, {known.num_tokens} that are "
                    f"said to be, and {len(known.tokens.ids)} known ids"
                )

    def _known(self, seq: SequenceLike) -> AllocatedSequence:
        known = self._allocated.get(seq.seq_id)
        if known is None:
            fail_unknown(seq)
        return known

    def _on_device(self, seq: SequenceLike) -> AllocatedSequence:
        known = self._known(seq)
        check_tier(self._native, known.row, "seq", seq.seq_id, on_host=False)
        return known

    def _rows(
        self, seq_group: SequenceGroupLike, seqs: list[SequenceLike], on_host: bool
    ) -> list[int]:
        """Rows of these sequences, and the encoder's; all of them on this tier."""
        rows = []
        for seq in seqs:
            row = self._known(seq).row
            check_tier(self._native, row, "seq", seq.seq_id, on_host)
            rows.append(row)
        cross = self._cross.row_on(seq_group.request_id, on_host)
        return rows if cross is None else [*rows, cross]

    def _num_new(self, seq: SequenceLike) -> int:
        """Tokens of an allocated sequence that have no slots yet."""
        num_tokens = self._known(seq).num_tokens
        num_new = seq.get_len() - num_tokens
        if num_new < 0:
            fail_shorter(seq, num_tokens)
        return num_new

    def _num_touched(self, seqs: list[SequenceLike], num_lookahead_slots: int) -> int:
        """Blocks that the new tokens of these sequences and the lookahead would be written to."""
        num_touched = 0
        for seq in seqs:
            num_slots = self._num_new(seq) + num_lookahead_slots
            num_tokens = self._known(seq).num_tokens
            num_touched += num_touched_blocks(num_tokens, num_slots, self.block_size)
        return num_touched

    def _admit(self, seq: SequenceLike, known: AllocatedSequence) -> None:
        self._allocated[seq.seq_id] = known
        self._tokens.forget(seq)


def as_pairs(pairs: np.ndarray) -> Pairs:
    """(source, destination) of each row of int32[n, 2]."""
    return list(zip(*pairs.T.tolist()))
