# SPDX-License-Identifier: Apache-2.0
"""The sanitizer's reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class ReportKind(str, Enum):
    """The kinds of findings.

    - `WRONG_CONTENT`: a slot that attention reads contains the KV of other tokens.
    - `READ_BEFORE_WRITTEN`: attention reads a slot that was never written.
    - `FREED_AND_READ`: attention reads a block that no request holds.
    - `WRITE_AFTER_FREE`: a request writes a block that no request holds.
    - `TWO_WRITERS`: two requests write the same block in one step, or a request writes a block that
      only another request holds.
    - `WRITE_TO_SHARED`: a request overwrites KV in a block that several requests share.
    - `NULL_BLOCK_WRITE`: a token's KV is written to the null block.
    - `SLOT_MISMATCH`: the slot mapping differs from the block table.
    - `STALE_ROW`: a batch row belongs to a request that has ended.
    - `READ_BEYOND_LENGTH`: a row reads more tokens than its request has.
    - `WRONG_STATE`: a step reads a recurrent state that does not correspond to the tokens before the
    step.
    - `WRONG_LOAD`: a tier loaded bytes that differ from the bytes that were computed for the same
    content.
    - `SKIPPED_TOKEN`: a step computes tokens after a token that was never computed.
    - `INVALID_INPUT`: the inputs of a step contradict each other, for example a block table with too
    few columns for the sequence length.
    """

    WRONG_CONTENT = "wrong-content"
    READ_BEFORE_WRITTEN = "read-before-written"
    FREED_AND_READ = "freed-and-read"
    WRITE_AFTER_FREE = "write-after-free"
    TWO_WRITERS = "two-writers"
    WRITE_TO_SHARED = "write-to-shared"
    NULL_BLOCK_WRITE = "null-block-write"
    SLOT_MISMATCH = "slot-mismatch"
    STALE_ROW = "stale-row"
    READ_BEYOND_LENGTH = "read-beyond-length"
    WRONG_STATE = "wrong-state"
    WRONG_LOAD = "wrong-load"
    SKIPPED_TOKEN = "skipped-token"
    INVALID_INPUT = "invalid-input"

    def __str__(self) -> str:
        return self.value


_CAUSES = {
    ReportKind.WRONG_CONTENT: "a wrong block ID in the table, a prefix hit of other tokens, or a block "
    "that was freed and reused too early",
    ReportKind.READ_BEFORE_WRITTEN: "a skipped copy, swap or load, or a sequence length that counts "
    "tokens that were not computed",
    ReportKind.FREED_AND_READ: "a block freed while its request runs, or a table row kept after a free",
    ReportKind.WRITE_AFTER_FREE: "a block freed before its last write, or a table row kept after a free",
    ReportKind.TWO_WRITERS: "a missing copy-on-write, or a block allocated twice",
    ReportKind.WRITE_TO_SHARED: "a missing copy-on-write",
    ReportKind.NULL_BLOCK_WRITE: "a table entry that was not filled, or was cleared too early",
    ReportKind.SLOT_MISMATCH: "positions or rows that differ between slot mapping and block table",
    ReportKind.STALE_ROW: "a row that was not removed from the batch when its request ended",
    ReportKind.READ_BEYOND_LENGTH: "rejected drafts or padding counted as tokens",
    ReportKind.WRONG_LOAD: "a transfer to or from a wrong block, a read before the transfer had ended, "
    "or a block that was reused before it was stored",
    ReportKind.SKIPPED_TOKEN: "a position or a number of computed tokens that is too large",
    ReportKind.INVALID_INPUT: "lengths, positions or tables of different steps or requests",
    ReportKind.WRONG_STATE: "a skipped state copy, or the state after a rejected draft",
}


class SanitizerError(Exception):
    """Raised at each finding in mode "stop". `report` describes the finding."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """An event in a block's history.

    - `step`: the step in which the event occurred.
    - `kind`: "allocated", "freed", "written", "copied", "loaded" or "cleared".
    - `request`: the request, or None if the request is not known.
    - `detail`: the first token that was written or loaded, or the source of a copy.
    """

    step: int
    kind: str
    request: str | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """A report of one finding. `str(report)` is a detailed text.

    - `kind`: the kind of finding.
    - `step`: the step in which the error was found.
    - `request`: the request that reads or writes. For an invalid input, the name of the input.
    - `group`, `group_kind`: the cache group.
    - `position`: the token's position in the request.
    - `block`, `offset`: the block, and the slot within it. -1 if there is none.
    - `num_slots`: the number of wrong slots in this block.
    - `expected`, `found`: what the slot should contain, and what it contains.
    - `writer`, `writer_position`, `writer_step`: the request that wrote the slot, the position of
      the token that it wrote, and the step of the block's last write. None if nothing was written.
    - `events`: the block's most recent events, oldest first.
    """

    kind: ReportKind
    step: int
    request: str
    group: int
    group_kind: str
    position: int
    block: int
    offset: int
    num_slots: int
    expected: str
    found: str
    writer: str | None = None
    writer_position: int | None = None
    writer_step: int | None = None
    events: tuple[BlockEvent, ...] = ()

    @property
    def summary(self) -> str:
        """A one-line summary of the finding."""
        if self.kind is ReportKind.INVALID_INPUT:
            return f"{self.kind}: {self.request}, step {self.step}"
        return (
            f"{self.kind}: request {self.request!r}, token {self.position}, group {self.group} "
            f"({self.group_kind}), block {self.block}, offset {self.offset}, step {self.step}"
        )

    def __str__(self) -> str:
        lines = [
            f"==kvcache sanitizer== {self.summary}",
            f"  expected: {self.expected}",
            f"  found:    {self.found}",
        ]
        if self.num_slots > 1:
            lines.append(
                f"  {self.num_slots} slots of this block are wrong; the first one is shown"
            )
        if self.block >= 0:
            lines.append(f"  last events of block {self.block}, the oldest first:")
            for event in self.events:
                by = "" if event.request is None else f" by {event.request!r}"
                lines.append(f"    step {event.step:<6} {event.kind}{by}{event.detail}")
            if not self.events:
                lines.append("    none")
        lines.append(f"  typical causes: {_CAUSES[self.kind]}")
        return "\n".join(lines)
