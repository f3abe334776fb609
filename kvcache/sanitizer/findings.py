# SPDX-License-Identifier: Apache-2.0
"""Turns what the sanitizer compares into reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from kvcache.sanitizer.arguments import first_of_each
from kvcache.sanitizer.groups import CheckedRows, SanitizedGroup, StepTokens
from kvcache.sanitizer.report import BlockEvent, Report, ReportKind, SanitizerError
from kvcache.sanitizer.shadow import NOBODY, EventKind, Shadow
from kvcache.sanitizer.tags import TagChains

MEDIA = ("device", "host")
_MAX_SEEN = 65_536  # findings that are remembered, so that each one is reported once


class Findings:
    """The findings of a `Sanitizer`, which sets these attributes."""

    groups: tuple[SanitizedGroup, ...]
    mode: str
    step: int
    max_reports: int
    reports: list[Report]
    counts: Counter[str]
    _device: Shadow
    _groups: list[CheckedRows]
    _chains: TagChains
    _names: dict[int, str]
    _of_rows: np.ndarray
    _seen: set[tuple]
    _tracks_holders: bool
    _print: Callable[[Report], object]
    _tick: Callable[[], int]

    def _bad_read(
        self, one: CheckedRows, row: int, position: int, block: int, offset: int, num_slots: int
    ) -> None:
        shadow = self._device
        is_state = one.spec.kind == "state"
        kind = ReportKind.WRONG_STATE if is_state else ReportKind.WRONG_CONTENT
        reader = self._name(self._of_rows[row])
        if is_state:
            expected = f"the state after tokens 0 to {position} of {reader}"
        else:
            expected = f"token {position} of {reader}"
        if not 0 <= block < shadow.num_blocks:
            self._found(
                *(kind, one, row, position, -1, -1),
                expected=expected,
                found=f"block {block}, which does not exist, at token {position} of the block table",
                num_slots=num_slots,
            )
            return
        place, owner = block * shadow.stride + offset, int(shadow.owners[block])
        found, kind_of_free = "", kind
        if block == 0:
            found = "the null block"
        elif self._tracks_holders and shadow.num_holders[block] == 0:
            kind_of_free = ReportKind.FREED_AND_READ
            found = "a block that no request holds; "
        if block and shadow.tags[place] == 0:
            found += "never written since the block was given out"
            if kind_of_free is kind:
                kind_of_free = ReportKind.READ_BEFORE_WRITTEN
        elif block:
            found += self._content(place)
            if owner != one.index and owner != NOBODY:
                found += f", of group {owner} ({self.groups[owner].kind})"
        self._found(
            *(kind_of_free, one, row, position, block, offset),
            expected=expected,
            found=found,
            num_slots=num_slots,
        )

    def _content(self, place: int) -> str:
        origin = int(self._device.origins[place])
        block = place // self._device.stride
        return (
            f"token {origin & 0xFFFFFFFF} of {self._name(origin >> 32)}, "
            f"block last written at step {self._device.write_steps[block]}"
        )

    def _slots_differ(
        self,
        one: CheckedRows,
        step: StepTokens,
        slots: np.ndarray,
        wrong: np.ndarray,
        wanted: np.ndarray | None = None,
    ) -> None:
        size = one.spec.block_size
        limit = self._device.num_blocks * size
        for i in first_of_each(wrong, step.rows, slots // size):
            slot = int(slots[i])
            expected = f"a slot below {limit}"
            if wanted is not None:
                expected = f"slot {wanted[i]}, from block {wanted[i] // size} of the block table"
            place = (slot // size, slot % size) if slot < limit else (-1, -1)
            self._found(
                *(ReportKind.SLOT_MISMATCH, one, step.rows[i], step.positions[i], *place),
                expected=expected,
                found=f"slot {slot} in the slot mapping",
            )

    def _check_null(
        self,
        one: CheckedRows,
        rows: np.ndarray,
        positions: np.ndarray,
        blocks: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        if blocks.min(initial=1) > 0:
            return
        for i in first_of_each(blocks == 0, rows, blocks):
            self._found(
                *(ReportKind.NULL_BLOCK_WRITE, one, rows[i], positions[i]),
                *(0, slots[i] % one.spec.block_size),
                expected="a block of the request",
                found="the null block, which other requests' table entries share",
            )

    def _check_holders(
        self,
        one: CheckedRows,
        rows: np.ndarray,
        positions: np.ndarray,
        blocks: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        if not self._tracks_holders:
            return
        shadow, serials = self._device, self._of_rows[rows]
        holders = shadow.holders[blocks]
        if (holders == serials).all():
            return
        counts, offsets = shadow.num_holders[blocks], slots % one.spec.block_size
        free = (counts == 0) & (blocks > 0)
        other = (counts == 1) & (holders != serials) & (holders != NOBODY)
        for kind, wrong in ((ReportKind.WRITE_AFTER_FREE, free), (ReportKind.TWO_WRITERS, other)):
            for i in first_of_each(wrong, rows, blocks):
                holder = f"only {self._name(holders[i])}" if other[i] else "no request"
                self._found(
                    *(kind, one, rows[i], positions[i], blocks[i], offsets[i]),
                    expected=f"a block that {self._name(serials[i])} holds",
                    found=f"a block that {holder} holds",
                )

    def _overwrite(
        self,
        one: CheckedRows,
        step: StepTokens,
        places: np.ndarray,
        overwritten: np.ndarray,
    ) -> None:
        """Report other content in shared blocks that a write replaces."""
        shadow = self._device
        blocks = places // shadow.stride
        if self._tracks_holders and one.spec.kind != "circular":
            # Content that was left in a block before it was given out may be overwritten.
            shared = overwritten & (shadow.num_holders[blocks] > 1) & ~shadow.is_fresh[blocks]
            for i in first_of_each(shared, step.rows, blocks):
                self._found(
                    *(ReportKind.WRITE_TO_SHARED, one, step.rows[i], step.positions[i], blocks[i]),
                    places[i] % shadow.stride,
                    expected="a block that no other request holds, or the same content",
                    found=f"a block with {shadow.num_holders[blocks[i]]} holders; the write replaces "
                    + self._content(int(places[i])),
                )
        if overwritten.any():
            shadow.change(blocks[overwritten], self._tick())

    def _check_lengths(
        self, one: CheckedRows, rows: np.ndarray, stops: np.ndarray, table: np.ndarray
    ) -> np.ndarray:
        """Report rows that read more tokens than they have. Return the lengths to check."""
        lengths = self._chains.lengths[rows]
        beyond = stops > lengths
        if not beyond.any():
            return stops
        for i in np.flatnonzero(beyond).tolist():
            column = min(self._columns(one, int(lengths[i])), table.shape[1] - 1)
            block = int(table[i, column])
            block = block if 0 <= block < self._device.num_blocks else -1
            self._found(
                *(ReportKind.READ_BEYOND_LENGTH, one, rows[i], lengths[i], block),
                lengths[i] % one.spec.block_size,
                expected=f"{lengths[i]} tokens, which the request has",
                found=f"{stops[i]} tokens are read",
            )
        return np.minimum(stops, lengths)

    def _drop_stale(
        self, request_ids: Sequence[str], rows: np.ndarray, *arrays: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Report rows of ended requests, and return all arrays without them."""
        known = rows >= 0
        if known.all():
            return (rows, *arrays)
        for name in [name for name, is_known in zip(request_ids, known) if not is_known]:
            self._found(
                *(ReportKind.STALE_ROW, self._groups[0], -1, 0, -1, -1),
                expected="a request that was observed and has not ended",
                found="a row of the batch that outlives its request",
                name=name,
            )
        return tuple(each[known] for each in (rows, *arrays))

    def _found(
        self,
        kind: ReportKind,
        one: CheckedRows,
        row: int,
        position: int,
        block: int,
        offset: int,
        *,
        expected: str,
        found: str,
        num_slots: int = 1,
        name: str | None = None,
    ) -> None:
        request = self._names.get(int(self._of_rows[row]), "?") if name is None else name
        key = (kind, request, one.index, int(block))
        if key in self._seen:
            return
        if len(self._seen) < _MAX_SEEN:
            self._seen.add(key)
        self.counts[str(kind)] += 1
        if len(self.reports) >= self.max_reports and self.mode != "stop":
            return
        writer = writer_position = writer_step = None
        if block > 0 and offset >= 0:
            place = int(block) * self._device.stride + int(offset)
            if self._device.tags[place]:
                origin = int(self._device.origins[place])
                writer, writer_position = self._names.get(origin >> 32), origin & 0xFFFFFFFF
                writer_step = int(self._device.write_steps[block])
        report = Report(
            *(kind, self.step, request, one.index, one.spec.kind, int(position), int(block)),
            *(int(offset), num_slots, expected, found, writer, writer_position, writer_step),
            self._history(int(block)) if block >= 0 else (),
        )
        if len(self.reports) < self.max_reports:
            self.reports.append(report)
        self._print(report)
        if self.mode == "stop":
            raise SanitizerError(report)

    def _history(self, block: int) -> tuple[BlockEvent, ...]:
        events = []
        for each in self._device.events(block):
            kind, detail = EventKind(int(each["kind"])), ""
            if kind is EventKind.COPIED:
                detail = f" from {MEDIA[each['medium']]} block {each['position']}"
            elif kind in (EventKind.WRITTEN, EventKind.LOADED):
                detail = f", from token {each['position']} on, group {each['group']}"
            elif kind is EventKind.ALLOCATED:
                detail = f", group {each['group']}"
            serial = int(each["request"])
            request = None if serial == NOBODY else self._names.get(serial, "?")
            events.append(BlockEvent(int(each["step"]), kind.name.lower(), request, detail))
        return tuple(events)

    def _name(self, serial: int) -> str:
        return f"request {self._names.get(int(serial), '?')!r}"

    def _columns(self, one: CheckedRows, positions: np.ndarray | int) -> np.ndarray | int:
        columns = positions // one.spec.block_size
        return columns % one.spec.columns if one.spec.kind == "circular" else columns
