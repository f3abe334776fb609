# SPDX-License-Identifier: Apache-2.0
"""Manages the blocks of sequence groups, including forks, swaps and sliding windows."""

from __future__ import annotations

import numpy as np

from kvcache.allocator import KVCacheManager, Request
from kvcache.allocator.options import watermark_blocks
from kvcache.checks import flag, integer, shown
from kvcache.compat.block_space_manager.caching import SequenceCaching
from kvcache.compat.block_space_manager.protocol import (
    RUNNING,
    WAITING,
    AllocStatus,
    SequenceGroupLike,
    SequenceLike,
    check_one_prompt,
    checked_window,
    encoder_length,
    fail_to_fit,
    has_encoder,
    id_of,
    length_of,
    num_skipped_blocks,
    seqs_of,
    seqs_with,
    status_of,
)
from kvcache.compat.block_space_manager.swaps import SequenceSwaps
from kvcache.compat.block_space_manager.tables import Pairs, SequenceRow
from kvcache.step import NO_IDS


class BlockSpaceManager(SequenceSwaps, SequenceCaching):
    """Allocates blocks for groups of sequences that share a prompt, fork, and are swapped together.

    Sequences and groups are any objects with the attributes in `protocol.py`. The caller sets
    the status of each sequence: `can_allocate` and `allocate` use a group's WAITING sequences,
    `can_append_slots` and swap-outs use its RUNNING sequences, and swap-ins use its SWAPPED sequences.
    Token ids are read only if caching is enabled. Allocated sequences only grow: new ids and those of
    the last block are read, and an id that differs from the earlier one is rejected. An
    encoder-decoder group also has a cross-attention table, identified by the group's
    `request_id`. The encoder's blocks are never cached.

    Calls return (source, destination) pairs of blocks to copy. Perform the copies in the order of
    the calls. A manager belongs to the thread that first uses it. `watermark_blocks` can be set;
    all other attributes are read-only.

    Args:
        block_size: Tokens per block.
        num_gpu_blocks: Size of the device pool, including its null block 0.
        num_cpu_blocks: Size of the host pool, including its null block 0. Host block ids are independent
            of device block ids. With 0 or 1, there is no host pool, and nothing can be swapped.
        watermark: Fraction of the device blocks, 0 to 1, that admissions and swap-ins leave free.
            `watermark_blocks` is this fraction as a number of blocks.
        sliding_window: Window in tokens. A sequence holds at most `sliding_window // block_size + 2`
            blocks; earlier table entries are the null block. A prompt is computed in one chunk, so
            blocks before the window at the end of the prompt are not allocated. After a prefix hit, the
            sequence instead holds all blocks from the window at the end of the hit to the end of the
            prompt. If these blocks exceed the limit, the hit is not used.
        enable_caching: Whether later sequences can hit full blocks that were marked as computed. The
            least recently accessed block is evicted first; among equally recent blocks, the block with
            the longest prefix.
        enable_events: Whether to record cache events for `drain_events`.
        max_model_len: Maximum number of tokens in a sequence.

    Raises:
        TypeError, ValueError: An argument of the constructor or of a call is invalid. Nothing has
            changed.
        MemoryError: Memory ran out. If this happens while a call modifies the manager, the manager
            can no longer be used, as with `KVCacheManager`.

    Example:
        >>> class Prompt:
        ...     seq_id, status = 0, "WAITING"
        ...     def __init__(self, token_ids): self.token_ids = token_ids
        ...     def get_len(self): return len(self.token_ids)
        ...     def get_token_ids(self): return self.token_ids
        >>> class Group:
        ...     request_id = "r1"
        ...     def __init__(self, *seqs): self.seqs = seqs
        ...     def get_seqs(self): return self.seqs
        ...     def is_encoder_decoder(self): return False
        >>> seq = Prompt([*range(40)])
        >>> manager = BlockSpaceManager(16, num_gpu_blocks=9, num_cpu_blocks=9)
        >>> manager.can_allocate(Group(seq))
        <AllocStatus.OK: 1>
        >>> manager.allocate(Group(seq))
        >>> manager.get_block_table(seq)
        [1, 2, 3]
        >>> best = Prompt([*range(40), 7])
        >>> best.seq_id, best.status = 1, "RUNNING"
        >>> manager.fork(seq, best)
        >>> manager.append_slots(best, 0)
        [(3, 4)]
    """

    def __init__(
        self,
        block_size: int,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        watermark: float = 0.01,
        sliding_window: int | None = None,
        enable_caching: bool = False,
        *,
        enable_events: bool = False,
        max_model_len: int = 2**31 - 1,
    ) -> None:
        window = checked_window(sliding_window)
        block_size = integer(block_size, "block_size", 1)
        num_gpu_blocks = integer(num_gpu_blocks, "num_gpu_blocks")
        num_host_blocks = integer(num_cpu_blocks, "num_cpu_blocks")
        max_model_len = integer(max_model_len, "max_model_len", 1)
        manager = KVCacheManager(
            block_size,
            num_gpu_blocks,
            max_model_len,
            window,
            flag(enable_caching, "enable_caching"),
            num_preallocate_tokens=0,
            enable_events=enable_events,
            eviction="last_access" if enable_caching else "lru",
            num_host_blocks=num_host_blocks if num_host_blocks > 1 else 0,
        )
        super().__init__(
            manager,
            block_size=block_size,
            sliding_window=window,
            enable_caching=enable_caching,
            # `can_allocate` respects the watermark; `allocate` does not.
            watermark_blocks=watermark_blocks(watermark, num_gpu_blocks),
        )

    # Admission -------------------------------------------------------------------------------------

    def can_allocate(
        self, seq_group: SequenceGroupLike, num_lookahead_slots: int = 0
    ) -> AllocStatus:
        """Return whether the group's prompt fits without hits while the watermark stays free.

        Args:
            seq_group: The group. Its WAITING sequences share one prompt.
            num_lookahead_slots: Extra slots per sequence for draft tokens.

        Returns:
            `OK`; `LATER` if the prompt may fit after other blocks are freed; or `NEVER`.
        """
        lookahead = integer(num_lookahead_slots, "num_lookahead_slots")
        seq = seqs_with(seq_group, WAITING)[0]
        max_model_len, num_encoder_tokens = self._max_model_len, 0
        if has_encoder(seq_group):
            num_encoder_tokens = encoder_length(seq_group, max_model_len)
        num_tokens = length_of(seq)
        required = self._num_required(num_tokens + lookahead, num_encoder_tokens)
        num_free, watermark = self._held.num_free(), self._watermark_blocks
        if num_tokens > max_model_len or self._pool.num_total - required < watermark:
            return AllocStatus.NEVER
        fits = num_free - required >= watermark
        return AllocStatus.OK if fits else AllocStatus.LATER

    def allocate(self, seq_group: SequenceGroupLike) -> None:
        """Allocate blocks for the group's encoder and for the prompt that its WAITING sequences share.

        Args:
            seq_group: The group, for which `can_allocate` returned `OK`.

        Raises:
            ValueError: The prompt does not fit, or a sequence already has blocks.
        """
        self._held.check_caller()
        since = self._num_changes
        seqs = seqs_with(seq_group, WAITING)
        has_cross = has_encoder(seq_group)
        # The decoder's KV depends on the encoder's input, so other requests cannot reuse this KV.
        reads_ids = self._enable_caching and not has_cross
        # Read each attribute of the engine's objects only once: a second read could return another
        # value.
        seq_ids, request_id = [id_of(seq) for seq in seqs], id_of(seq_group, "request_id")
        self._check_new(seq_group, request_id, seqs, seq_ids, reads_ids)
        if reads_ids:
            request = self._tokens.read(seqs[0])
        else:
            request = self._tokens.unread(length_of(seqs[0]))
        requests = [request, *(self._tokens.copy_of(request) for _ in seq_ids[1:])]
        new = dict(zip(seq_ids, requests))
        encoder, has_room = None, True
        if has_cross:
            num_encoder_tokens = encoder_length(seq_group, self._max_model_len)
            num_required = self._num_required(request.num_tokens, num_encoder_tokens)
            has_room = num_required <= self._pool.num_free
            if has_room:
                encoder = SequenceRow(self._tokens.unread(num_encoder_tokens))
        crosses = {} if encoder is None else {request_id: encoder}
        hits, num_cached = self._hit_of(request) if reads_ids else ([NO_IDS], 0)
        # Retry without the hit, because with a window, a sequence holds more blocks after a hit.
        fits = has_room and (
            self._take(new, crosses, hits, num_cached, since)
            or (num_cached > 0 and self._take(new, crosses, [NO_IDS], 0, since + 1))
        )
        if not fits:
            what = f"seq_group {request_id!r} does not fit"
            fail_to_fit(what, self._pool.num_free, "can_allocate")
        for seq_id in seq_ids:
            self._tokens.forget(seq_id)

    def _take(
        self,
        new: dict[object, Request],
        crosses: dict[object, SequenceRow],
        hits: list[np.ndarray],
        num_cached: int,
        since: int,
    ) -> bool:
        """Create the rows of a group after a hit. Return False if the prompt does not fit."""
        request, *others = new.values()
        num_skipped = num_skipped_blocks(request.num_tokens, self._block_size, self._window)
        parent = SequenceRow(request, num_cached, skips_blocks=bool(num_skipped and not num_cached))
        held = [parent, *(parent.forked(each) for each in others)]
        (encoder,) = crosses.values() or (None,)
        self._begin_change(since)
        # Entries precede their rows, so that an interrupt loses no row.
        self._sequences |= zip(new, held)
        self._encoders |= crosses
        try:
            return self._held.admit(held, hits, encoder)
        finally:
            if parent.row < 0:
                for seq_id in new:
                    self._sequences.pop(seq_id)
                for request_id in crosses:
                    self._encoders.pop(request_id)

    # Growth ----------------------------------------------------------------------------------------

    def can_append_slots(self, seq_group: SequenceGroupLike, num_lookahead_slots: int) -> bool:
        """Return whether every RUNNING sequence fits with its new tokens and the lookahead.

        Assumes the worst case, in which each block that is written requires a new block.

        Args:
            seq_group: The group.
            num_lookahead_slots: Extra slots per sequence for draft tokens.
        """
        lookahead = integer(num_lookahead_slots, "num_lookahead_slots")
        size, num_touched, is_too_long = self._block_size, 0, False
        for seq in seqs_of(seq_group):
            if status_of(seq) != RUNNING:
                continue
            each, stop = self._known(seq), length_of(seq)
            start = each.num_tokens
            if stop < start:
                self._fail_length(each, seq, stop)
            if stop > self._max_model_len:
                is_too_long = True
            if stop + lookahead > start:
                num_touched += (stop + lookahead - 1) // size - start // size + 1
        return num_touched <= self._held.num_free() and not is_too_long

    def append_slots(self, seq: SequenceLike, num_lookahead_slots: int) -> Pairs:
        """Allocate slots for the tokens added since the last call, and for the lookahead.

        Args:
            seq: A sequence with blocks on the device.
            num_lookahead_slots: Extra slots for draft tokens. The next tokens reuse these slots.

        Returns:
            Copy-on-write copies as (source, destination) pairs. Empty if there are neither new tokens
            nor lookahead slots.

        Raises:
            ValueError: The slots do not fit.
        """
        since = self._num_changes
        each = self._known(seq)
        lookahead = integer(num_lookahead_slots, "num_lookahead_slots")
        length = length_of(seq)
        num_new, table = length - each.num_tokens, each.table or self._table(each, seq)
        if num_new < 0:
            self._fail_length(each, seq, length)
        if num_new == 0 and lookahead == 0:
            return []
        ids = self._new_ids(each, seq, num_new) if num_new and each.reads_ids else None
        self._begin_change(since)
        pairs = self._held.append_slots(each, each.row, num_new, lookahead, ids, table)
        if pairs is None:
            raise ValueError(
                f"seq {shown(id_of(seq))} cannot get {num_new} slots and {lookahead} more, because only "
                f"{self._pool.num_free} blocks are free: expected a call to can_append_slots first"
            )
        return pairs

    def fork(self, parent_seq: SequenceLike, child_seq: SequenceLike) -> None:
        """Share all blocks of the parent with the child, copy-on-write.

        The child must begin with all tokens of the parent that have slots, and may have more tokens. The
        call checks the child's length and, with caching, its `extra_hash()` and the last `block_size`
        shared tokens. The caller must ensure that all earlier tokens match.

        Args:
            parent_seq: A sequence with blocks on the device.
            child_seq: A sequence without blocks.
        """
        self._held.check_caller()
        since = self._num_changes
        parent = self._known(parent_seq)
        child_id = id_of(child_seq)
        if self._entry(self._sequences, child_id) is not None:
            raise ValueError(f"child_seq {child_id!r} already has blocks: expected a new seq_id")
        self._check_tier(parent, "parent_seq", id_of(parent_seq), on_host=False)
        request = self._tokens.of_child(child_seq, parent.request)
        child = parent.forked(request)
        self._begin_change(since)
        self._sequences[child_id] = child
        try:
            self._held.fork(parent, child)
        finally:
            if child.row < 0:
                self._sequences.pop(child_id)
        self._tokens.forget(child_id)

    # Checks ----------------------------------------------------------------------------------------

    def _check_new(
        self,
        seq_group: SequenceGroupLike,
        request_id: object,
        seqs: list[SequenceLike],
        seq_ids: list[object],
        reads_ids: bool,
    ) -> None:
        if self._entry(self._encoders, request_id) is not None:
            raise ValueError(
                f"seq_group {request_id!r} already has a cross-attention table: expected "
                "free_cross first"
            )
        for seq_id in seq_ids:
            if self._entry(self._sequences, seq_id) is not None:
                raise ValueError(f"seq {seq_id!r} already has blocks: expected a new seq_id")
        if len(seqs) > 1:
            check_one_prompt(seq_group, seqs, reads_ids)
