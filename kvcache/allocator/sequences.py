"""The sequence-group manager: fork, swap, windows. A thin face over the manager of `manager.py`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from operator import index
from typing import NoReturn

import numpy as np

from kvcache._native import core
from kvcache.allocator.groups import make_kind
from kvcache.allocator.hashing import DEFAULT_SEED
from kvcache.allocator.manager import watermark_blocks
from kvcache.allocator.request import checked_count
from kvcache.allocator.sequence_checks import (
    check_one_prompt,
    checked_encoder_length,
    device_name,
    fail_ids,
    fail_shorter,
    fail_status,
    fail_to_fit,
    fail_unknown,
)
from kvcache.allocator.sequence_protocol import (
    SequenceGroupLike,
    SequenceLike,
    extra_hash,
    status_name,
    with_status,
)
from kvcache.allocator.sequence_tokens import Tokens, TokenSource
from kvcache.allocator.stats import stats_of
from kvcache.plan import NO_IDS, NO_PAIRS

_WAITING, _RUNNING, _SWAPPED, _FINISHED = "WAITING", "RUNNING", "SWAPPED", "FINISHED"

Pairs = list[tuple[int, int]]


class AllocStatus(Enum):
    """Answer of `can_allocate` and `can_swap_in`."""

    OK = auto()
    LATER = auto()  # not now
    NEVER = auto()  # more than the device has


class _Allocated:
    """A sequence that has blocks."""

    __slots__ = ("num_cached", "num_marked", "num_tokens", "reads_ids", "row", "tokens")

    def __init__(self, row: int, tokens: Tokens, num_cached: int, num_marked: int) -> None:
        self.row = row
        self.tokens = tokens
        self.reads_ids = tokens.are_read
        self.num_tokens = len(tokens.ids)  # all have slots
        self.num_cached = num_cached
        self.num_marked = num_marked


class BlockSpaceManager:
    """Blocks for sequences that share a prompt, fork, and move to the host and back as a group.

    A device pool of `num_gpu_blocks` and a host pool of `num_cpu_blocks`, the null block 0 of each
    counted; ids of the two never mix. With 0 or 1 host blocks there is no host pool: nothing can be
    swapped. `watermark`: share of the device's blocks, 0 to 1, that admissions and swaps in leave
    free. `sliding_window`: tokens; at most `sliding_window // block_size + 2` blocks are held,
    earlier entries of a table are the null block. A prompt is computed at once, from its own K and V,
    so that what lies before the window of its end is never held; but behind a cached prefix all of it
    is, until the first append. `enable_caching`: full blocks that were marked as computed are hits
    for later sequences; those accessed least recently are evicted first, longest prefix first.
    `hash_seed` gives the parent of first blocks. `max_model_len`: tokens of a sequence.

    Sequences and groups are any objects as `sequence_protocol.py` says. A group's sequences are told
    apart by their status, which the caller sets: `can_allocate` and `allocate` are of the WAITING
    ones, `can_append_slots` and swaps out of the RUNNING ones, swaps in of the SWAPPED ones. Token
    ids are read only with caching, and of known sequences only the tail. An encoder-decoder group
    also has a cross-attention table, known by its `request_id`; it neither takes hits nor leaves any.

    The pairs (source, destination) that calls answer are to be copied in the order of the calls.
    Every error is a ValueError or TypeError and changes nothing. A manager belongs to the thread that
    first uses it.

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
        hash_seed: str = DEFAULT_SEED,
        max_model_len: int = 2**31 - 1,
    ) -> None:
        if sliding_window == 1:
            raise ValueError(
                "sliding_window is 1: expected 2 or more, a token that reads itself needs no cache"
            )
        kind = (
            make_kind("full_attention", {})
            if sliding_window is None
            else make_kind("sliding_window", {"window": sliding_window})
        )
        num_host_blocks = checked_count(num_cpu_blocks, "num_cpu_blocks")
        self._native = core.Manager(
            groups=[(kind, block_size)],
            num_gpu_blocks=num_gpu_blocks,
            max_model_len=max_model_len,
            hash_block_size=None,
            enable_caching=enable_caching,
            num_preallocate_tokens=0,
            max_num_reqs=None,
            watermark_blocks=0,  # `can_allocate` keeps it, not `allocate`
            use_eagle=False,
            fence_frees=False,
            enable_events=False,
            track_residency=False,
            stats_window=1,
            eviction=core.Eviction("last_access" if enable_caching else "lru", {}),
            num_host_blocks=num_host_blocks if num_host_blocks > 1 else 0,
            by_sequences=True,
        )
        self.watermark_blocks = watermark_blocks(watermark, num_gpu_blocks)
        self.block_size = index(block_size)
        self.sliding_window = sliding_window
        self.enable_caching = bool(enable_caching)
        self.max_model_len = index(max_model_len)
        self._most_blocks = (
            None if sliding_window is None else sliding_window // self.block_size + 2
        )
        self._pool = self._native.pool
        self._host = self._native.host
        self._append = self._native.append_sequence
        self._tokens = TokenSource(self.block_size, hash_seed)
        self._allocated: dict[object, _Allocated] = {}  # by seq_id
        self._cross: dict[object, int] = {}  # rows, by request_id

    # Admission -------------------------------------------------------------------------------------

    def can_allocate(
        self, seq_group: SequenceGroupLike, num_lookahead_slots: int = 0
    ) -> AllocStatus:
        """Whether the group's prompt fits, not counting on any hit, and leaves the watermark."""
        lookahead = checked_count(num_lookahead_slots, "num_lookahead_slots")
        required = self._num_required(seq_group, self._waiting(seq_group)[0], lookahead)
        if self._pool.num_total - required < self.watermark_blocks:
            return AllocStatus.NEVER
        return self._now_or_later(required)

    def allocate(self, seq_group: SequenceGroupLike) -> None:
        """Blocks for the group's prompt, shared by its WAITING sequences, and for its encoder."""
        seqs = self._waiting(seq_group)
        first, has_encoder = seqs[0], seq_group.is_encoder_decoder()
        # What a decoder computes depends on the encoder's input: others cannot use it.
        reads_ids = self.enable_caching and not has_encoder
        self._check_new(seq_group, seqs, reads_ids)
        num_encoder_tokens = 0
        if has_encoder:
            num_encoder_tokens = checked_encoder_length(seq_group, self.max_model_len)
            if self._num_required(seq_group, first, 0) > self._pool.num_free:
                self._fail_allocate(seq_group)
        if reads_ids:
            tokens = self._tokens.read(first)
            hits, num_cached = self._native.lookup(tokens.chain)
        else:
            tokens = self._tokens.unread(first.get_len())
            hits, num_cached = [NO_IDS], 0
        num_new = len(tokens.ids) - num_cached
        answer = self._native.allocate(tokens.chain, num_new, hits, 0)
        if answer is None and num_cached:
            # With a window, more is held behind a hit than without.
            num_cached = 0
            answer = self._native.allocate(tokens.chain, len(tokens.ids), [NO_IDS], 0)
        if answer is None:
            self._fail_allocate(seq_group)
        self._admit(first, answer[0], tokens, num_cached, 0)
        for seq in seqs[1:]:
            self._fork(self._allocated[first.seq_id], seq)
        if has_encoder:
            self._allocate_cross(seq_group, num_encoder_tokens)

    def get_cross_block_table(self, seq_group: SequenceGroupLike) -> list[int]:
        """Blocks of the group's encoder."""
        row = self._cross.get(seq_group.request_id)
        if row is None:
            raise ValueError(
                f"group {seq_group.request_id!r} has no cross-attention table: expected one that "
                "was allocated as an encoder-decoder group"
            )
        self._check_on(row, "the encoder of group", seq_group.request_id, on_host=False)
        return self._native.blocks(row, 0).tolist()

    # Growth ----------------------------------------------------------------------------------------

    def can_append_slots(self, seq_group: SequenceGroupLike, num_lookahead_slots: int) -> bool:
        """Whether each RUNNING sequence gets slots for its new tokens and the lookahead.

        In the worst case: every block that is touched needs a new one.
        """
        lookahead = checked_count(num_lookahead_slots, "num_lookahead_slots")
        running = with_status(seq_group, _RUNNING)
        return self._num_touched(running, lookahead) <= self._pool.num_free

    def append_slots(self, seq: SequenceLike, num_lookahead_slots: int) -> Pairs:
        """Slots for the tokens that are new since the last call, and `num_lookahead_slots` more.

        Answers the copies (source, destination) of shared blocks that are written. Lookahead slots
        are given again to the next tokens. [] without new tokens and lookahead. ValueError where
        they do not fit.
        """
        known = self._allocated.get(seq.seq_id)
        if known is None:
            fail_unknown(seq)
        num_tokens = seq.get_len()
        num_new = num_tokens - known.num_tokens
        if num_new <= 0 and (num_new or not num_lookahead_slots):
            if num_new:
                fail_shorter(seq, known.num_tokens)
            return []
        new = num_new
        if known.reads_ids:
            new = seq.get_token_ids()[known.num_tokens :]
            if len(new) != num_new:
                fail_ids(seq, known.num_tokens + len(new))
        try:
            copies = self._append(known.row, new, num_lookahead_slots)
        except (TypeError, ValueError):
            checked_count(num_lookahead_slots, "num_lookahead_slots")
            self._check_on(known.row, "seq", seq.seq_id, on_host=False)
            raise
        if copies is None:
            what = f"seq {seq.seq_id!r} does not get {num_new} slots and {num_lookahead_slots} more"
            fail_to_fit(what, self._pool.num_free, "can_append_slots")
        known.num_tokens = num_tokens
        return [] if copies is NO_PAIRS else _as_pairs(copies)

    def fork(self, parent_seq: SequenceLike, child_seq: SequenceLike) -> None:
        """Gives the child all blocks of the parent; who writes to a shared one first, copies it.

        The child begins with all tokens of the parent that have slots.
        """
        parent = self._allocated.get(parent_seq.seq_id)
        if parent is None:
            fail_unknown(parent_seq)
        if child_seq.seq_id in self._allocated:
            raise ValueError(
                f"child_seq {child_seq.seq_id!r} has blocks already: expected a new seq_id"
            )
        self._check_on(parent.row, "parent_seq", parent_seq.seq_id, on_host=False)
        if child_seq.get_len() < parent.num_tokens:
            raise ValueError(
                f"child_seq {child_seq.seq_id!r} has {child_seq.get_len()} tokens: expected those of "
                f"its parent, {parent.num_tokens}, and any more"
            )
        if parent.reads_ids and extra_hash(child_seq) != parent.tokens.extra:
            raise ValueError(
                f"extra_hash() of child_seq {child_seq.seq_id!r} is {extra_hash(child_seq)!r}: "
                f"expected that of its parent, {parent.tokens.extra!r}"
            )
        self._fork(parent, child_seq)

    # Host and device -------------------------------------------------------------------------------

    def can_swap_out(self, seq_group: SequenceGroupLike) -> bool:
        """Whether the blocks of the group's RUNNING sequences fit on the host."""
        if self._host is None:
            return False
        rows = self._rows(seq_group, with_status(seq_group, _RUNNING), on_host=False)
        return self._native.num_unique_blocks(rows) <= self._host.num_free

    def swap_out(self, seq_group: SequenceGroupLike) -> Pairs:
        """Moves the RUNNING sequences and the encoder to the host: (device block, host block).

        Blocks that several hold move once; lookahead slots are given back.
        """
        self._check_has_host()
        rows = self._rows(seq_group, with_status(seq_group, _RUNNING), on_host=False)
        pairs = self._native.swap_out(rows)
        if pairs is None:
            what = f"seq_group {seq_group.request_id!r} does not fit on the host"
            fail_to_fit(what, self._host.num_free, "can_swap_out")
        return _as_pairs(pairs)

    def can_swap_in(self, seq_group: SequenceGroupLike, num_lookahead_slots: int) -> AllocStatus:
        """Whether the SWAPPED sequences, their new tokens and the lookahead fit on the device."""
        lookahead = checked_count(num_lookahead_slots, "num_lookahead_slots")
        if self._host is None:
            return AllocStatus.NEVER
        seqs = with_status(seq_group, _SWAPPED)
        rows = self._rows(seq_group, seqs, on_host=True)
        required = self._native.num_unique_blocks(rows) + self._num_touched(seqs, lookahead)
        if required > self._pool.num_total:
            return AllocStatus.NEVER
        return self._now_or_later(required)

    def swap_in(self, seq_group: SequenceGroupLike) -> Pairs:
        """Moves the SWAPPED sequences and the encoder back: (host block, device block)."""
        self._check_has_host()
        rows = self._rows(seq_group, with_status(seq_group, _SWAPPED), on_host=True)
        pairs = self._native.swap_in(rows)
        if pairs is None:
            what = f"seq_group {seq_group.request_id!r} does not fit on the device"
            fail_to_fit(what, self._pool.num_free, "can_swap_in")
        return _as_pairs(pairs)

    # Prefix caching --------------------------------------------------------------------------------

    def access_all_blocks_in_seq(self, seq: SequenceLike, now: float) -> None:
        """The sequence's blocks are used at `now`, any clock's: older ones are evicted first."""
        known = self._known(seq)
        self._check_on(known.row, "seq", seq.seq_id, on_host=False)
        self._native.access(known.row, now)

    def mark_blocks_as_computed(self, seq_group: SequenceGroupLike, token_chunk_size: int) -> None:
        """The next `token_chunk_size` tokens of the group's sequences, cached ones among them, have KV.

        Of those on the device that have not finished. Full blocks of such tokens become hits.
        """
        count = checked_count(token_chunk_size, "token_chunk_size")
        if not self.enable_caching:
            return
        for seq in seq_group.get_seqs():
            known = self._allocated.get(seq.seq_id)
            name = status_name(seq)
            if known is None or name == _SWAPPED or name.startswith(_FINISHED):
                continue
            num_marked = min(known.num_marked + count, known.num_tokens)
            self._native.mark_computed(known.row, num_marked)
            known.num_marked = num_marked

    def get_common_computed_block_ids(self, seqs: Sequence[SequenceLike]) -> list[int]:
        """Leading blocks that were hits of all these sequences when they were allocated."""
        common: list[int] | None = None
        for seq in seqs:
            known = self._known(seq)
            hits = self.get_block_table(seq)[: known.num_cached // self.block_size]
            common = hits if common is None else _common_prefix(common, hits)
        return common or []

    def get_num_cached_tokens(self, seq: SequenceLike) -> int:
        """Tokens that were hits when the sequence was allocated; before, those that are now."""
        known = self._allocated.get(seq.seq_id)
        if known is not None:
            return known.num_cached
        if not self.enable_caching:
            return 0
        tokens = self._tokens.read(seq)
        self._tokens.keep(seq, tokens)
        return self._native.lookup(tokens.chain)[1]

    def remove_seq_from_computed_blocks_tracker(self, seq: SequenceLike) -> None:
        """Forgets the hashes of a sequence that was asked for and will not be allocated."""
        self._tokens.forget(seq)

    def get_prefix_cache_hit_rate(self, device: Enum | str) -> float:
        """Hit blocks per full block of all prompts; -1.0 without caching. None hits the host's."""
        on_device = device_name(device) == "gpu"
        if not self.enable_caching:
            return -1.0
        return stats_of(self._native.stats(), 0).groups[0].hit_rate if on_device else 0.0

    def reset_prefix_cache(self, device: Enum | str | None = None) -> bool:
        """Forgets all cached blocks of the device ("gpu"), the host ("cpu"), or both.

        False, with nothing changed, while a block there is in use.
        """
        names = ("gpu", "cpu") if device is None else (device_name(device),)
        self._native.check_caller()
        pools = [self._pool] if "gpu" in names else []
        if "cpu" in names and self._host is not None:
            pools.append(self._host)
        if any(pool.num_free != pool.num_total for pool in pools):
            return False
        for pool in pools:
            pool.reset()
        return True

    # Counts, tables, ends --------------------------------------------------------------------------

    def get_num_free_gpu_blocks(self) -> int:
        """Blocks of the device that nobody holds, cached or not."""
        return self._pool.num_free

    def get_num_free_cpu_blocks(self) -> int:
        """The same of the host."""
        return 0 if self._host is None else self._host.num_free

    def get_block_table(self, seq: SequenceLike) -> list[int]:
        """Blocks of a sequence on the device, lookahead ones too; 0 where a window left one."""
        known = self._known(seq)
        self._check_on(known.row, "seq", seq.seq_id, on_host=False)
        return self._native.blocks(known.row, 0).tolist()

    def free(self, seq: SequenceLike) -> None:
        """Gives a sequence's blocks back, on either tier; one without: no-op."""
        known = self._allocated.get(seq.seq_id)
        if known is not None:
            self._native.free(known.row)
            del self._allocated[seq.seq_id]
        else:
            self._tokens.forget(seq)

    def free_cross(self, seq_group: SequenceGroupLike) -> None:
        """Gives the blocks of a group's encoder back; one without: no-op."""
        row = self._cross.get(seq_group.request_id)
        if row is not None:
            self._native.free(row)
            del self._cross[seq_group.request_id]

    def check_invariants(self) -> None:
        """Raises where the pools, or what is said of them here, are not consistent."""
        self._native.check_invariants()
        rows = [known.row for known in self._allocated.values()] + [*self._cross.values()]
        if len({*rows}) != len(rows) or self._native.num_rows != len(rows):
            raise RuntimeError(f"{self._native.num_rows} rows are in use, but {rows} are known")
        for seq_id, known in self._allocated.items():
            num_tokens = self._native.num_computed_tokens(known.row)
            if not num_tokens == known.num_tokens == len(known.tokens.ids):
                raise RuntimeError(
                    f"seq {seq_id!r} has {num_tokens} tokens with slots, {known.num_tokens} that are "
                    f"said to be, and {len(known.tokens.ids)} known ids"
                )

    # Groups ----------------------------------------------------------------------------------------

    def _waiting(self, seq_group: SequenceGroupLike) -> list[SequenceLike]:
        return with_status(seq_group, _WAITING) or fail_status(seq_group, _WAITING)

    def _rows(
        self, seq_group: SequenceGroupLike, seqs: list[SequenceLike], on_host: bool
    ) -> list[int]:
        """Rows of these sequences, and the encoder's; all of them on this tier."""
        if not seqs:
            fail_status(seq_group, _SWAPPED if on_host else _RUNNING)
        rows = []
        for seq in seqs:
            row = self._known(seq).row
            self._check_on(row, "seq", seq.seq_id, on_host)
            rows.append(row)
        cross = self._cross.get(seq_group.request_id)
        if cross is not None and self._native.is_on_host(cross) == on_host:
            rows.append(cross)
        return rows

    def _known(self, seq: SequenceLike) -> _Allocated:
        known = self._allocated.get(seq.seq_id)
        if known is None:
            fail_unknown(seq)
        return known

    def _now_or_later(self, required: int) -> AllocStatus:
        fits = self._pool.num_free - required >= self.watermark_blocks
        return AllocStatus.OK if fits else AllocStatus.LATER

    def _num_required(
        self, seq_group: SequenceGroupLike, seq: SequenceLike, num_lookahead_slots: int
    ) -> int:
        required = -(-(seq.get_len() + num_lookahead_slots) // self.block_size)
        if self._most_blocks is not None:
            required = min(required, self._most_blocks)
        if seq_group.is_encoder_decoder():
            required += -(-seq_group.get_encoder_seq().get_len() // self.block_size)
        return required

    def _num_touched(self, seqs: list[SequenceLike], num_lookahead_slots: int) -> int:
        """Blocks that the new tokens of these sequences and the lookahead would be written to."""
        num_touched = 0
        for seq in seqs:
            known = self._known(seq)
            num_slots = seq.get_len() - known.num_tokens + num_lookahead_slots
            if num_slots < num_lookahead_slots:
                fail_shorter(seq, known.num_tokens)
            if num_slots > 0:
                first, last = known.num_tokens, known.num_tokens + num_slots - 1
                num_touched += last // self.block_size - first // self.block_size + 1
        return num_touched

    # Rows ------------------------------------------------------------------------------------------

    def _admit(self, seq: SequenceLike, row: int, tokens: Tokens, *counts: int) -> None:
        self._allocated[seq.seq_id] = _Allocated(row, tokens, *counts)
        self._tokens.forget(seq)

    def _fork(self, parent: _Allocated, child_seq: SequenceLike) -> None:
        tokens = self._tokens.copy_of(parent.tokens)
        row = self._native.fork(parent.row, tokens.chain)
        self._admit(child_seq, row, tokens, parent.num_cached, parent.num_marked)

    def _allocate_cross(self, seq_group: SequenceGroupLike, num_tokens: int) -> None:
        """A row of the encoder's tokens, which are known to fit."""
        # What a window leaves behind is not held of a prompt; of what comes later it is, and all of
        # an encoder's tokens are read.
        row, _ = self._native.allocate(self._tokens.unread(1).chain, 1, [NO_IDS], num_tokens - 1)
        if num_tokens > 1:
            self._append(row, num_tokens - 1, 0)
        self._cross[seq_group.request_id] = row

    def _check_new(
        self, seq_group: SequenceGroupLike, seqs: list[SequenceLike], reads_ids: bool
    ) -> None:
        if seq_group.request_id in self._cross:
            raise ValueError(
                f"seq_group {seq_group.request_id!r} has a cross-attention table already: expected "
                "free_cross first"
            )
        for seq in seqs:
            if seq.seq_id in self._allocated:
                raise ValueError(f"seq {seq.seq_id!r} has blocks already: expected a new seq_id")
        if len(seqs) > 1:
            check_one_prompt(seq_group, seqs, reads_ids)

    def _fail_allocate(self, seq_group: SequenceGroupLike) -> NoReturn:
        what = f"seq_group {seq_group.request_id!r} does not fit"
        fail_to_fit(what, self._pool.num_free, "can_allocate")

    def _check_on(self, row: int, what: str, name: object, on_host: bool) -> None:
        if self._native.is_on_host(row) != on_host:
            raise ValueError(
                f"{what} {name!r} is on the device: expected one that is swapped out"
                if on_host
                else f"{what} {name!r} is swapped out: expected one on the device"
            )

    def _check_has_host(self) -> None:
        if self._host is None:
            raise ValueError("there is no host pool: expected num_cpu_blocks of 2 or more")


def _as_pairs(pairs: np.ndarray) -> Pairs:
    return list(zip(*pairs.T.tolist()))


def _common_prefix(a: list[int], b: list[int]) -> list[int]:
    n = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    return a[:n]
