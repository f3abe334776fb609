# SPDX-License-Identifier: Apache-2.0
"""The sanitizer, which follows the content of every slot and checks what attention reads."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvcache.checks import (
    MAX_INT32,
    check_name,
    check_range,
    instances,
    integer,
    integers,
    listed,
    path,
    shown,
)
from kvcache.sanitizer.arguments import (
    check_width,
    checked_counts,
    checked_int64,
    checked_table,
    first_of_each,
    run_starts,
    spread,
)
from kvcache.sanitizer.findings import MEDIA, Findings
from kvcache.sanitizer.groups import CheckedRows, SanitizedGroup, StepTokens
from kvcache.sanitizer.record import Recorder
from kvcache.sanitizer.report import Report, ReportKind
from kvcache.sanitizer.shadow import NOBODY, EventKind, Shadow
from kvcache.sanitizer.tags import TagChains, grown, mix, name_hash

_log = logging.getLogger(__name__)
_MAX_NAMES = 65_536  # names of ended requests that reports can still show


class Sanitizer(Findings):
    """Follows the content of every KV slot, and reports reads of wrong content.

    An engine calls the `observe_*` methods in the order of its work: in each step `observe_step`,
    `observe_tokens`, then copies, then for each group the writes of all requests, then their reads.
    KV itself is never read.

    Args:
        groups: One `SanitizedGroup` per cache group. All groups share the blocks.
        num_blocks: Blocks on the device, including the null block 0.
        num_host_blocks: Blocks of the host tier.
        mode: "report" logs findings and keeps them in `reports`. "stop" also raises
            `SanitizerError` at each new finding.
        every: Check the reads of one step in this number of steps. Writes are always followed.
        history: Number of events that are kept per block.
        max_reports: Number of reports that are kept. All findings are counted in `counts`.
        log: Function that is called with each report. Default: the logger `kvcache.sanitizer`.
        record: File to which the calls are recorded, without tokens and names (`replay_record`).

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument is out of range.
        OSError: The record cannot be written.

    Example:
        >>> sanitizer = Sanitizer([SanitizedGroup("full", 4)], num_blocks=8, log=lambda report: None)
        >>> sanitizer.observe_request("r1", [5, 6, 7])
        >>> sanitizer.observe_write(0, ["r1"], [0], [3], [4, 5, 6])
        >>> sanitizer.observe_read(0, ["r1"], [0], [3], [[1]])
        >>> sanitizer.observe_read(0, ["r1"], [0], [3], [[2]])
        >>> print(sanitizer.reports[0].summary)
        read-before-written: request 'r1', token 0, group 0 (full), block 2, offset 0, step 0
    """

    def __init__(
        self,
        groups: Sequence[SanitizedGroup],
        num_blocks: int,
        *,
        num_host_blocks: int = 0,
        mode: str = "report",
        every: int = 1,
        history: int = 10,
        max_reports: int = 1000,
        log: Callable[[Report], object] | None = None,
        record: str | os.PathLike[str] | None = None,
    ) -> None:
        self.groups = tuple(instances(groups, SanitizedGroup, "groups"))
        if not self.groups:
            raise ValueError("groups is empty: expected one group or more")
        num_blocks = integer(num_blocks, "num_blocks", 1)
        num_host_blocks = integer(num_host_blocks, "num_host_blocks")
        if not isinstance(mode, str) or mode not in ("report", "stop"):
            raise ValueError(f"mode is {shown(mode)}: expected 'report' or 'stop'")
        self.mode, self.every = mode, integer(every, "every", 1)
        self.max_reports = integer(max_reports, "max_reports")
        if log is not None and not callable(log):
            raise TypeError(f"log is {shown(log)}: expected a function of a Report")
        self._print = log or (lambda report: _log.error("%s", report))
        history = integer(history, "history", 1, 1024)
        stride = max(group.block_size for group in self.groups)
        sizes = {"device": num_blocks, "host": num_host_blocks}
        if len(self.groups) > 256:
            raise ValueError(f"groups has {len(self.groups)} entries: expected at most 256")
        check_range("num_blocks", "has slots", np.array([*sizes.values()]) * stride, 0, 2**40)
        self._shapes = {name: (size, stride, history) for name, size in sizes.items() if size}
        self.reports: list[Report] = []
        self.counts: Counter[str] = Counter()
        self.slots_read = self.slots_written = 0
        self.step = 0
        self._key = secrets.randbits(63)  # makes tags in a record useless for guessing tokens
        self._serials = itertools.count()
        self._names: dict[int, str] = {}
        self._recorder = None
        self.reset()
        if record is not None:
            self._recorder = Recorder(path(record, "record"), self.groups, sizes, self.every)

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory that the shadow of the slots uses."""
        return sum(shadow.num_bytes for shadow in self._shadows.values())

    @property
    def num_reports(self) -> int:
        """Number of findings, including those that `reports` has no room for."""
        return sum(self.counts.values())

    def reset(self) -> None:
        """Forget all requests and all contents. Reports and counts stay."""
        self._shadows = {name: Shadow(*shape) for name, shape in self._shapes.items()}
        self._device = self._shadows["device"]
        self._groups = [CheckedRows(index, spec) for index, spec in enumerate(self.groups)]
        self._chains = TagChains()
        self._rows: dict[str, int] = {}
        self._of_rows = np.full(64, NOBODY, np.int64)  # serial number of the request of each row
        self._encoders = np.zeros(64, np.int64)
        self._seeds: dict[int, int] = {}
        self._images: dict[int, list[tuple[int, int, int]]] = {}
        self._clock = 0
        self._tracks_holders = False
        self._seen: set[tuple] = set()
        self._forget_step()
        self._record("reset")

    def close(self) -> None:
        """Finish the record, if there is one."""
        if self._recorder is not None:
            self._recorder.close()

    # Requests -----------------------------------------------------------------------------------------

    def observe_step(self, step: int | None = None) -> None:
        """Begin a step.

        Args:
            step: Number of the step. None: one more than the last.
        """
        self.step = self.step + 1 if step is None else integer(step, "step", 0, 2**62)
        self._record("step", numbers=(self.step,))

    def observe_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        *,
        adapter: object = None,
        salt: object = None,
        images: Sequence[tuple[int, int, object]] = (),
        encoder: object = None,
    ) -> None:
        """Begin a request, or replace all tokens of a known one.

        Args:
            request_id: Name of the request.
            token_ids: int[n]. All known tokens.
            adapter: Identity of the LoRA adapter.
            salt: The cache salt.
            images: (position, number of tokens, identity) of each image or other item.
            encoder: Identity of the encoder's input, for "cross" groups.

        Raises:
            TypeError, ValueError: An argument is invalid. Nothing has changed.
        """
        check_name(request_id, "request_id")
        tokens = integers(token_ids, "token_ids", ())
        spans = []
        for item in listed(images, "images", "a list of (position, tokens, identity)"):
            if not isinstance(item, tuple) or len(item) != 3:
                raise TypeError(f"images has {shown(item)}: expected (position, tokens, identity)")
            spans.append(
                (integer(item[0], "position"), integer(item[1], "tokens"), name_hash(item[2]))
            )
        seed = name_hash(adapter, salt) ^ self._key
        self._begin(request_id, seed, 0 if encoder is None else name_hash(encoder), spans)
        row = self._rows[request_id]
        sums = self._sums(
            np.array([row]), np.arange(len(tokens)), tokens, np.array([0, len(tokens)])
        )
        self._put(
            [request_id], np.array([row]), np.zeros(1, np.int64), sums, np.array([len(tokens)])
        )

    def observe_tokens(
        self,
        request_ids: Sequence[str],
        starts: Sequence[int] | np.ndarray,
        query_lens: Sequence[int] | np.ndarray,
        token_ids: Sequence[int] | np.ndarray,
    ) -> None:
        """Set the tokens that requests compute in this step, drafts included.

        Tokens that were known after them are dropped, such as rejected drafts.

        Args:
            request_ids: Names of n requests.
            starts: int[n]. Position of each request's first new token.
            query_lens: int[n]. Number of new tokens of each request.
            token_ids: int[sum(query_lens)]. The new tokens.

        Raises:
            TypeError, ValueError: An argument is invalid, or tokens before `starts` are not known.
        """
        rows, starts, query_lens = self._batch(request_ids, starts=starts, query_lens=query_lens)
        tokens = checked_int64(token_ids, "token_ids")
        of_tokens, positions = spread(starts, query_lens)
        if len(tokens) != len(positions):
            raise ValueError(
                f"token_ids has {len(tokens)} entries: expected {len(positions)}, the sum of query_lens"
            )
        if rows.min(initial=0) < 0:
            kept = rows >= 0
            tokens = tokens[kept[of_tokens]]
            rows, starts, query_lens = self._drop_stale(request_ids, rows, starts, query_lens)
            request_ids = [each for each, keep in zip(request_ids, kept) if keep]
            of_tokens, positions = spread(starts, query_lens)
        known = self._chains.lengths[rows]
        if (starts > known).any():
            i = int(np.argmax(starts > known))
            raise ValueError(
                f"starts[{i}] is {starts[i]}: expected at most {known[i]}, the known tokens of "
                f"{request_ids[i]!r}"
            )
        splits = np.concatenate([[0], np.cumsum(query_lens)]) if self._images else None
        sums = self._sums(rows, positions, tokens, splits)
        self._put(request_ids, rows, starts, sums, query_lens)
        self._last = list(request_ids), rows  # later calls of the step have the same requests
        self._step = self._tokens_of(starts, query_lens, rows, of_tokens, positions)

    def num_tokens(self, request_id: str) -> int:
        """Return the number of known tokens of a request, or -1 for an unknown request."""
        check_name(request_id, "request_id")
        row = self._rows.get(request_id, -1)
        return -1 if row < 0 else int(self._chains.lengths[row])

    def finish(self, request_id: str) -> None:
        """End a request. Its blocks keep their content, which later requests may hit.

        Args:
            request_id: Name of the request. Unknown names are ignored.
        """
        check_name(request_id, "request_id")
        row = self._rows.pop(request_id, None)
        if row is None:
            return
        self._chains.remove(row)
        self._of_rows[row] = NOBODY
        self._images.pop(row, None)
        for group in self._groups:
            group.forget(row)
        self._forget_step()
        self._record("finish", [request_id])

    # Blocks -------------------------------------------------------------------------------------------

    def observe_allocation(
        self, request_id: str, blocks: Sequence[int] | np.ndarray, *, group: int = 0
    ) -> None:
        """Record that a request got blocks, new ones or shared ones of a prefix hit.

        Optional. With allocations and frees, accesses to free blocks and overwritten shared blocks
        are found.

        Args:
            request_id: Name of the request, which need not be known yet.
            blocks: int[n]. Blocks on the device.
            group: The cache group.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        blocks = self._blocks(blocks)
        spec, shadow = self._group(group), self._device
        serial = self._serial_of(request_id)
        self._tracks_holders = True
        shadow.is_fresh[blocks] = shadow.num_holders[blocks] == 0
        shadow.num_holders[blocks] += 1
        shadow.holders[blocks] = serial
        shadow.log(blocks, EventKind.ALLOCATED, self.step, serial, group=spec.index)
        self._record("allocation", [request_id], group, blocks)

    def observe_free(
        self, request_id: str, blocks: Sequence[int] | np.ndarray, *, group: int = 0
    ) -> None:
        """Record that a request released blocks, whose content stays.

        Args:
            request_id: Name of the request.
            blocks: int[n]. Blocks on the device.
            group: The cache group.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        check_name(request_id, "request_id")
        blocks, spec = self._blocks(blocks), self._group(group)
        row, shadow = self._rows.get(request_id), self._device
        serial = NOBODY if row is None else int(self._of_rows[row])
        shadow.num_holders[blocks] = np.maximum(shadow.num_holders[blocks] - 1, 0)
        shadow.holders[blocks[shadow.holders[blocks] == serial]] = NOBODY
        shadow.log(blocks, EventKind.FREED, self.step, serial, group=spec.index)
        free = blocks[shadow.num_holders[blocks] == 0]
        if len(free):
            shadow.change(free, self._tick())
        self._record("free", [request_id], group, blocks)

    def observe_copy(
        self,
        src: Sequence[int] | np.ndarray,
        dst: Sequence[int] | np.ndarray,
        *,
        src_medium: str = "device",
        dst_medium: str = "device",
    ) -> None:
        """Copy the content of whole blocks, as copy-on-write and swaps do.

        Args:
            src: int[n]. Source blocks.
            dst: int[n]. Destination blocks. All sources are read before they are written.
            src_medium: "device" or "host".
            dst_medium: "device" or "host".

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        source, target = (
            self._shadow(src_medium, "src_medium"),
            self._shadow(dst_medium, "dst_medium"),
        )
        src, dst = self._blocks(src, "src", source), self._blocks(dst, "dst", target)
        if len(src) != len(dst):
            raise ValueError(f"dst has {len(dst)} entries: expected {len(src)}, one per source")
        stride = source.stride
        for name in ("tags", "origins"):
            content = getattr(source, name).reshape(-1, stride)[src]
            getattr(target, name).reshape(-1, stride)[dst] = content
        for name in ("owners", "writers", "write_steps"):
            getattr(target, name)[dst] = getattr(source, name)[src]
        target.is_fresh[dst] = False
        target.change(dst, self._tick())
        medium = MEDIA.index(src_medium)
        target.log(dst, EventKind.COPIED, self.step, positions=src, medium=medium)
        self._record("copy", [], 0, src, dst, numbers=(medium, MEDIA.index(dst_medium)))

    def observe_clear(self, blocks: Sequence[int] | np.ndarray, *, medium: str = "device") -> None:
        """Record that blocks were zeroed, or that a failed transfer left them without valid content.

        Args:
            blocks: int[n].
            medium: "device" or "host".

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        shadow = self._shadow(medium, "medium")
        blocks = self._blocks(blocks, "blocks", shadow)
        if len(blocks):
            shadow.clear(blocks, self._tick())
            shadow.log(blocks, EventKind.CLEARED, self.step)
        self._record("clear", [], 0, blocks, numbers=(MEDIA.index(medium),))

    # Writes -------------------------------------------------------------------------------------------

    def observe_write(
        self,
        group: int,
        request_ids: Sequence[str],
        starts: Sequence[int] | np.ndarray,
        query_lens: Sequence[int] | np.ndarray,
        slot_mapping: Sequence[int] | np.ndarray,
        block_table: np.ndarray | None = None,
    ) -> None:
        """Write the KV of each request's tokens `starts` to `starts + query_lens` to slots.

        Call it for all requests of a step before `observe_read`.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            starts: int[n]. Position of each request's first new token.
            query_lens: int[n]. Number of new tokens of each request.
            slot_mapping: int[sum(query_lens)]. Slot of each token, `block * block_size + offset`, or
                -1 for none.
            block_table: int[n, width]. If given, it is compared with the slot mapping.

        Raises:
            TypeError, ValueError: An argument is invalid, or tokens are not known.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=True)
        slots, step, is_stale = checked_int64(slot_mapping, "slot_mapping"), self._step, False
        if not self._is_same_step(request_ids, starts) or query_lens is not step.query_lens:
            rows, starts, counts = self._batch(request_ids, starts=starts, query_lens=query_lens)
            self._check_known(one, rows, starts + counts, request_ids)
            step = self._tokens_of(starts, counts, rows, *spread(starts, counts))
            is_stale = rows.min(initial=0) < 0
        if one.spec.kind == "cross":
            step = replace(step, tags=self._expected(one, step.rows, step.positions))
        if len(slots) != len(step.positions):
            raise ValueError(
                f"slot_mapping has {len(slots)} entries: expected {len(step.positions)}"
            )
        table = None if block_table is None else checked_table(block_table, len(step.starts))
        size, limit = one.spec.block_size, self._device.num_blocks * one.spec.block_size
        columns = None if table is None else self._columns(one, step.positions)
        if table is not None:
            check_width(table, columns.max(initial=-1) + 1)
        self._record("write", request_ids, group, step.starts, step.query_lens, slots, table)
        if table is not None:
            wanted = table[step.of_tokens, columns] * size
            wanted += step.positions if size == 1 else step.positions % size
            wrong = wanted != slots
            if wrong.any():
                wrong &= (slots >= 0) & (step.rows >= 0)
                self._slots_differ(one, step, slots, wrong, wanted)
        if is_stale or slots.min(initial=0) < 0 or slots.max(initial=0) >= limit:
            if is_stale:
                self._drop_stale(request_ids, rows)
            self._slots_differ(one, step, slots, (slots >= limit) & (step.rows >= 0))
            kept = (slots >= 0) & (slots < limit) & (step.rows >= 0)
            names = ("of_tokens", "rows", "positions", "tags", "serials", "origins")
            step = replace(step, **{name: getattr(step, name)[kept] for name in names})
            slots = slots[kept]
        if len(slots):
            self._write(one, step, slots)

    def _write(self, one: CheckedRows, step: StepTokens, slots: np.ndarray) -> None:
        size, shadow = one.spec.block_size, self._device
        blocks = slots // size
        places = slots if size == shadow.stride else blocks * shadow.stride + slots % size
        stamps = step.serials << 8 | one.index
        if not (shadow.stamps[blocks] == stamps).all():
            self._begin_blocks(one, step, blocks, slots)
            shadow.stamps[blocks] = stamps
            shadow.stamps[0] = NOBODY
        old = shadow.tags[places]
        if old.any():
            self._overwrite(one, step, places, (old != step.tags) & (old != 0))
        shadow.tags[places] = step.tags
        shadow.origins[places] = step.origins
        shadow.write_steps[blocks] = self.step
        self.slots_written += len(slots)

    def _begin_blocks(
        self, one: CheckedRows, step: StepTokens, blocks: np.ndarray, slots: np.ndarray
    ) -> None:
        """Check and log writes to blocks of which some were last written by others."""
        rows, positions, serials, shadow = step.rows, step.positions, step.serials, self._device
        self._check_null(one, rows, positions, blocks, slots)
        self._check_holders(one, rows, positions, blocks, slots)
        owners = shadow.owners[blocks]
        other = (owners != one.index) & (owners != NOBODY)
        if other.any():  # the block held content of another group
            shadow.clear(blocks[other], self._tick())
        shadow.owners[blocks] = one.index
        writers = shadow.writers[blocks]
        is_new = writers != serials
        if not is_new.any():
            return
        both = is_new & (shadow.write_steps[blocks] == self.step) & (writers != NOBODY)
        shadow.writers[blocks] = serials
        both |= shadow.writers[blocks] != serials  # two rows of this call
        for i in first_of_each(both, rows, blocks):
            before, after = writers[i], shadow.writers[blocks[i]]
            self._found(
                *(ReportKind.TWO_WRITERS, one, rows[i], positions[i]),
                *(blocks[i], slots[i] % one.spec.block_size),
                expected=f"writes by {self._name(serials[i])} alone in this step",
                found=f"{self._name(after if after != serials[i] else before)} writes the block as well",
            )
        first = run_starts(blocks, np.flatnonzero(is_new))
        self._log_write(EventKind.WRITTEN, one, blocks[first], serials[first], positions[first])

    def observe_load(
        self,
        group: int,
        request_ids: Sequence[str],
        starts: Sequence[int] | np.ndarray,
        stops: Sequence[int] | np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        """Fill blocks with content from outside the engine, such as a store or a prefill engine.

        The content is trusted: it counts as the KV of the request's tokens `starts` to `stops`.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            starts: int[n]. First token that was loaded.
            stops: int[n]. End of the tokens that were loaded.
            block_table: int[n, width]. Null blocks are skipped. For a group of states, int[n, 1], the
                page that received the state after token `stops - 1`.

        Raises:
            TypeError, ValueError: An argument is invalid, or tokens are not known.
        """
        one = self._group(group)
        rows, starts, stops = self._batch(request_ids, starts=starts, stops=stops)
        table = checked_table(block_table, len(rows))
        size, shadow = one.spec.block_size, self._device
        counts = np.maximum(stops - starts, 0)
        self._check_known(one, rows, stops, request_ids)
        if one.spec.kind == "state":
            of_tokens, positions = np.flatnonzero(counts), (stops - 1)[counts > 0]
            columns = offsets = np.zeros_like(positions)
        else:
            of_tokens, positions = spread(starts, counts)
            columns, offsets = self._columns(one, positions), positions % size
        check_width(table, columns.max(initial=-1) + 1)
        self._record("load", request_ids, group, starts, stops, table)
        blocks = table[of_tokens, columns]
        kept = (blocks > 0) & (blocks < shadow.num_blocks) & (rows[of_tokens] >= 0)
        rows, positions = rows[of_tokens][kept], positions[kept]
        blocks, offsets = blocks[kept], offsets[kept]
        if len(blocks) == 0:
            return
        reused = np.unique(blocks[shadow.owners[blocks] != one.index])
        shadow.clear(reused, self._tick())
        shadow.owners[blocks], shadow.is_fresh[blocks] = one.index, False
        self._fill(one, rows, positions, blocks, blocks * shadow.stride + offsets)
        first, serials = run_starts(blocks), self._of_rows[rows]
        self._log_write(EventKind.LOADED, one, blocks[first], serials[first], positions[first])

    def observe_state_write(
        self,
        group: int,
        request_ids: Sequence[str],
        num_tokens: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
    ) -> None:
        """Write the recurrent state after the first `num_tokens` tokens of each request to a page.

        Args:
            group: The cache group.
            request_ids: Names of n requests. A request may occur several times, once per draft.
            num_tokens: int[n]. At least 1.
            pages: int[n].

        Raises:
            TypeError, ValueError: An argument is invalid, or tokens are not known.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=False)
        rows, counts, pages = self._batch(request_ids, num_tokens=num_tokens, pages=pages)
        shadow = self._device
        check_range("pages", "is", pages, 0, shadow.num_blocks)
        check_range("num_tokens", "is", counts, 1, MAX_INT32)
        self._check_known(one, rows, counts, request_ids)
        self._record("state_write", request_ids, group, counts, pages)
        rows, positions, pages = self._drop_stale(request_ids, rows, counts - 1, pages)
        slots = pages * one.spec.block_size
        self._check_null(one, rows, positions, pages, slots)
        self._check_holders(one, rows, positions, pages, slots)
        other = pages[shadow.owners[pages] != one.index]
        if len(other):
            shadow.clear(other, self._tick())
            shadow.owners[other] = one.index
        shadow.is_fresh[pages] = False
        new = shadow.writers[pages] != self._of_rows[rows]
        if new.any():
            serials = self._of_rows[rows[new]]
            self._log_write(EventKind.WRITTEN, one, pages[new], serials, positions[new])
        self._fill(one, rows, positions, pages, pages * shadow.stride)
        self.slots_written += len(pages)

    # Reads --------------------------------------------------------------------------------------------

    def observe_read(
        self,
        group: int,
        request_ids: Sequence[str],
        starts: Sequence[int] | np.ndarray,
        seq_lens: Sequence[int] | np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        """Check the slots that attention reads.

        Only slots that were not checked before, or whose block or table entry has changed since, are
        compared.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            starts: int[n]. Position of each request's first query.
            seq_lens: int[n]. End of the tokens that are read.
            block_table: int[n, width]. Block of each `block_size` tokens.

        Raises:
            TypeError, ValueError: An argument is invalid.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=True)
        step = self._step if self._is_same_step(request_ids, starts) else None
        if step is not None:
            rows, stops = self._last[1], checked_counts("seq_lens", seq_lens, len(starts))
            if one.spec.kind == "cross" or not np.array_equal(stops, step.stops):
                step = None
        else:
            rows, starts, stops = self._batch(request_ids, starts=starts, seq_lens=seq_lens)
        table, longest = checked_table(block_table, len(rows)), int(stops.max(initial=1))
        width = -(-longest // one.spec.block_size)
        if one.spec.kind == "circular":
            width = min(one.spec.columns, width)
        check_width(table, width)
        table = table[:, :width]
        self._record("read", request_ids, group, starts, stops, table)
        if self.step % self.every:
            return
        if step is None and rows.min(initial=0) < 0:
            rows, starts, stops, table = self._drop_stale(request_ids, rows, starts, stops, table)
        if len(rows) == 0:
            return
        if step is None and one.spec.kind != "cross":
            stops = self._check_lengths(one, rows, stops, table)
        firsts = self._unchecked(one, rows, starts, stops, table)
        size, shadow = one.spec.block_size, self._device
        if step is not None and (firsts == starts).all():  # only the tokens of this step
            of_slots, positions, readers = step.of_tokens, step.positions, step.rows
            expected, stamps = step.tags, step.serials << 8 | one.index
        else:
            of_slots, positions = spread(firsts, np.maximum(stops - firsts, 0))
            readers, stamps = rows[of_slots], None
            expected = self._expected(one, readers, positions)
        columns = self._columns(one, positions)
        blocks = table[of_slots, columns]
        offsets = positions % size
        places = blocks * np.int64(shadow.stride) + offsets
        wrong = shadow.tags.take(places, mode="clip") != expected
        # Blocks whose last event is a write by the reader in this group need no further checks.
        if stamps is None or not (shadow.stamps.take(blocks, mode="clip") == stamps).all():
            wrong |= shadow.owners.take(blocks, mode="clip") != one.index  # also the null block
            wrong |= (blocks < 0) | (blocks >= shadow.num_blocks)
            if self._tracks_holders:
                wrong |= shadow.num_holders.take(blocks, mode="clip") == 0
                shadow.is_fresh[np.clip(blocks, 0, shadow.num_blocks - 1)] = False
        self.slots_read += len(positions)
        if wrong.any():
            counts = Counter(zip(readers[wrong].tolist(), blocks[wrong].tolist()))
            for i in first_of_each(wrong, readers, blocks):
                row, block = int(readers[i]), int(blocks[i])
                count = counts[row, block]
                self._bad_read(one, row, int(positions[i]), block, int(offsets[i]), count)

    def observe_state_read(
        self,
        group: int,
        request_ids: Sequence[str],
        num_tokens: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
    ) -> None:
        """Check the recurrent states that a step reads, before it writes the next ones.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            num_tokens: int[n]. Number of tokens before the step. Rows with 0 read no state.
            pages: int[n].

        Raises:
            TypeError, ValueError: An argument is invalid.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=False)
        rows, counts, pages = self._batch(request_ids, num_tokens=num_tokens, pages=pages)
        check_range("num_tokens", "is", counts, 0, MAX_INT32)
        self._record("state_read", request_ids, group, counts, pages)
        if self.step % self.every:
            return
        rows, counts, pages = self._drop_stale(request_ids, rows, counts, pages)
        counts = self._check_lengths(one, rows, counts, pages[:, None])
        rows, counts, pages = rows[counts > 0], counts[counts > 0], pages[counts > 0]
        shadow, positions = self._device, counts - 1
        wrong = shadow.tags.take(pages * shadow.stride, mode="clip") != self._expected(
            one, rows, positions
        )
        wrong |= shadow.owners.take(pages, mode="clip") != one.index
        wrong |= (pages <= 0) | (pages >= shadow.num_blocks)
        if self._tracks_holders:
            wrong |= shadow.num_holders.take(pages, mode="clip") == 0
        self.slots_read += len(pages)
        for i in np.flatnonzero(wrong).tolist():
            self._bad_read(one, int(rows[i]), int(positions[i]), int(pages[i]), 0, 1)

    def _unchecked(
        self,
        one: CheckedRows,
        rows: np.ndarray,
        starts: np.ndarray,
        stops: np.ndarray,
        table: np.ndarray,
    ) -> np.ndarray:
        """Return the first token of each row that must be compared, and count all as checked."""
        firsts = one.spec.first_needed(starts)
        if one.spec.kind == "circular":
            return firsts
        shadow, size, width = self._device, one.spec.block_size, table.shape[1]
        if len(self._of_rows) > len(one.checked) or width > one.tables.shape[1]:
            one.reserve(len(self._of_rows), width)
        differs = one.tables[rows, :width] != table
        checked_at = one.checked_at[rows]
        if shadow.last_change > checked_at.min():
            differs |= shadow.changed_at.take(table, mode="clip") > checked_at[:, None]
        begin = np.minimum(one.checked[rows], starts)
        if one.spec.kind not in ("full", "cross"):
            begin = np.maximum(firsts, begin)
        if one.spec.kind in ("window", "chunk"):
            begin = np.where(firsts < one.first[rows], firsts, begin)
            one.first[rows] = firsts
        if np.count_nonzero(differs):
            some = np.flatnonzero(differs) // width
            some = some[run_starts(some)]
            # Columns before the first needed token do not matter: they left the window.
            own = differs[some] & (np.arange(width) >= (firsts[some] // size)[:, None])
            changed = np.where(own.any(axis=1), own.argmax(axis=1) * size, MAX_INT32)
            begin[some] = np.maximum(firsts[some], np.minimum(begin[some], changed))
            one.tables[rows[some], :width] = table[some]
        one.checked[rows], one.checked_at[rows] = stops, self._clock
        return begin

    # Helpers ------------------------------------------------------------------------------------------

    def _batch(self, request_ids: Sequence[str], **arrays: object) -> list[np.ndarray]:
        """Return the row of each request (-1: unknown) and the arrays as int64[n]."""
        last, rows = self._last
        if type(request_ids) is not list:
            request_ids = listed(request_ids, "request_ids", "a sequence of names")
        if request_ids != last:
            for name in request_ids:
                check_name(name, "a name in request_ids")
            found = (self._rows.get(name, -1) for name in request_ids)
            rows = np.fromiter(found, np.int64, len(request_ids))
        return [rows, *(checked_counts(name, values, len(rows)) for name, values in arrays.items())]

    def _tokens_of(
        self,
        starts: np.ndarray,
        query_lens: np.ndarray,
        rows: np.ndarray,
        of_tokens: np.ndarray,
        positions: np.ndarray,
    ) -> StepTokens:
        rows = rows[of_tokens]
        serials, tags = self._of_rows[rows], self._chains.at(rows, positions)
        origins = serials << 32 | positions
        stops = starts + query_lens
        return StepTokens(
            *(starts, query_lens, stops, of_tokens, rows, positions, tags, serials, origins)
        )

    def _is_same_step(self, request_ids: Sequence[str], starts: object) -> bool:
        """Return whether a call has the requests and starts of the last `observe_tokens`.

        Arrays are compared by identity, because engines pass the same ones to all groups.
        """
        step = self._step
        return step is not None and starts is step.starts and request_ids == self._last[0]

    def _group(self, group: int, has_slots: bool | None = None) -> CheckedRows:
        one = self._groups[integer(group, "group", 0, len(self._groups) - 1)]
        if has_slots is not None and (one.spec.kind != "state") != has_slots:
            wanted = "a group with slots" if has_slots else "a group of states"
            raise ValueError(f"group is {group}, of kind {one.spec.kind!r}: expected {wanted}")
        return one

    def _shadow(self, medium: str, name: str) -> Shadow:
        if not isinstance(medium, str) or medium not in self._shadows:
            known = " or ".join(map(repr, self._shadows))
            raise ValueError(f"{name} is {shown(medium)}: expected {known}")
        return self._shadows[medium]

    def _blocks(
        self, blocks: object, name: str = "blocks", shadow: Shadow | None = None
    ) -> np.ndarray:
        blocks = integers(blocks, name, ())
        check_range(name, "is", blocks, 0, (shadow or self._device).num_blocks)
        return blocks

    def _expected(self, one: CheckedRows, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        if one.spec.kind == "cross":
            return mix(self._encoders[rows], positions) | np.uint64(1)
        return self._chains.at(rows, positions)

    def _check_known(
        self, one: CheckedRows, rows: np.ndarray, stops: np.ndarray, request_ids: Sequence[str]
    ) -> None:
        if one.spec.kind == "cross":
            return
        wrong = stops > self._chains.lengths[rows]
        if wrong.any() and (wrong := wrong & (rows >= 0)).any():
            i = int(wrong.argmax())
            raise ValueError(
                f"{request_ids[i]!r} has {self._chains.lengths[rows[i]]} known tokens: expected "
                f"{stops[i]}, by observe_tokens before its writes"
            )

    def _fill(
        self,
        one: CheckedRows,
        rows: np.ndarray,
        positions: np.ndarray,
        blocks: np.ndarray,
        places: np.ndarray,
    ) -> None:
        shadow = self._device
        shadow.tags[places] = self._expected(one, rows, positions)
        shadow.origins[places] = (self._of_rows[rows] << 32) | positions
        shadow.writers[blocks] = self._of_rows[rows]
        shadow.stamps[blocks] = NOBODY
        shadow.write_steps[blocks] = self.step
        shadow.change(blocks, self._tick())

    def _log_write(
        self,
        kind: EventKind,
        one: CheckedRows,
        blocks: np.ndarray,
        serials: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        self._device.log(blocks, kind, self.step, serials, group=one.index, positions=positions)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _serial_of(self, request_id: str) -> int:
        """Return the serial number of a request, which begins here if it is not known."""
        check_name(request_id, "request_id")
        if request_id not in self._rows:
            self._begin(request_id, name_hash(None, None) ^ self._key, 0, [])
        return int(self._of_rows[self._rows[request_id]])

    def _begin(
        self, request_id: str, seed: int, encoder: int, images: list[tuple[int, int, int]]
    ) -> None:
        row = self._rows.get(request_id)
        if row is None:
            row = self._rows[request_id] = self._chains.add(seed)
            self._of_rows = grown(self._of_rows, (row + 1,), NOBODY)
            self._encoders = grown(self._encoders, (row + 1,))
            serial = next(self._serials)
            self._of_rows[row] = serial
            self._names[serial] = request_id
            if len(self._names) > _MAX_NAMES + len(self._rows):
                self._forget_names()
            self._forget_step()
        elif (
            self._chains.tags[self._chains.offsets[row]] != seed
            or self._images.get(row, []) != images
        ):
            self._chains.lengths[row] = 0
            self._chains.tags[self._chains.offsets[row]] = seed
            for group in self._groups:
                group.forget(row)
        self._encoders[row] = encoder
        self._images.pop(row, None)
        if images:
            self._images[row] = images
        self._record("request", [request_id], numbers=(seed, encoder))

    def _forget_step(self) -> None:
        """Forget the requests and tokens of the last `observe_tokens`."""
        self._last: tuple[list[str], np.ndarray] = [], np.zeros(0, np.int64)
        self._step: StepTokens | None = None

    def _forget_names(self) -> None:
        live = set(self._of_rows.tolist())
        ended = [serial for serial in self._names if serial not in live]
        for serial in ended[: len(ended) // 2]:
            del self._names[serial]

    def _sums(
        self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray, splits: np.ndarray
    ) -> np.ndarray:
        values = tokens + self._key
        if self._images:
            for i, row in enumerate(rows.tolist()):
                for first, count, identity in self._images.get(row, ()):
                    own = slice(splits[i], splits[i + 1])
                    is_inside = (positions[own] >= first) & (positions[own] < first + count)
                    values[own][is_inside] += identity
        return mix(values, positions)

    def _put(
        self,
        request_ids: Sequence[str],
        rows: np.ndarray,
        starts: np.ndarray,
        sums: np.ndarray,
        counts: np.ndarray,
    ) -> None:
        """Set tokens by their `mix`. Checks of replaced tokens are no longer valid."""
        self._record("tokens", request_ids, 0, starts, counts, sums.view(np.int64))
        shorter = starts < self._chains.lengths[rows]
        if shorter.any():
            for row, start in zip(rows[shorter].tolist(), starts[shorter].tolist()):
                for group in self._groups:
                    if row < len(group.checked):
                        group.checked[row] = min(group.checked[row], start)
        self._chains.put(rows, starts, counts, sums)
        self._step = None

    def _put_sums(
        self, request_ids: list[str], starts: np.ndarray, counts: np.ndarray, sums: np.ndarray
    ) -> None:
        """Set tokens of known requests by their `mix`, from a record. Raises ValueError."""
        rows, starts, counts = self._batch(request_ids, starts=starts, counts=counts)
        is_known = rows.min(initial=0) >= 0 and (starts <= self._chains.lengths[rows]).all()
        if not is_known or len(set(request_ids)) < len(rows) or counts.sum() != sums.size:
            raise ValueError("tokens of a request are missing")
        self._put(request_ids, rows, starts, sums.astype("<i8").view(np.uint64), counts)

    def _record(
        self,
        name: str,
        request_ids: Sequence[str] = (),
        group: int = 0,
        *arrays: np.ndarray | None,
        numbers: Sequence[int] = (),
    ) -> None:
        if self._recorder is not None:
            self._recorder.write(name, request_ids, group, arrays, numbers)
