# SPDX-License-Identifier: Apache-2.0
"""Converts findings from the native checks into reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from kvcache.native.load import core
from kvcache.sanitizer.groups import CheckedGroup, SanitizedGroup
from kvcache.sanitizer.report import BlockEvent, Report, ReportKind, SanitizerError
from kvcache.sanitizer.requests import NOBODY, ObservedRequests

MEDIA = ("device", "host")
_MAX_SEEN = 65_536  # maximum number of findings to remember, so that each is reported only once


class EventKind(IntEnum):
    """The kinds of events in a block's history, as in native code (csrc/sanitizer/shadow.h)."""

    ALLOCATED = 0
    FREED = 1
    WRITTEN = 2
    COPIED = 3
    LOADED = 4
    CLEARED = 5


class _Kind(IntEnum):
    """`FindingKind` of csrc/sanitizer/slot_group.h."""

    SLOT_MISMATCH = 0
    STALE_ROW = 1
    SLOT_BEYOND_POOL = 2
    NULL_BLOCK_WRITE = 3
    WRITE_AFTER_FREE = 4
    HELD_BY_OTHER = 5
    TWO_WRITERS = 6
    WRITE_TO_SHARED = 7
    READ_BEYOND_LENGTH = 8
    WRONG_READ = 9


class _Place(NamedTuple):
    """A request's serial number, its token, and the block and the slot within it (-1: none)."""

    serial: int
    position: int = 0
    block: int = -1
    offset: int = -1


