"""Stop strings in text that comes in pieces, at a cost that doesn't grow with their number.

All of them are one automaton (Aho and Corasick, 1975): its state is the longest end of the text that begins a
stop string, and each character leads to the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopStrings:
    """The automaton of one request. Node 0 is the empty text; each other one begins a stop string."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        """stop_strings: none of them empty."""
        self._next: dict[tuple[int, str], int] = {}
        self._depth = [0]
        self._goes_on = [False]
        #: The longest stop string that a node's text ends in; empty for none.
        self._matched = [""]
        for stop_string in stop_strings:
            self._add(stop_string)
        #: The node of the longest end of a node's text, shorter than itself, that there is a node for.
        self._shorter = [0] * len(self._depth)
        self._link()

    @property
    def empty(self) -> bool:
        """There is nothing to look for."""
        return len(self._depth) == 1

    def _add(self, stop_string: str) -> None:
        node = 0
        for character in stop_string:
            self._goes_on[node] = True
            following = self._next.setdefault((node, character), len(self._depth))
            if following == len(self._depth):
                self._depth.append(self._depth[node] + 1)
                self._goes_on.append(False)
                self._matched.append("")
            node = following
        self._matched[node] = stop_string

    def _link(self) -> None:
        """Nodes of lesser depth first."""
        children: list[list[tuple[str, int]]] = [[] for _ in self._depth]
        for (node, character), child in self._next.items():
            children[node].append((character, child))
        waiting = deque([0])
        while waiting:
            node = waiting.popleft()
            for character, child in children[node]:
                self._shorter[child] = self.step(self._shorter[node], character) if node else 0
                self._matched[child] = self._matched[child] or self._matched[self._shorter[child]]
                waiting.append(child)

    def step(self, node: int, character: str) -> int:
        """The node of the text with one more character."""
        while (following := self._next.get((node, character))) is None:
            if not node:
                return 0
            node = self._shorter[node]
        return following

    def matched(self, node: int) -> str:
        """The longest stop string that a node's text ends in; empty for none."""
        return self._matched[node]

    def undecided(self, node: int) -> int:
        """Characters at the end of a node's text that may yet become a stop string."""
        while not self._goes_on[node]:
            node = self._shorter[node]
        return self._depth[node]


class Scanner:
    """Looks for stop strings in one text."""

    def __init__(self, stop_strings: StopStrings) -> None:
        self._stop_strings = stop_strings
        self._node = 0
        self._held = ""

    def push(self, text: str, *, matching: bool) -> tuple[str, str]:
        """The text that is released and the stop string that follows it, if any is looked for.

        Of several that are complete with this piece the one that begins first, then the longest. Not
        matching: one that is complete in this piece doesn't count, but one may begin in it.
        """
        if self._stop_strings.empty:
            return text, ""
        buffer = self._held + text
        found: list[tuple[int, int, str]] = []
        for end, character in enumerate(text, start=len(self._held) + 1):
            self._node = self._stop_strings.step(self._node, character)
            matched = self._stop_strings.matched(self._node)
            if matched and matching:
                found.append((end - len(matched), -len(matched), matched))
        if found:
            start, _, matched = min(found)
            self._held = ""
            return buffer[:start], matched
        decided = len(buffer) - self._stop_strings.undecided(self._node)
        self._held = buffer[decided:]
        return buffer[:decided], ""

    def flush(self) -> str:
        """The text that was held back."""
        held, self._held = self._held, ""
        return held
