# SPDX-License-Identifier: Apache-2.0
"""Finds stop strings in an answer while it is generated, in constant time per character."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class StopTexts:
    """An Aho-Corasick automaton that searches for several stop strings at once.

    `step(state, character)` returns the next state. The initial state is 0. `num_held[state]` is
    the number of trailing characters that may be the beginning of a stop string.
    `num_stopped[state]` is the length of the stop string that ends in this state, or 0 if none
    does. The cost of a step does not depend on the number of stop strings.

    >>> stops = StopTexts(["END", "NO"])
    >>> state = 0
    >>> for character in "xEN":
    ...     state = stops.step(state, character)
    >>> stops.num_held[state], stops.num_stopped[stops.step(state, "D")], stops.num_stopped[state]
    (2, 3, 0)
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]  # for each state, the state that represents its longest proper suffix
        self.num_held, self.num_stopped = [0], [0]
        for stop in stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return len(self._next) > 1

    def step(self, state: int, character: str) -> int:
        """Return the state after the next character."""
        while state and character not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(character, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, 1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self.num_held.append(depth)
                self.num_stopped.append(0)
            state = self._next[state][character]
        self.num_stopped[state] = len(stop)

    def _link(self) -> None:
        """Compute the fallback of each state, in order of depth.

        If a proper suffix of a state's text is a stop string, a stop string also ends in this
        state.
        """
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for character, after in self._next[state].items():
                states.append(after)
                self._fallback[after] = self.step(self._fallback[state], character)
                stopped = self.num_stopped[self._fallback[after]]
                self.num_stopped[after] = self.num_stopped[after] or stopped
