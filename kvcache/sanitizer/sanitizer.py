# SPDX-License-Identifier: Apache-2.0
"""The sanitizer, which tracks the content of every slot and checks what attention reads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np

from kvcache.checks import (
    check_count,
    check_name,
    check_range,
    instances,
    integer,
    integers,
    listed,
    shown,
)
from kvcache.native.load import core
from kvcache.sanitizer.arguments import checked_int64, checked_mode, checked_table
from kvcache.sanitizer.blocks import ContentDigests, ObservedBlocks
from kvcache.sanitizer.findings import Findings
from kvcache.sanitizer.groups import CheckedGroup, SanitizedGroup
from kvcache.sanitizer.report import Report
from kvcache.sanitizer.requests import ObservedRequests, name_hash

_log = logging.getLogger(__name__)


class Sanitizer:
    """Tracks the content of every KV slot, and reports reads of wrong content.

    An engine calls the `observe_*` methods in execution order: in each step, first `observe_step`
    and `observe_tokens`, then copies, then, for each group, the writes of all requests followed by
    their reads. The KV itself is never read.

    Args:
        groups: One `SanitizedGroup` per cache group. All groups share the same blocks.
        num_blocks: Number of blocks on the device, including the null block 0.
        num_host_blocks: Number of blocks in the host tier.
        mode: "report" logs findings and keeps them in `reports`. "stop" also raises
            `SanitizerError` at each finding, including findings that were reported before.
        every: Check reads only in every Nth step or, after an error was raised, in every step.
            Writes are always tracked.
        history: Number of events to keep per block.
        max_reports: Maximum number of reports to keep. `counts` includes all findings.
        log: Function that is called with each report. Default: the logger `kvcache.sanitizer`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range.

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
    ) -> None:
        self.groups = tuple(instances(groups, SanitizedGroup, "groups"))
        if not self.groups:
            raise ValueError("groups is empty: expected one group or more")
        num_blocks = integer(num_blocks, "num_blocks", 1)
        num_host_blocks = integer(num_host_blocks, "num_host_blocks")
        mode = checked_mode(mode, "mode")
        self.every = integer(every, "every", 1)
        max_reports = integer(max_reports, "max_reports")
        if log is not None and not callable(log):
            raise TypeError(f"log is {shown(log)}: expected a function that takes a Report")
        log = log or (lambda report: _log.error("%s", report))
        history = integer(history, "history", 1, 1024)
        stride = max(group.block_size for group in self.groups)
        sizes = {"device": num_blocks, "host": num_host_blocks}
        if len(self.groups) > 256:
            raise ValueError(f"groups has {len(self.groups)} entries: expected at most 256")
        check_range("num_blocks", "has slots", np.array([*sizes.values()]) * stride, 0, 2**40)
        shapes = {name: (size, stride, history) for name, size in sizes.items() if size}
        self.slots_read = self.slots_compared = self.slots_written = 0
        self._digests = ContentDigests()
        self._requests = ObservedRequests()
        self._blocks = ObservedBlocks(shapes)
        self._findings = Findings(self.groups, self._requests, mode, max_reports, log)
        self.reports, self.counts = self._findings.reports, self._findings.counts
        self.reset()

    @property
    def mode(self) -> str:
        """The reaction to a new finding, "report" or "stop"."""
        return self._findings.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self._findings.mode = checked_mode(mode, "mode")

    @property
    def step(self) -> int:
        """Number of the current step."""
        return self._findings.step

    @property
    def num_blocks(self) -> int:
        """Number of blocks on the device, including the null block 0."""
        return self._blocks.device.num_blocks

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the shadow state in host memory."""
        return sum(shadow.num_bytes for shadow in self._blocks.shadows.values())

    def reset(self) -> None:
        """Forget all requests and the contents of all blocks. Digests, reports and counts are kept."""
        self._blocks.reset()
        self._requests.reset()
        device, tags = self._blocks.device, self._requests.tags
        self._groups = [
            CheckedGroup(index, spec, device, tags) for index, spec in enumerate(self.groups)
        ]
        self._requests.reads = [group.reads for group in self._groups]
        self._writes = core.SlotWrites(device, tags)
        self._findings.reset(device)

    # Requests -----------------------------------------------------------------------------------------

    def observe_step(self, step: int | None = None) -> None:
        """Begin a step.

        Args:
            step: Number of the step. None: the last step's number plus one.
        """
        self._findings.step = self.step + 1 if step is None else integer(step, "step", 0, 2**62)

    def observe_request(
        self,
        request_id: str,
        token_ids: Sequence[int] | np.ndarray,
        *,
        adapter: object = None,
        salt: object = None,
        images: Sequence[tuple[int, int, object]] = (),
    ) -> None:
        """Begin a request, or replace all tokens of a known request.

        Args:
            request_id: Name of the request.
            token_ids: int[n]. All tokens of the request that are known so far.
            adapter: Identity of the LoRA adapter.
            salt: The cache salt.
            images: A tuple (position, number of tokens, identity) for each image or other
                multimodal item.

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
        requests = self._requests
        requests.begin(request_id, requests.seed(adapter, salt), spans)
        rows, starts = np.array([requests.row(request_id)]), np.zeros(1, np.int64)
        counts = np.array([len(tokens)])
        hashes = requests.hashes(rows, starts, counts, tokens)
        requests.put([request_id], rows, starts, counts, hashes)

    def observe_tokens(
        self,
        request_ids: Sequence[str],
        starts: Sequence[int] | np.ndarray,
        query_lens: Sequence[int] | np.ndarray,
        token_ids: Sequence[int] | np.ndarray,
    ) -> None:
        """Set the tokens that requests compute in this step, including drafts.

        Tokens that were known at later positions, such as rejected drafts, are dropped.

        Args:
            request_ids: Names of n requests.
            starts: int[n]. Position of each request's first new token.
            query_lens: int[n]. Number of each request's new tokens.
            token_ids: int[sum(query_lens)]. The new tokens.

        Raises:
            TypeError, ValueError: An argument is invalid.
            SanitizerError: The mode is "stop", and the tokens before `starts` are not known or a
                request has ended.
        """
        requests = self._requests
        request_ids, rows = requests.rows_of(request_ids)
        starts = checked_int64(starts, "starts")
        query_lens = checked_int64(query_lens, "query_lens")
        tokens = checked_int64(token_ids, "token_ids")
        check_count(starts, len(rows), "starts", "request_id")
        if not requests.remembers(rows) and len(set(request_ids)) < len(request_ids):
            name = max(request_ids, key=request_ids.count)
            raise ValueError(f"request_ids has {name!r} twice: expected each request once")
        hashes = requests.hashes(rows, starts, query_lens, tokens)
        if not requests.remembers(rows) and not (known := rows >= 0).all():
            for name in [each for each, is_known in zip(request_ids, known) if not is_known]:
                self._findings.stale_row(name)
            request_ids = [each for each, is_known in zip(request_ids, known) if is_known]
            hashes = hashes[np.repeat(known, query_lens)]
            rows, starts, query_lens = rows[known], starts[known], query_lens[known]
        gaps = requests.put(request_ids, rows, starts, query_lens, hashes)
        requests.remember(request_ids, rows)
        for i, position in gaps:
            serial = requests.serial(request_ids[i])
            self._findings.skipped_token(serial, position, int(starts[i]))

    def reject(self, call: str, reason: str) -> None:
        """Report inputs of the engine that no other method accepts.

        Args:
            call: Name of the method or of the engine's call. It is reported once.
            reason: What was expected, in one sentence.

        Raises:
            SanitizerError: The mode is "stop".
        """
        check_name(call, "call"), check_name(reason, "reason")
        self._findings.invalid_input(call, reason)

    def num_tokens(self, request_id: str) -> int:
        """Return the number of a request's known tokens, or -1 for an unknown request."""
        check_name(request_id, "request_id")
        row = self._requests.row(request_id)
        return -1 if row < 0 else self._requests.tags.num_tokens(row)

    def finish(self, request_id: str) -> None:
        """End a request. Its blocks keep their content, which later requests may hit.

        Args:
            request_id: Name of the request. Unknown names are ignored.
        """
        check_name(request_id, "request_id")
        self._requests.finish(request_id)

    # Blocks -------------------------------------------------------------------------------------------

    def observe_allocation(
        self, request_id: str, blocks: Sequence[int] | np.ndarray, *, group: int = 0
    ) -> None:
        """Record that a request received blocks: either new blocks, or shared blocks from a prefix
        hit.

        Calling this method is optional. If allocations and frees are recorded, the sanitizer also
        detects accesses to free blocks and writes to shared blocks.

        Args:
            request_id: Name of the request. The request need not be known yet.
            blocks: int[n]. Blocks on the device.
            group: The cache group.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        check_name(request_id, "request_id")
        blocks, index = self._blocks.checked(blocks), self._group(group).index
        requests = self._requests
        if requests.row(request_id) < 0:
            requests.begin(request_id, requests.seed(None, None))
        serial = requests.serial(request_id)
        self._blocks.allocate(serial, blocks, index, self.step)

    def observe_free(
        self, request_id: str, blocks: Sequence[int] | np.ndarray, *, group: int = 0
    ) -> None:
        """Record that a request released blocks. The blocks keep their content.

        Args:
            request_id: Name of the request.
            blocks: int[n]. Blocks on the device.
            group: The cache group.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        check_name(request_id, "request_id")
        blocks, index = self._blocks.checked(blocks), self._group(group).index
        serial = self._requests.serial(request_id)
        self._blocks.free(serial, blocks, index, self.step)

    def observe_copy(
        self,
        src: Sequence[int] | np.ndarray,
        dst: Sequence[int] | np.ndarray,
        *,
        src_medium: str = "device",
        dst_medium: str = "device",
    ) -> None:
        """Record that whole blocks were copied, for example, by copy-on-write or a swap.

        Args:
            src: int[n]. Source blocks.
            dst: int[n]. Destination blocks. All sources are read before any destination is written.
            src_medium: "device" or "host".
            dst_medium: "device" or "host".

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        self._blocks.copy(src, dst, src_medium, dst_medium, self.step)

    def observe_clear(self, blocks: Sequence[int] | np.ndarray, *, medium: str = "device") -> None:
        """Record that blocks were zeroed, or that a failed transfer left them without valid content.

        Args:
            blocks: int[n].
            medium: "device" or "host".

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        self._blocks.clear(blocks, medium, self.step)

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
        """Record that a step writes the KV of each request's tokens [starts, starts + query_lens)
        to slots.

        Call this method for all requests in a step before `observe_read`.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            starts: int[n]. Position of each request's first new token.
            query_lens: int[n]. Number of each request's new tokens.
            slot_mapping: int[sum(query_lens)]. Slot of each token, `block * block_size + offset`, or
                -1 for none.
            block_table: int[n, width]. If given, it is compared with the slot mapping.

        Raises:
            TypeError, ValueError: An argument is invalid, or tokens are not known.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=True)
        slots = checked_int64(slot_mapping, "slot_mapping")
        request_ids, rows = self._requests.rows_of(request_ids)
        starts = checked_int64(starts, "starts")
        query_lens = checked_int64(query_lens, "query_lens")
        table = None if block_table is None else checked_table(block_table, len(rows))
        found = self._writes.begin(
            one.slots, request_ids, rows, starts, query_lens, slots, table, self.step
        )
        self._finish_write(one, found, request_ids)

    def observe_load(
        self,
        group: int,
        request_ids: Sequence[str],
        starts: Sequence[int] | np.ndarray,
        stops: Sequence[int] | np.ndarray,
        block_table: np.ndarray,
    ) -> None:
        """Record that blocks were filled from outside the engine, for example, from a store or a
        prefill engine.

        The sanitizer assumes that the content is the KV of each request's tokens [starts, stops).
        To compare the bytes of the content, use `check_digests`.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            starts: int[n]. First token that was loaded.
            stops: int[n]. End of the tokens that were loaded.
            block_table: int[n, width]. Null blocks are skipped. For a group of states, int[n, 1]:
                the page that received the state after token `stops - 1`.

        Raises:
            TypeError, ValueError: An argument is invalid, or tokens are not known.
        """
        one = self._group(group)
        request_ids, rows = self._requests.rows_of(request_ids)
        starts, stops = checked_int64(starts, "starts"), checked_int64(stops, "stops")
        table = checked_table(block_table, len(rows))
        self._writes.load(one.slots, request_ids, rows, starts, stops, table, self.step)

    def observe_digests(
        self, group: int, blocks: Sequence[int] | np.ndarray, digests: Sequence[int] | np.ndarray
    ) -> None:
        """Record digests of the bytes in full blocks, for later comparison by `check_digests`.

        Args:
            group: The cache group.
            blocks: int[n]. Blocks whose last slots have been written.
            digests: int64[n]. A digest of each block's bytes in all of the group's layers.

        Raises:
            TypeError, ValueError: An argument is invalid.
        """
        one, blocks, digests = self._digested(group, blocks, digests)
        for block, digest in zip(blocks.tolist(), digests.tolist()):
            if tag := int(self._blocks.device.slots["tag"][block, one.spec.block_size - 1]):
                self._digests.add(one.index, tag, digest)

    def check_digests(
        self, group: int, blocks: Sequence[int] | np.ndarray, digests: Sequence[int] | np.ndarray
    ) -> int:
        """Compare the digests of loaded blocks with the recorded digests of the same content.

        Use this method only for tiers that return exactly the bytes that were stored in them.
        Another engine may compute the same KV with different rounding.

        Args:
            group: The cache group.
            blocks: int[n]. Full blocks, after `observe_load`.
            digests: int64[n]. Digests as in `observe_digests`.

        Returns:
            The number of blocks whose content has known digests. All other blocks remain unchecked.

        Raises:
            TypeError, ValueError: An argument is invalid.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one, blocks, digests = self._digested(group, blocks, digests)
        num_known, wrong = 0, []
        for block, digest in zip(blocks.tolist(), digests.tolist()):
            tag = int(self._blocks.device.slots["tag"][block, one.spec.block_size - 1])
            known = self._digests.of(one.index, tag) if tag else []
            num_known += bool(known)
            if known and digest not in known:
                wrong.append(block)
        self._findings.wrong_loads(one, wrong)
        return num_known

    def _digested(
        self, group: int, blocks: object, digests: object
    ) -> tuple[CheckedGroup, np.ndarray, np.ndarray]:
        one = self._group(group, has_slots=True)
        blocks, digests = self._blocks.checked(blocks), checked_int64(digests, "digests")
        check_count(digests, len(blocks), "digests", "block")
        return one, blocks, digests

    def observe_state_write(
        self,
        group: int,
        request_ids: Sequence[str],
        num_tokens: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
    ) -> None:
        """Record that each request's recurrent state after its first `num_tokens` tokens is written
        to a page.

        Args:
            group: The cache group.
            request_ids: Names of n requests. A request may occur several times, once per draft
                token.
            num_tokens: int[n]. At least 1.
            pages: int[n].

        Raises:
            TypeError, ValueError: An argument is invalid, or tokens are not known.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=False)
        request_ids, rows = self._requests.rows_of(request_ids)
        counts, pages = checked_int64(num_tokens, "num_tokens"), checked_int64(pages, "pages")
        found = self._writes.begin_states(one.slots, request_ids, rows, counts, pages, self.step)
        self._finish_write(one, found, request_ids)

    def _finish_write(
        self, one: CheckedGroup, found: np.ndarray | None, request_ids: list[str]
    ) -> None:
        writes = self._writes
        while found is not None:
            self._findings.report(one, found, request_ids)
            found = writes.advance()
        self.slots_written += writes.num_written

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

        A slot is compared only if it was not checked before, or if its block or table entry has
        changed since then.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            starts: int[n]. Position of each request's first query.
            seq_lens: int[n]. Number of tokens that each request attends to, counted from its
                beginning.
            block_table: int[n, width]. One block for each `block_size` tokens.

        Raises:
            TypeError, ValueError: An argument is invalid.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=True)
        request_ids, rows = self._requests.rows_of(request_ids)
        starts, stops = checked_int64(starts, "starts"), checked_int64(seq_lens, "seq_lens")
        table, skips = checked_table(block_table, len(rows)), self._skips()
        found = one.reads.check(rows, starts, stops, table, skips)
        self._finish_read(one, found, request_ids)

    def observe_state_read(
        self,
        group: int,
        request_ids: Sequence[str],
        num_tokens: Sequence[int] | np.ndarray,
        pages: Sequence[int] | np.ndarray,
    ) -> None:
        """Check the recurrent states that a step reads, before the step writes the next states.

        Args:
            group: The cache group.
            request_ids: Names of n requests.
            num_tokens: int[n]. Number of tokens before the step. Requests with 0 tokens do not read a
                state.
            pages: int[n].

        Raises:
            TypeError, ValueError: An argument is invalid.
            SanitizerError: The mode is "stop" and there is a finding.
        """
        one = self._group(group, has_slots=False)
        request_ids, rows = self._requests.rows_of(request_ids)
        counts, pages = checked_int64(num_tokens, "num_tokens"), checked_int64(pages, "pages")
        skips = self._skips()
        found = one.reads.check_states(rows, counts, pages, skips)
        self._finish_read(one, found, request_ids)

    def _finish_read(
        self, one: CheckedGroup, found: np.ndarray | None, request_ids: list[str]
    ) -> None:
        self.slots_read += one.reads.num_read
        self.slots_compared += one.reads.num_compared
        if found is not None:
            self._findings.report(one, found, request_ids)

    # Helpers ------------------------------------------------------------------------------------------

    def _skips(self) -> bool:
        return self.step % self.every > 0 and not self._findings.has_stopped

    def _group(self, group: int, has_slots: bool | None = None) -> CheckedGroup:
        one = self._groups[integer(group, "group", 0, len(self._groups) - 1)]
        if has_slots is not None and (one.spec.kind != "state") != has_slots:
            wanted = "a group with slots" if has_slots else "a group of states"
            raise ValueError(f"group is {group}, of kind {one.spec.kind!r}: expected {wanted}")
        return one
