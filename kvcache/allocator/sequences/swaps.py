"""Swaps: sequences of a group that move to the host and back."""

from __future__ import annotations

from kvcache.allocator.sequences.checks import fail_to_fit
from kvcache.allocator.sequences.demand import AllocStatus
from kvcache.allocator.sequences.protocol import RUNNING, SWAPPED, SequenceGroupLike
from kvcache.allocator.sequences.tables import Pairs, SequenceTables
from kvcache.checks import integer
from kvcache.native.load import core


class SequenceSwaps(SequenceTables):
    """Tables that move between the tiers; blocks that several of a group hold move once."""

    def can_swap_out(self, seq_group: SequenceGroupLike) -> bool:
        """Whether the blocks of the group's RUNNING sequences fit on the host."""
        if self._host is None:
            return False
        rows = self._rows(seq_group, core.sequences_with(seq_group, RUNNING), on_host=False)
        return self._native.num_unique_blocks(rows) <= self._host.num_free

    def swap_out(self, seq_group: SequenceGroupLike) -> Pairs:
        """Moves the RUNNING sequences and the encoder to the host: (device block, host block).

        Blocks that several hold move once; lookahead slots are released.
        """
        self._check_has_host()
        seqs = core.sequences_with(seq_group, RUNNING)
        rows = self._rows(seq_group, seqs, on_host=False)
        pairs = self._swap_out_rows(rows, [self._known(seq) for seq in seqs])
        if pairs is None:
            what = f"seq_group {seq_group.request_id!r} does not fit on the host"
            fail_to_fit(what, self._host.num_free, "can_swap_out")
        return pairs

    def can_swap_in(self, seq_group: SequenceGroupLike, num_lookahead_slots: int) -> AllocStatus:
        """Whether the SWAPPED sequences, their new tokens and the lookahead fit on the device.

        That is: `swap_in`, and then `append_slots` of each of them, in the order of the group.
        """
        lookahead = integer(num_lookahead_slots, "num_lookahead_slots")
        if self._host is None:
            return AllocStatus.NEVER
        seqs = core.sequences_with(seq_group, SWAPPED)
        rows = self._rows(seq_group, seqs, on_host=True)
        new = [self._num_new(seq) for seq in seqs]
        slots = [count + lookahead for count in new]
        too_long = any(
            self._known(seq).num_tokens + count > self.max_model_len
            for seq, count in zip(seqs, new)
        )
        slots += [0] * (len(rows) - len(slots))  # the encoder's row
        required, alone = self._native.num_blocks_back(rows, slots)
        if self._pool.num_free - required >= self.watermark_blocks and not too_long:
            return AllocStatus.OK
        never = too_long or alone > self._pool.num_total
        return AllocStatus.NEVER if never else AllocStatus.LATER

    def swap_in(self, seq_group: SequenceGroupLike) -> Pairs:
        """Moves the SWAPPED sequences and the encoder back: (host block, device block).

        Full blocks that the device's cache still has are shared, not moved.
        """
        self._check_has_host()
        rows = self._rows(seq_group, core.sequences_with(seq_group, SWAPPED), on_host=True)
        pairs = self._native.swap_in(rows)
        if pairs is None:
            what = f"seq_group {seq_group.request_id!r} does not fit on the device"
            fail_to_fit(what, self._pool.num_free, "can_swap_in")
        return pairs

    def _check_has_host(self) -> None:
        if self._host is None:
            raise ValueError("there is no host pool: expected num_cpu_blocks of 2 or more")
