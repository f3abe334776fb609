# SPDX-License-Identifier: Apache-2.0
"""Loads sequences from sources of KV outside the engine, and tracks which source serves which
sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as SequenceOf

from kvcache.checks import listed, shown
from kvcache.sources import Arrived, KVSource
from kvcache_exchange.hints import HintExecutor
from kvcache_serve.engine.sequence import Sequence

_log = logging.getLogger("kvcache.serve")
_METHODS = ("match", "begin", "poll", "save", "cancel", "close")


class Loading:
    """A scheduler's sources, in order of preference, and the sequences that load KV from them.

    If a source rejects a sequence or fails to load it, that source is not queried again for this
    sequence. If the load's blocks are quarantined, no source is queried again for the sequence, because
    blocks are still reserved under the sequence's request ID.
    """

    def __init__(self, sources: SequenceOf[KVSource]) -> None:
        self.sources: list[KVSource] = listed(sources, "sources", "a sequence of sources")
        for i, source in enumerate(self.sources):
            if not all(callable(getattr(source, name, None)) for name in _METHODS):
                raise TypeError(f"sources[{i}] is {shown(source)}: expected a KVSource")
        self._chosen: dict[Sequence, KVSource] = {}  # source of each waiting or loading sequence
        self._loading: dict[str, Sequence] = {}
        self.is_matching = False  # whether a source had no result yet when it was last queried

    def __len__(self) -> int:
        """Number of sequences that are loading."""
        return len(self._loading)

    def match(self, sequence: Sequence) -> int | None:
        """Return the number of tokens that a source can load after the local hit, or None if the number
        is not known yet.
        """
        self._chosen.pop(sequence, None)
        if not sequence.request.read_cache:  # computes all of its tokens
            return 0
        for source in self.sources:
            if source in sequence.failed_sources:
                continue
            try:
                count = source.match(sequence.request)
            except ValueError as error:
                self._fail(sequence, source, str(error))
                continue
            if count is None:
                self.is_matching = True
                return None
            if count:
                self._chosen[sequence] = source
                return count
        return 0

    def admitted(self, sequence: Sequence) -> None:
        """Record that a sequence was admitted with tokens from its source."""
        self._loading[sequence.request.request_id] = sequence

    def begin(self, sequence: Sequence) -> bool:
        """Start loading an admitted sequence. Returns False if the source rejected it."""
        try:
            self._chosen[sequence].begin(sequence.request)
        except ValueError as error:
            self.give_up(sequence, str(error))
            return False
        return True

    def poll(self, hints: HintExecutor) -> list[tuple[Sequence, Arrived]]:
        """Return the sequences whose loads have finished. Loads of hints are passed to `hints`."""
        found = []
        for source in self.sources:
            for arrived in source.poll():
                if hints.arrived(arrived):
                    continue
                sequence = self._loading.pop(arrived.request.request_id)
                del self._chosen[sequence]
                sequence.num_loaded_tokens += arrived.num_loaded_tokens
                if arrived.error is not None:
                    self._fail(sequence, source, arrived.error)
                if arrived.num_computed_tokens is None:
                    sequence.failed_sources = list(self.sources)
                found.append((sequence, arrived))
        return found

    def give_up(self, sequence: Sequence, error: str | None = None) -> None:
        """Release a sequence for which its source reserved tokens, before or after admission."""
        self._loading.pop(sequence.request.request_id, None)
        source = self._chosen.pop(sequence)
        source.cancel(sequence.request)
        if error is not None:
            self._fail(sequence, source, error)

    def forget(self, sequence: Sequence) -> None:
        """Release a sequence that ends, regardless of its state."""
        self._loading.pop(sequence.request.request_id, None)
        chosen = self._chosen.pop(sequence, None)
        # Cancel the chosen source first, because it may still write to blocks that the other
        # sources would free.
        for source in sorted(self.sources, key=lambda each: each is not chosen):
            source.cancel(sequence.request)

    @staticmethod
    def _fail(sequence: Sequence, source: KVSource, error: str) -> None:
        sequence.failed_sources = [*sequence.failed_sources, source]
        name = sequence.request.request_id
        _log.warning("%s is computed without source %r: %s", name, source.name, error)
