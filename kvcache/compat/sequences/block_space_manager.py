# SPDX-License-Identifier: Apache-2.0
"""Manages the blocks of sequence groups, including forks, swaps and sliding windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcache.allocator.hashing import (
    DEFAULT_ALGORITHM,
    DEFAULT_SEED,
    hash_bytes_of,
    hash_key,
)
from kvcache.allocator.options import CacheOptions, watermark_blocks
from kvcache.checks import flag, integer
from kvcache.compat.sequences.caching import SequenceCaching
from kvcache.compat.sequences.checks import (
    check_one_prompt,
    checked_window,
    fail_to_fit,
)
from kvcache.compat.sequences.demand import (
    AllocStatus,
    num_skipped_blocks,
)
from kvcache.compat.sequences.protocol import (
    WAITING,
    SequenceGroupLike,
    SequenceLike,
)
from kvcache.compat.sequences.swaps import SequenceSwaps
from kvcache.compat.sequences.tables import Pairs
from kvcache.compat.sequences.tokens import Tokens, TokenSource
from kvcache.kinds import make_kind
from kvcache.native.load import core
from kvcache.step import NO_IDS


class BlockSpaceManager(SequenceSwaps, SequenceCaching):
    """Allocates blocks for groups of sequences that share a prompt, fork, and are swapped together.

    Sequences and groups are any objects with the attributes in `sequences/protocol.py`. The caller sets
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
        enable_caching: Whether later sequences can hit full blocks that were marked as computed.
        eviction: Eviction policy of the device if caching is enabled, one of `eviction_names()`. The
            policy "last_access" evicts the least recently accessed block; among equally recent blocks,
            it evicts the block with the longest prefix.
        eviction_options: Options of the eviction policy.
        enable_events: Whether to record cache events for `drain_events`.
        hash_seed: Seed whose hash is the parent of first blocks.
        hash_algorithm: "sha256_cbor" or "xxh3_128_cbor", as in `CacheOptions`.
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
        eviction: str = "last_access",
        eviction_options: Mapping[str, float] | None = None,
        enable_events: bool = False,
        hash_seed: str = DEFAULT_SEED,
        hash_algorithm: str = DEFAULT_ALGORITHM,
        max_model_len: int = 2**31 - 1,
    ) -> None:
        window = checked_window(sliding_window)
        block_size = integer(block_size, "block_size", 1)
        num_gpu_blocks = integer(num_gpu_blocks, "num_gpu_blocks")
        num_host_blocks = integer(num_cpu_blocks, "num_cpu_blocks")
        max_model_len = integer(max_model_len, "max_model_len", 1)
        hash_bytes_of(hash_algorithm, engines=False)
        options = CacheOptions(
            enable_caching=enable_caching,
            num_preallocate_tokens=0,
            enable_events=enable_events,
            hash_seed=hash_seed,
            hash_algorithm=hash_algorithm,
            eviction=eviction,
            eviction_options=eviction_options,
            num_host_blocks=num_host_blocks if num_host_blocks > 1 else 0,
        )
        kind = (
            make_kind("full_attention", {})
            if window is None
            else make_kind("sliding_window", {"window": window})
        )
        group = (kind, block_size, False, True, True)
        native = options.native_of([group], num_gpu_blocks, max_model_len)
        if not options.enable_caching:
            native.eviction = core.Eviction()
        super().__init__(
            core.Manager(native),
            TokenSource(hash_key(block_size, hash_seed, hash_algorithm, None)),
            block_size=block_size,
            sliding_window=window,
            enable_caching=flag(enable_caching, "enable_caching"),
            # `can_allocate` respects the watermark; `allocate` does not.
            watermark_blocks=watermark_blocks(watermark, num_gpu_blocks),
            max_model_len=max_model_len,
        )

    # Admission -------------------------------------------------------------------------------------

    @core.native_method
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

    def allocate(self, seq_group: SequenceGroupLike) -> None:
        """Allocate blocks for the group's encoder and for the prompt that its WAITING sequences share.

        Args:
            seq_group: The group, for which `can_allocate` returned `OK`.

        Raises:
            ValueError: The prompt does not fit, or a sequence already has blocks.
        """
        self._native.check_caller()
        since = self._num_changes
        seqs = core.sequences_with(seq_group, WAITING)
        # The decoder's KV depends on the encoder's input, so other requests cannot reuse this KV.
        has_encoder = core.has_encoder(seq_group)
        reads_ids = self.enable_caching and not has_encoder
        # Read each attribute of the engine's objects only once: a second read could return another
        # value.
        seq_ids, request_id = [core.seq_id_of(seq) for seq in seqs], core.request_id_of(seq_group)
        self._check_new(seq_group, request_id, seqs, seq_ids, reads_ids)
        if reads_ids:
            tokens = self._tokens.read(seqs[0])
        else:
            tokens = self._tokens.unread(core.length_of(seqs[0]))
        new = [(seq_ids[0], tokens)]
        new += [(seq_id, self._tokens.copy_of(tokens)) for seq_id in seq_ids[1:]]
        if has_encoder:
            num_encoder_tokens = core.encoder_length(seq_group, self.max_model_len)
            fits = self._take_with_encoder(request_id, num_encoder_tokens, new, since)
        elif reads_ids:
            fits = self._take_behind_hit(new, since)
        else:
            fits = self._take(new, [NO_IDS], 0, since)
        if not fits:
            what = f"seq_group {request_id!r} does not fit"
            fail_to_fit(what, self._pool.num_free, "can_allocate")
        for seq_id in seq_ids:
            self._tokens.forget(seq_id)

    def _take_behind_hit(self, new: list[tuple[object, Tokens]], since: int) -> bool:
        hits, num_cached = self._hit_of(new[0][1])
        if self._take(new, hits, num_cached, since):
            return True
        # Retry without the hit, because with a window, a sequence holds more blocks after a hit.
        return bool(num_cached) and self._take(new, [NO_IDS], 0, since)

    def _take_with_encoder(
        self,
        request_id: object,
        num_encoder_tokens: int,
        new: list[tuple[object, Tokens]],
        since: int,
    ) -> bool:
        if self._num_required(len(new[0][1].ids), num_encoder_tokens) > self._pool.num_free:
            return False
        encoder = self._cross.new_row(request_id, num_encoder_tokens)
        return self._take(new, [NO_IDS], 0, since, encoder)

    def _take(
        self,
        new: list[tuple[object, Tokens]],
        hits: list,
        num_cached: int,
        since: int,
        encoder: tuple | None = None,
    ) -> bool:
        """Create rows for these sequences after a hit. Return False if the rows do not fit."""
        num_tokens = len(new[0][1].ids)
        num_skipped = num_skipped_blocks(num_tokens, self.block_size, self.sliding_window)
        skips_blocks = bool(num_skipped and not num_cached)
        return self._take_rows(new, hits, num_cached, skips_blocks, encoder, since)

    # Growth ----------------------------------------------------------------------------------------

    @core.native_method
    def can_append_slots(self, seq_group: SequenceGroupLike, num_lookahead_slots: int) -> bool:
        """Return whether every RUNNING sequence fits with its new tokens and the lookahead.

        Assumes the worst case, in which each block that is written requires a new block.

        Args:
            seq_group: The group.
            num_lookahead_slots: Extra slots per sequence for draft tokens.
        """

    @core.native_method
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

    @core.native_method
    def append_group_slots(
        self, seq_groups: Sequence[SequenceGroupLike], num_lookahead_slots: int
    ) -> tuple[int, Pairs]:
        """Run `can_append_slots` and `append_slots` for each group of a decode step, in one call.

        The groups' RUNNING sequences are served in order, up to the first group that does not fit. All
        arguments are checked before anything changes. Lists returned by `get_block_table` are updated.

        Args:
            seq_groups: The groups.
            num_lookahead_slots: Extra slots per sequence for draft tokens.

        Returns:
            The number of served groups, and the copies for all of these groups as (source, destination)
            pairs.
        """

    def fork(self, parent_seq: SequenceLike, child_seq: SequenceLike) -> None:
        """Share all blocks of the parent with the child, copy-on-write.

        The child must begin with all tokens of the parent that have slots, and may have more tokens. The
        call checks the child's length and, with caching, its `extra_hash()` and the last `block_size`
        shared tokens. The caller must ensure that all earlier tokens match.

        Args:
            parent_seq: A sequence with blocks on the device.
            child_seq: A sequence without blocks.
        """
        self._native.check_caller()
        since = self._num_changes
        parent = self._known(parent_seq)
        child_id = core.seq_id_of(child_seq)
        if child_id in self._allocated:
            raise ValueError(f"child_seq {child_id!r} already has blocks: expected a new seq_id")
        parent_id = core.seq_id_of(parent_seq)
        core.check_tier(self._native, parent.row, "parent_seq", parent_id, on_host=False)
        tokens = self._tokens.of_child(child_seq, parent.tokens, parent.num_tokens)
        self._fork_row(parent, child_id, tokens, since)
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
        self._cross.check_new(request_id)
        for seq_id in seq_ids:
            if seq_id in self._allocated:
                raise ValueError(f"seq {seq_id!r} already has blocks: expected a new seq_id")
        if len(seqs) > 1:
            check_one_prompt(seq_group, seqs, reads_ids)