class Findings:
    """The findings that a sanitizer has collected. `log` is called with each report."""

    def __init__(
        self,
        groups: Sequence[SanitizedGroup],
        requests: ObservedRequests,
        mode: str,
        max_reports: int,
        log: Callable[[Report], object],
    ) -> None:
        self.mode, self.step = mode, 0
        self.has_stopped = False  # whether any finding was raised
        self.reports: list[Report] = []
        self.counts: Counter[str] = Counter()
        self._groups, self._requests = groups, requests
        self._max_reports, self._log = max_reports, log

    def reset(self, shadow: core.Shadow) -> None:
        """Forget which findings were already reported. Reports and counts are kept."""
        self._shadow = shadow
        self._seen: set[tuple] = set()

    def report(self, group: CheckedGroup, found: np.ndarray, request_ids: Sequence[str]) -> None:
        """Report the findings of a native check, int64[n, 6]. Raises SanitizerError in mode "stop"."""
        for number, *place, other in () if found is None else found.tolist():
            kind, at = _Kind(number), _Place(*place)
            if kind is _Kind.STALE_ROW:
                self.stale_row(request_ids[at.serial])
            elif kind is _Kind.WRONG_READ:
                self._wrong_read(group, at, other)
            elif kind in (_Kind.SLOT_MISMATCH, _Kind.SLOT_BEYOND_POOL):
                self._wrong_slot(group, kind, at, other)
            else:
                expected, text = self._texts(kind, at, other)
                name = "TWO_WRITERS" if kind is _Kind.HELD_BY_OTHER else kind.name
                self._found(ReportKind[name], group, at, expected, text)

    def stale_row(self, request_id: str) -> None:
        """Report a batch row whose request has ended."""
        expected = "a request that was observed and has not ended"
        found = "a row of the batch that outlives its request"
        at = _Place(self._requests.ended(request_id))
        self._found(ReportKind.STALE_ROW, None, at, expected, found, request=request_id)

    def skipped_token(self, serial: int, position: int, start: int) -> None:
        """Report a request whose new tokens begin after its known tokens."""
        expected = f"token {position} of {self._name(serial)}, the first one that was not computed"
        at, found = _Place(serial, position), f"tokens from {start} on"
        self._found(ReportKind.SKIPPED_TOKEN, None, at, expected, found)

    def invalid_input(self, call: str, text: str) -> None:
        """Report a call whose arguments were rejected, once per method."""
        expected = f"valid arguments of {call}"
        self._found(ReportKind.INVALID_INPUT, None, _Place(NOBODY), expected, text, request=call)

    def wrong_loads(self, group: CheckedGroup, blocks: Sequence[int]) -> None:
        """Report loaded blocks whose bytes differ from those that were computed for the same content."""
        last = group.spec.block_size - 1
        for block in blocks:
            origin = int(self._shadow.slots["origin"][block, last])
            position = origin & 0xFFFFFFFF
            first = max(position - last, 0)
            expected = f"the bytes that tokens {first} to {position} had when they were computed"
            at, found = _Place(origin >> 32, first, block, 0), "different bytes, loaded by a tier"
            self._found(ReportKind.WRONG_LOAD, group, at, expected, found)

    def _texts(self, kind: _Kind, at: _Place, other: int) -> tuple[str, str]:
        """Return descriptions of what was expected and what was found."""
        if kind is _Kind.NULL_BLOCK_WRITE:
            text = "the null block, which other requests' table entries share"
            return "a block of the request", text
        if kind in (_Kind.WRITE_AFTER_FREE, _Kind.HELD_BY_OTHER):
            holder = "no request" if other == NOBODY else f"only {self._name(other)}"
            return f"a block that {self._name(at.serial)} holds", f"a block that {holder} holds"
        if kind is _Kind.TWO_WRITERS:
            text = f"{self._name(other)} writes the block as well"
            return f"writes by {self._name(at.serial)} alone in this step", text
        if kind is _Kind.WRITE_TO_SHARED:
            text = f"a block with {other} holders; the write replaces {self._content(at)}"
            return "a block that no other request holds, or the same content", text
        return f"at most {at.position} tokens, as in the request", f"{other} tokens are read"

    def _wrong_slot(self, group: CheckedGroup, kind: _Kind, at: _Place, wanted: int) -> None:
        size, num_blocks = group.spec.block_size, self._shadow.num_blocks
        expected = f"a slot below {num_blocks * size}"
        if kind is _Kind.SLOT_MISMATCH:
            expected = f"slot {wanted}, from block {wanted // size} of the block table"
        found = f"slot {at.block * size + at.offset} in the slot mapping"
        if group.spec.kind == "state":
            expected, found = f"a page from 0 to {num_blocks - 1}", f"page {at.block}"
        if not 0 <= at.block < num_blocks:
            at = _Place(at.serial, at.position)
        self._found(ReportKind.SLOT_MISMATCH, group, at, expected, found)

    def _wrong_read(self, group: CheckedGroup, at: _Place, num_slots: int) -> None:
        is_state, position = group.spec.kind == "state", at.position
        kind = ReportKind.WRONG_STATE if is_state else ReportKind.WRONG_CONTENT
        expected = f"token {position} of {self._name(at.serial)}"
        if is_state:
            expected = f"the state after tokens 0 to {position} of {self._name(at.serial)}"
        if not 0 <= at.block < self._shadow.num_blocks:
            found = (
                f"block {at.block}, which does not exist, at token {position} of the block table"
            )
            at = _Place(at.serial, position)
        elif at.block == 0:
            found = "the null block"
        else:
            kind, found = self._wrong_content(group, kind, at)
        self._found(kind, group, at, expected, found, num_slots=num_slots)

    def _wrong_content(
        self, group: CheckedGroup, kind: ReportKind, at: _Place
    ) -> tuple[ReportKind, str]:
        """Return the kind of a wrong read from an existing block, and what was found."""
        shadow, held, found = self._shadow, self._shadow.blocks[at.block], ""
        if shadow.tracks_holders and held["num_holders"] == 0:
            kind, found = ReportKind.FREED_AND_READ, "a block that no request holds; "
        if shadow.slots["tag"][at.block, at.offset] == 0:
            if kind is not ReportKind.FREED_AND_READ:
                kind = ReportKind.READ_BEFORE_WRITTEN
            return kind, found + "never written since the block was allocated"
        found += self._content(at)
        owner = int(held["owner"])
        if owner not in (group.index, NOBODY):
            found += f", of group {owner} ({self._groups[owner].kind})"
        return kind, found

    def _content(self, at: _Place) -> str:
        origin = int(self._shadow.slots["origin"][at.block, at.offset])
        return (
            f"token {origin & 0xFFFFFFFF} of {self._name(origin >> 32)}, "
            f"block last written at step {self._shadow.blocks['write_step'][at.block]}"
        )

    def _found(
        self,
        kind: ReportKind,
        group: CheckedGroup | None,
        at: _Place,
        expected: str,
        found: str,
        *,
        num_slots: int = 1,
        request: str | None = None,
    ) -> None:
        index = 0 if group is None else group.index
        serial, position, block, offset = at
        # Names are used again, serial numbers are not.
        key = (kind, request if serial == NOBODY else serial, index, block)
        is_new = key not in self._seen
        if is_new:
            if len(self._seen) < _MAX_SEEN:
                self._seen.add(key)
            self.counts[str(kind)] += 1
        is_kept = is_new and len(self.reports) < self._max_reports
        if not is_kept and self.mode != "stop":
            return
        request = self._requests.name(serial) if request is None else request
        writer = writer_position = writer_step = None
        if block > 0 and offset >= 0 and self._shadow.slots["tag"][block, offset]:
            origin = int(self._shadow.slots["origin"][block, offset])
            writer, writer_position = self._requests.name(origin >> 32, None), origin & 0xFFFFFFFF
            writer_step = int(self._shadow.blocks["write_step"][block])
        report = Report(
            *(kind, self.step, request, index, self._groups[index].kind, position, block, offset),
            *(num_slots, expected, found, writer, writer_position, writer_step),
            self._history(block) if block >= 0 else (),
        )
        if is_kept:
            self.reports.append(report)
        if is_new:
            self._log(report)
        if self.mode == "stop":
            self.has_stopped = True
            raise SanitizerError(report)

    def _history(self, block: int) -> tuple[BlockEvent, ...]:
        events = []
        for step, serial, position, group, number, medium in self._shadow.events(block).tolist():
            kind, detail = EventKind(number), ""
            if kind is EventKind.COPIED:
                detail = f" from {MEDIA[medium]} block {position}"
            elif kind in (EventKind.WRITTEN, EventKind.LOADED):
                detail = f", from token {position} on, group {group}"
            elif kind is EventKind.ALLOCATED:
                detail = f", group {group}"
            request = None if serial == NOBODY else self._requests.name(serial)
            events.append(BlockEvent(step, kind.name.lower(), request, detail))
        return tuple(events)

    def _name(self, serial: int) -> str:
        return f"request {self._requests.name(serial)!r}"
