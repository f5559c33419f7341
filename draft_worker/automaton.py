"""A suffix automaton over tokens: what followed the longest match, at any length of the text.

The online construction of Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985;
drafting from it is SAM-Decoding (2411.10666). Added here: an append can be taken back, so that a cut costs
what it cuts, and the occurrence that is copied from is the latest one of the same context, not the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A suffix that occurs in a text. length: in tokens, 0 for none. end: index behind the occurrence."""

    length: int
    end: int


class SuffixAutomaton:
    """All substrings of a text, in time and space proportional to its length.

    A state stands for the substrings that end at the same places; 0 is the root, of the empty string. Of each
    state: _next, the states of its strings with a token behind; _length, of its longest string; _link, the
    state of that string's longest suffix that ends at more places; _end, an index behind an occurrence.

    _end is where the state was last the longest match of the text, else where its strings came first: O(1) an
    append, where the latest occurrence of all would be one for each link, and a better guide besides, since
    where a longer match was there the text went on from another context.
    """

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._length = [0]
        self._link = [-1]
        self._end = [0]
        self._last = 0
        #: Of each append: the last state before, its match's _end before, and the state that it split or -1.
        self._undo: list[tuple[int, int, int]] = []
        self.extend(token_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Append tokens; O(1) each, amortised."""
        for token in token_ids:
            self._append(token)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens, as if the others had never come; costs what these cost."""
        while len(self.tokens) > length:
            self._pop()

    @property
    def match(self) -> Match:
        """The longest suffix of the text that occurs before its end, too."""
        if not self.tokens:
            return Match(0, 0)
        return Match(self._length[self._link[self._last]], self._undo[-1][1])

    def followers(self) -> Iterator[int]:
        """Tokens that followed matches of the text's end, those of the longest first; some come again."""
        state, end = self._link[self._last], self.match.end
        while state > 0:
            yield self.tokens[end]
            state = self._link[state]
            end = self._end[state]

    def find(self, token_ids: Sequence[int]) -> Match:
        """The longest suffix of other tokens that occurs in the text."""
        state = length = 0
        for token in token_ids:
            while state and token not in self._next[state]:
                state = self._link[state]
                length = self._length[state]
            if token in self._next[state]:
                state = self._next[state][token]
                length += 1
        return Match(length, self._end[state])

    def continued(self, end: int, count: int) -> list[int]:
        """`count` tokens that followed a match that ended there; from the text's end on those that it would
        have if it repeated itself, as a repeating text does."""
        followed = self.tokens[end : end + count]
        period = len(self.tokens) - end
        while len(followed) < count:
            followed.append(followed[-period])
        return followed

    def _append(self, token: int) -> None:
        following, link = self._next, self._link
        self.tokens.append(token)
        new = self._add({}, len(self.tokens), 0, len(self.tokens))
        state, split = self._last, -1
        while state >= 0 and token not in following[state]:
            following[state][token] = new
            state = link[state]
        if state >= 0:
            match = following[state][token]
            if self._length[match] > self._length[state] + 1:
                split, match = match, self._split(state, token, match)
            link[new] = match
        self._undo.append((self._last, self._end[link[new]], split))
        self._end[link[new]] = len(self.tokens)
        self._last = new

    def _split(self, state: int, token: int, whole: int) -> int:
        """A state for those strings of `whole` that `state` leads to: they now end at one more place."""
        following, link = self._next, self._link
        part = self._add(dict(following[whole]), self._length[state] + 1, link[whole], self._end[whole])
        link[whole] = part
        while state >= 0 and following[state].get(token) == whole:
            following[state][token] = part
            state = link[state]
        return part

    def _pop(self) -> None:
        """Take the last append back: its steps, each undone."""
        following, link = self._next, self._link
        token, new = self.tokens.pop(), self._last
        state, end, split = self._undo.pop()
        self._last = state
        match = link[new]
        self._end[match] = end
        while state >= 0 and following[state].get(token) == new:
            del following[state][token]
            state = link[state]
        if split >= 0:
            while state >= 0 and following[state].get(token) == match:
                following[state][token] = split
                state = link[state]
            link[split] = link[match]
        for rows in (following, self._length, link, self._end):
            del rows[new:]

    def _add(self, following: dict[int, int], length: int, link: int, end: int) -> int:
        self._next.append(following)
        self._length.append(length)
        self._link.append(link)
        self._end.append(end)
        return len(self._next) - 1
