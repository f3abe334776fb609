# SPDX-License-Identifier: Apache-2.0
"""Swaps the sequences of a group between device and host."""

from __future__ import annotations

from kvcache.checks import integer
from kvcache.compat.block_space_manager.protocol import (
    RUNNING,
    SWAPPED,
    AllocStatus,
    SequenceGroupLike,
    fail_to_fit,
    length_of,
    seqs_with,
)
from kvcache.compat.block_space_manager.tables import Pairs, SequenceTables


class SequenceSwaps(SequenceTables):
    """Block tables that can be swapped. A block that a group's sequences share is moved only once."""

    def can_swap_out(self, seq_group: SequenceGroupLike) -> bool:
        """Return whether the blocks of the group's RUNNING sequences fit on the host."""
        if self._host is None:
            return False
        rows = self._rows(seq_group, seqs_with(seq_group, RUNNING), on_host=False)
        return self._held.num_unique_blocks(rows) <= self._host.num_free

    def swap_out(self, seq_group: SequenceGroupLike) -> Pairs:
        """Move the RUNNING sequences and the encoder of a group to the host.

        Each shared block is moved only once, and lookahead slots are released.

        Args:
            seq_group: The group.

        Returns:
            Copies to perform, as (device block, host block) pairs.

        Raises:
            ValueError: The blocks do not fit on the host.
        """
        self._check_has_host()
        since = self._num_changes
        seqs = seqs_with(seq_group, RUNNING)
        rows = self._rows(seq_group, seqs, on_host=False)
        held = [self._known(seq) for seq in seqs]
        self._begin_change(since)
        pairs = self._held.swap_out(rows, held)
        if pairs is None:
            what = f"seq_group {seq_group.request_id!r} does not fit on the host"
            fail_to_fit(what, self._host.num_free, "can_swap_out")
        return pairs

    def can_swap_in(self, seq_group: SequenceGroupLike, num_lookahead_slots: int) -> AllocStatus:
        """Return whether the SWAPPED sequences, their new tokens and the lookahead fit on the device.

        The result applies to a `swap_in` followed by one `append_slots` per sequence, in the group's
        order.

        Args:
            seq_group: The group.
            num_lookahead_slots: Extra slots per sequence for draft tokens.
        """
        lookahead = integer(num_lookahead_slots, "num_lookahead_slots")
        if self._host is None:
            return AllocStatus.NEVER
        seqs = seqs_with(seq_group, SWAPPED)
        rows = self._rows(seq_group, seqs, on_host=True)
        held = [self._known(seq) for seq in seqs]
        new = [length_of(seq) - each.num_tokens for each, seq in zip(held, seqs)]
        for each, seq, count in zip(held, seqs, new):
            if count < 0:
                self._fail_length(each, seq, each.num_tokens + count)
        slots = [count + lookahead for count in new]
        too_long = any(
            each.num_tokens + count > self._max_model_len for each, count in zip(held, new)
        )
        slots += [0] * (len(rows) - len(slots))  # the encoder's row needs no new slots
        required, alone = self._held.num_blocks_back(rows, slots)
        if self._pool.num_free - required >= self._watermark_blocks and not too_long:
            return AllocStatus.OK
        never = too_long or alone > self._pool.num_total
        return AllocStatus.NEVER if never else AllocStatus.LATER

    def swap_in(self, seq_group: SequenceGroupLike) -> Pairs:
        """Move the SWAPPED sequences and the encoder of a group back to the device.

        Full blocks that are still cached on the device are shared instead of moved.

        Args:
            seq_group: The group.

        Returns:
            Copies to perform, as (host block, device block) pairs.

        Raises:
            ValueError: The blocks do not fit on the device.
        """
        self._check_has_host()
        since = self._num_changes
        rows = self._rows(seq_group, seqs_with(seq_group, SWAPPED), on_host=True)
        self._begin_change(since)
        pairs = self._held.swap_in(rows)
        if pairs is None:
            what = f"seq_group {seq_group.request_id!r} does not fit on the device"
            fail_to_fit(what, self._pool.num_free, "can_swap_in")
        return pairs

    def _check_has_host(self) -> None:
        if self._host is None:
            raise ValueError("there is no host pool: expected num_cpu_blocks of 2 or more")
