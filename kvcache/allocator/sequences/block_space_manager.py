"""The sequence-group manager: fork, swap, windows, on the native manager of `manager.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvcache.allocator.hashing import (
    DEFAULT_ALGORITHM,
    DEFAULT_SEED,
    hash_bytes_of,
    hash_key,
)
from kvcache.allocator.options import CacheOptions, watermark_blocks
from kvcache.allocator.sequences.caching import SequenceCaching
from kvcache.allocator.sequences.checks import (
    check_one_prompt,
    checked_window,
    fail_to_fit,
)
from kvcache.allocator.sequences.demand import (
    AllocStatus,
    num_skipped_blocks,
)
from kvcache.allocator.sequences.protocol import (
    WAITING,
    SequenceGroupLike,
    SequenceLike,
)
from kvcache.allocator.sequences.swaps import SequenceSwaps
from kvcache.allocator.sequences.tables import Pairs
from kvcache.allocator.sequences.tokens import Tokens, TokenSource
from kvcache.checks import flag, integer
from kvcache.kinds import make_kind
from kvcache.native.load import core
from kvcache.step import NO_IDS


class BlockSpaceManager(SequenceSwaps, SequenceCaching):
    """Blocks for sequences that share a prompt, fork, and move to the host and back as a group.

    A device pool of `num_gpu_blocks` and a host pool of `num_cpu_blocks`, the null block 0 of each
    counted; ids of the two never mix. With 0 or 1 host blocks there is no host pool: nothing can be
    swapped. `watermark`: share of the device's blocks, 0 to 1, that admissions and swaps in leave
    free; `watermark_blocks` is that number of blocks, which may be set. Other attributes are read-only.
    `sliding_window`: tokens; at most `sliding_window // block_size + 2` blocks are held, earlier entries
    of a table are the null block. A prompt is computed at once, from its own K and V,
    so that what lies before the window of its end is never held: no chunked prefill with a window.
    Behind a cached prefix all of it is held; where that is more, the hit is not taken. `enable_caching`:
    full blocks that were marked as computed are hits for later sequences. Further options:

    - `eviction`, `eviction_options`: with caching, which cached block of the device goes first when
      its space is needed, one of `eviction_names()`. "last_access": the one accessed least recently,
      of several the one with the longest prefix.
    - `enable_events`: `drain_events` returns what entered and left the cache.
    - `hash_seed` gives the parent of first blocks; `hash_algorithm`: "sha256_cbor" or "xxh3_128_cbor",
      as of `CacheOptions`. `max_model_len`: tokens of a sequence.

    Sequences and groups are any objects with the attributes in `sequences/protocol.py`. The caller sets
    the status of sequences: `can_allocate` and `allocate` use the WAITING ones of a group,
    `can_append_slots` and swap-outs the RUNNING ones, swap-ins the SWAPPED ones. Token ids are read only
    with caching, and of known sequences only the tail. An encoder-decoder group also has a
    cross-attention table under its `request_id`; it neither takes hits nor is cached.

    Copy the pairs (source, destination) that calls return in the order of the calls. Every error is a
    ValueError or TypeError and changes nothing; MemoryError in the midst of a change breaks the manager,
    as it does a `KVCacheManager`. A manager belongs to the thread that first uses it.

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
        native.computes_whole_prompt = True
        native.publishes_when_marked = True
        native.caches_swapped_rows = False
        if not options.enable_caching:
            native.eviction = core.Eviction()
        super().__init__(
            core.Manager(native),
            TokenSource(hash_key(block_size, hash_seed, hash_algorithm, None)),
            block_size=block_size,
            sliding_window=window,
            enable_caching=flag(enable_caching, "enable_caching"),
            # `can_allocate` keeps it, not `allocate`.
            watermark_blocks=watermark_blocks(watermark, num_gpu_blocks),
            max_model_len=max_model_len,
        )

    # Admission -------------------------------------------------------------------------------------

    @core.native_method
    def can_allocate(
        self, seq_group: SequenceGroupLike, num_lookahead_slots: int = 0
    ) -> AllocStatus:
        """Whether the group's prompt fits without any hit and leaves the watermark free."""

    def allocate(self, seq_group: SequenceGroupLike) -> None:
        """Blocks for the group's prompt, shared by its WAITING sequences, and for its encoder."""
        self._native.check_caller()
        seqs = core.sequences_with(seq_group, WAITING)
        # The KV of a decoder depends on the encoder's input: others cannot use it.
        has_encoder = core.has_encoder(seq_group)
        reads_ids = self.enable_caching and not has_encoder
        # From here on nothing is asked of the engine's objects twice: they could answer otherwise.
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
            fits = self._take_with_encoder(request_id, num_encoder_tokens, new)
        elif reads_ids:
            fits = self._take_behind_hit(new)
        else:
            fits = self._take(new, [NO_IDS], 0)
        if not fits:
            what = f"seq_group {request_id!r} does not fit"
            fail_to_fit(what, self._pool.num_free, "can_allocate")
        for seq_id in seq_ids:
            self._tokens.forget(seq_id)

    def _take_behind_hit(self, new: list[tuple[object, Tokens]]) -> bool:
        hits, num_cached = self._hit_of(new[0][1])
        if self._take(new, hits, num_cached):
            return True
        # With a window, more is held behind a hit than without.
        return bool(num_cached) and self._take(new, [NO_IDS], 0)

    def _take_with_encoder(
        self, request_id: object, num_encoder_tokens: int, new: list[tuple[object, Tokens]]
    ) -> bool:
        if self._num_required(len(new[0][1].ids), num_encoder_tokens) > self._pool.num_free:
            return False
        return self._take(new, [NO_IDS], 0, self._cross.new_row(request_id, num_encoder_tokens))

    def _take(
        self,
        new: list[tuple[object, Tokens]],
        hits: list,
        num_cached: int,
        encoder: tuple | None = None,
    ) -> bool:
        """Rows of these sequences, by seq_id, behind a hit; False where they do not fit."""
        num_tokens = len(new[0][1].ids)
        num_skipped = num_skipped_blocks(num_tokens, self.block_size, self.sliding_window)
        skips_blocks = bool(num_skipped and not num_cached)
        return self._take_rows(new, hits, num_cached, skips_blocks, encoder)

    # Growth ----------------------------------------------------------------------------------------

    @core.native_method
    def can_append_slots(self, seq_group: SequenceGroupLike, num_lookahead_slots: int) -> bool:
        """Whether each RUNNING sequence gets slots for its new tokens and the lookahead.

        In the worst case: every block that is touched needs a new one.
        """

    @core.native_method
    def append_slots(self, seq: SequenceLike, num_lookahead_slots: int) -> Pairs:
        """Slots for the tokens that are new since the last call, and `num_lookahead_slots` more.

        Answers the copies (source, destination) of shared blocks that are written. Lookahead slots
        are given again to the next tokens. [] without new tokens and lookahead. ValueError where
        they do not fit.
        """

    @core.native_method
    def append_group_slots(
        self, seq_groups: Sequence[SequenceGroupLike], num_lookahead_slots: int
    ) -> tuple[int, Pairs]:
        """A decode step in one call: `can_append_slots` and `append_slots`, group by group.

        Serves the RUNNING sequences of these groups in order, until a group does not fit: the number
        of groups served, and the copies of all of them. Tables that `get_block_table` answered before
        are up to date then. Everything is checked before anything changes.
        """

    def fork(self, parent_seq: SequenceLike, child_seq: SequenceLike) -> None:
        """Gives the child all blocks of the parent. The first that writes to a shared block copies it.

        The child begins with all tokens of the parent that have slots, and may have more. Its length is
        checked and, with caching, `extra_hash()` and the last `block_size` of those tokens. The caller
        promises that all earlier tokens are the parent's too.
        """
        self._native.check_caller()
        parent = self._known(parent_seq)
        child_id = core.seq_id_of(child_seq)
        if child_id in self._allocated:
            raise ValueError(f"child_seq {child_id!r} has blocks already: expected a new seq_id")
        parent_id = core.seq_id_of(parent_seq)
        core.check_tier(self._native, parent.row, "parent_seq", parent_id, on_host=False)
        tokens = self._tokens.of_child(child_seq, parent.tokens, parent.num_tokens)
        self._fork_row(parent, child_id, tokens)
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
                raise ValueError(f"seq {seq_id!r} has blocks already: expected a new seq_id")
        if len(seqs) > 1:
            check_one_prompt(seq_group, seqs, reads_ids)
