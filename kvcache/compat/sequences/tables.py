# SPDX-License-Identifier: Apache-2.0
"""Block tables of sequences and encoders on both tiers."""

from __future__ import annotations

from typing import NoReturn

from kvcache.checks import refuse_pickle
from kvcache.compat.sequences.cross import CrossTables
from kvcache.compat.sequences.demand import AllocStatus
from kvcache.compat.sequences.protocol import SequenceGroupLike, SequenceLike
from kvcache.compat.sequences.tokens import TokenSource
from kvcache.native.load import core

Pairs = list[tuple[int, int]]


class SequenceTables(core.SequenceCalls):
    """Block tables. Each sequence with blocks, and each encoder, is a row of the native manager.

    Methods that a scheduler calls for each sequence in each step are implemented natively
    (`csrc/python/sequence_calls.cpp`) and declared here and in the subclasses.
    """

    def __init__(
        self,
        native: core.Manager,
        tokens: TokenSource,
        *,
        block_size: int,
        sliding_window: int | None,
        enable_caching: bool,
        watermark_blocks: int,
        max_model_len: int,
    ) -> None:
        super().__init__(
            native=native,
            block_size=block_size,
            sliding_window=sliding_window,
            enable_caching=enable_caching,
            watermark_blocks=watermark_blocks,
            max_model_len=max_model_len,
            statuses=(AllocStatus.OK, AllocStatus.LATER, AllocStatus.NEVER),
        )
        self._native = native
        self._pool = native.pool
        self._host = native.host
        self._tokens = tokens
        self._cross = CrossTables(native, tokens)

    def __reduce__(self) -> NoReturn:
        refuse_pickle(self, "its results, which can be sent between processes")

    def get_num_free_gpu_blocks(self) -> int:
        """Return the number of device blocks without references, cached or not."""
        return self._pool.num_free

    def get_num_free_cpu_blocks(self) -> int:
        """Return the number of host blocks without references, cached or not."""
        return 0 if self._host is None else self._host.num_free

    @core.native_method
    def get_block_table(self, seq: SequenceLike) -> list[int]:
        """Return the device blocks of a sequence, including lookahead blocks.

        Args:
            seq: The sequence.

        Returns:
            The manager's own list, which later calls update. Copy the list before changing or
            keeping it. Blocks that left the window are 0.
        """

    def get_cross_block_table(self, seq_group: SequenceGroupLike) -> list[int]:
        """Return the blocks of the group's encoder."""
        return self._cross.blocks(core.request_id_of(seq_group))

    def free(self, seq: SequenceLike) -> None:
        """Release the blocks of a sequence on either tier. Does nothing for a sequence without blocks."""
        seq_id = core.seq_id_of(seq)
        self._free_row(seq_id)
        self._tokens.forget(seq_id)

    def free_cross(self, seq_group: SequenceGroupLike) -> None:
        """Release the blocks of the group's encoder. Does nothing without an encoder."""
        self._free_encoder_row(self._cross.by_request, core.request_id_of(seq_group))

    def check_invariants(self) -> None:
        """Raise an error if the pools or the tables are inconsistent. For tests."""
        self._native.check_invariants()
        rows = [known.row for known in self._allocated.values()] + self._cross.rows()
        if len({*rows}) != len(rows) or self._native.num_rows != len(rows):
            raise RuntimeError(f"{self._native.num_rows} rows are in use, but {rows} are known")
        for seq_id, known in self._allocated.items():
            num_tokens = self._native.num_computed_tokens(known.row)
            if not num_tokens == known.num_tokens == len(known.tokens.ids):
                raise RuntimeError(
                    f"seq {seq_id!r} has {num_tokens} tokens with slots, a recorded count of "
                    f"{known.num_tokens}, and {len(known.tokens.ids)} known ids"
                )
            if self._native.is_on_host(known.row):
                continue
            blocks = self._native.blocks(known.row, 0).tolist()
            hits = blocks[: known.num_cached // self.block_size]
            if known.table not in (None, blocks) or known.hits not in (None, hits):
                raise RuntimeError(
                    f"seq {seq_id!r} has blocks {blocks}, but the returned table is {known.table}, and "
                    f"the returned hits are {known.hits} (did the caller change a returned list?)"
                )

    def _rows(
        self, seq_group: SequenceGroupLike, seqs: list[SequenceLike], on_host: bool
    ) -> list[int]:
        """Return the rows of these sequences and of the encoder, which must all be on the given tier."""
        rows = []
        for seq in seqs:
            row = self._known(seq).row
            core.check_tier(self._native, row, "seq", core.seq_id_of(seq), on_host)
            rows.append(row)
        cross = self._cross.row_on(core.request_id_of(seq_group), on_host)
        return rows if cross is None else [*rows, cross]
