# SPDX-License-Identifier: Apache-2.0
"""The inputs of a model's forward pass for one step, with tokens, positions, slots and contexts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcache.assembly import KVCache
from kvcache.checks import MAX_INT32, check_range, instance, integer, integers, listed
from kvcache.kinds import KindProperties, make_kind


@dataclass(frozen=True, slots=True)
class Context:
    """The slots that a batch's queries attend to in one cache group, concatenated over requests.

    `slots` is int64[c] on the device. The slots of request i are
    `slots[ends[i] - lengths[i] : ends[i]]`, and the first of them stores token `firsts[i]`. Tokens that
    no query of the step attends to are omitted.
    """

    slots: torch.Tensor
    firsts: np.ndarray
    lengths: np.ndarray
    ends: np.ndarray


class Batch:
    """The rows of a step that are computed together, with their tokens concatenated.

    Create a batch after the worker has applied the plan, because a batch reads the current state of
    the tables. Use one batch at a time, because slots are stored in the tables' buffers. Do not change
    a batch's arrays, because later batches may share them. In the following, n is the number of
    requests and t the total number of tokens. The argument `token_ids` has one sequence of tokens
    per request, or is int[n, k] if each request has k tokens.

    - `rows`: int32[n]. All arrays with one entry per request are on the host.
    - `starts`: int64[n]. Number of tokens computed before this step.
    - `query_lens`: int64[n]. Number of tokens computed in this step.
    - `seq_lens`: int64[n]. Number of tokens after this step.
    - `num_drafts`: int64[n]. Number of draft tokens, which are each request's last tokens.
    - `query_start_loc`: int64[n + 1]. Offset of each request's first token.
    - `token_ids`, `positions`: int64[t] on the device.
    - `logits_indices`: int64[m] on the device. Indices of the tokens whose logits are needed: the last
      `num_logits[i]` tokens of each request i.

    `slots(group)` and `context(group)` return the slots of K and V, `state_pages(group)` returns the
    pages of recurrent states, and `metadata()` returns the inputs of paged attention kernels.

    Raises:
        TypeError: A list contains a value that is not an integer.
        ValueError: The lists differ in length, or a request has no token or more drafts than tokens.

    >>> from kvcache import LayerSpec, Request, build, plan_cache
    >>> plan = plan_cache([LayerSpec("a", "full_attention", 16, 2, 64)], 2**20, max_model_len=64)
    >>> cache = build(plan, max_num_reqs=4)
    >>> step = cache.manager.step(new=[Request("r1", range(20)), Request("r2", range(50, 53))])
    >>> report = cache.worker.apply(step)
    >>> batch = Batch(cache, step.rows, step.num_computed_tokens, [range(20), range(50, 53)])
    >>> batch.query_start_loc, batch.positions[-3:], batch.logits_indices
    (array([ 0, 20, 23]), tensor([0, 1, 2]), tensor([19, 22]))
    >>> batch.slots(0).shape, batch.context(0).lengths
    (torch.Size([23]), array([20,  3]))
    """

    def __init__(
        self,
        cache: KVCache,
        rows: Sequence[int] | np.ndarray,
        starts: Sequence[int] | np.ndarray,
        token_ids: Sequence[Sequence[int] | np.ndarray] | np.ndarray,
        *,
        num_drafts: Sequence[int] | np.ndarray | None = None,
        num_logits: Sequence[int] | np.ndarray | None = None,
    ) -> None:
        instance(cache, KVCache, "cache")
        rows = integers(rows, "rows", ())
        n = len(rows)
        self.cache = cache
        self.starts = _counts("starts", starts, n)
        self.num_drafts = (
            np.zeros(n, np.int64) if num_drafts is None else _counts("num_drafts", num_drafts, n)
        )
        self.num_logits = (
            np.ones(n, np.int64) if num_logits is None else _counts("num_logits", num_logits, n)
        )
        is_array = isinstance(token_ids, np.ndarray) and token_ids.ndim == 2
        if not is_array:
            token_ids = listed(token_ids, "token_ids", "a list of the tokens of each request")
        if len(token_ids) != n or n == 0:
            raise ValueError(
                f"token_ids has {len(token_ids)} entries: expected {n}, and at least one"
            )
        check_range("rows", "is", rows, 0, cache.manager.options.max_num_reqs or MAX_INT32)
        self.rows = rows.astype(np.int32)
        if is_array:
            tokens = integers(token_ids, "token_ids", token_ids.shape[1:]).reshape(-1)
            self.query_lens = np.full(n, token_ids.shape[1])
        else:
            tokens = _joined(token_ids)
            self.query_lens = np.fromiter(map(len, token_ids), np.int64, n)
        wrong = np.maximum(self.num_drafts + 1, self.num_logits) > self.query_lens
        if np.count_nonzero(wrong):
            i = int(wrong.argmax())
            raise ValueError(
                f"token_ids[{i}] has {self.query_lens[i]} tokens, num_drafts[{i}] is "
                f"{self.num_drafts[i]}, num_logits[{i}] {self.num_logits[i]}: expected more tokens than "
                "drafts, and at least as many tokens as logits"
            )
        self.seq_lens = self.starts + self.query_lens
        if len(tokens) == n:  # every request computes one token
            self.query_start_loc = np.arange(n + 1)
            rows_of_tokens, positions = self.rows, self.starts
            wanted = np.flatnonzero(self.num_logits)
        else:
            self.query_start_loc = np.concatenate([[0], np.cumsum(self.query_lens)])
            offsets = np.repeat(self.starts - self.query_start_loc[:-1], self.query_lens)
            positions = np.arange(self.query_start_loc[-1]) + offsets
            rows_of_tokens = np.repeat(self.rows, self.query_lens)
            before = self.query_start_loc[1:] - self.num_logits - _starts_of(self.num_logits)
            wanted = np.repeat(before, self.num_logits)
            wanted += np.arange(len(wanted))
        inputs = self._on_device(positions, tokens, wanted)
        self.positions, self.token_ids, self.logits_indices = inputs
        self._find_slots(rows_of_tokens, positions)
        self._contexts: dict[int, Context] = {}
        self._kinds: dict[int, KindProperties] = {}

    def _on_device(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Copy several arrays to the device as int64, in one transfer."""
        device = self.cache.pages.device
        if device.type == "cpu":  # no transfer that joining the arrays could save
            return tuple(torch.from_numpy(each.astype(np.int64)) for each in arrays)
        joined = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
        return joined.to(device).split_with_sizes([len(each) for each in arrays])

    def _find_slots(self, rows: np.ndarray, positions: np.ndarray) -> None:
        self.cache.tables.compute_slot_mapping(rows, positions)
        self.cache.tables.commit_slot_mapping(len(positions))

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all requests."""
        return int(self.query_start_loc[-1])

    def kind(self, group: int) -> KindProperties:
        """Return the attention kind of a cache group."""
        group = self._checked(group)
        if group not in self._kinds:
            spec = self.cache.plan.groups[group]
            self._kinds[group] = make_kind(spec.kind, spec.options)
        return self._kinds[group]

    def _checked(self, group: int) -> int:
        return integer(group, "group", most=len(self.cache.plan.groups) - 1)

    def slots(self, group: int) -> torch.Tensor:
        """Return the slots to which the K and V of each token are written in this group, int64[t]
        on the device.
        """
        group = self._checked(group)
        return self.cache.tables[group].slot_mapping.gpu[: self.num_tokens]

    def context(self, group: int) -> Context:
        """Return the tokens that the step's queries attend to in this group, including the new
        tokens.
        """
        group = self._checked(group)
        if group not in self._contexts:
            first_needed = self.kind(group).first_needed_token
            firsts = np.array([first_needed(int(start)) for start in self.starts], np.int64)
            lengths = self.seq_lens - firsts
            offsets = np.repeat(firsts - _starts_of(lengths), lengths)
            slots = self.cache.tables[group].slots_of(
                np.repeat(self.rows, lengths), np.arange(len(offsets)) + offsets
            )
            # The tables use the same buffer for the slots of every group, so the next group would
            # overwrite these slots.
            context = Context(slots.clone(), firsts, lengths, np.cumsum(lengths))
            self._contexts[group] = context
        return self._contexts[group]

    def state_pages(self, group: int) -> np.ndarray:
        """Return the pages of recurrent states, int32[n, 1 + max drafts].

        See `GroupTable.state_pages`.
        """
        group = self._checked(group)
        table = self.cache.tables[group]
        return table.state_pages(self.rows, self.seq_lens, self.num_drafts).cpu().numpy()


def following(batch: Batch, starts: np.ndarray, token_ids: np.ndarray) -> Batch:
    """Return the batch of a later step for the same requests. In both batches, every request must
    compute exactly one token.

    Only the arrays that change are computed. The others are shared with `batch`.

    Args:
        batch: The earlier batch.
        starts: int64[n]. Not checked.
        token_ids: int[n]. Not checked.
    """
    later = object.__new__(Batch)
    later.__dict__.update(batch.__dict__)
    later.starts, later.seq_lens = starts, starts + batch.query_lens
    later.positions, later.token_ids = batch._on_device(starts, token_ids)
    later._find_slots(batch.rows, starts)
    later._contexts = {}
    return later


def _counts(name: str, values: Sequence[int] | np.ndarray, num_rows: int) -> np.ndarray:
    counts = integers(values, name, ())
    if len(counts) != num_rows:
        raise ValueError(f"{name} has {len(counts)} entries: expected {num_rows}, one per row")
    check_range(name, "is", counts, 0, MAX_INT32)
    return counts


def _joined(token_ids: list) -> np.ndarray:
    """Concatenate the tokens of all requests, int64[t]. Raises TypeError or ValueError."""
    try:
        joined = np.concatenate(token_ids)
    except (TypeError, ValueError, OverflowError):  # not integers, or nested lists
        joined = None
    if joined is None or joined.ndim != 1 or joined.dtype.kind not in "iu":
        # Find the invalid list. An empty list is valid, although NumPy's default dtype for it is not an
        # integer.
        each = [integers(tokens, f"token_ids[{i}]", ()) for i, tokens in enumerate(token_ids)]
        joined = np.concatenate(each)
    return joined.astype(np.int64)


def _starts_of(lengths: np.ndarray) -> np.ndarray:
    """Return the start offset of each part when parts of these lengths are concatenated."""
    return np.cumsum(lengths) - lengths
