"""Prompt lookup: what followed the same tokens earlier in the session; no model.

The longest match is taken: the more of the text agrees, the likelier it goes on alike. Among equally long
ones the latest wins, since text near by is more alike than text far away, and since an index of latest
positions grows by one entry a token and match length, so that a round costs the same at any length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from draft_worker.drafters.base import PREFETCH, Kind, Loading, guessed, positive
from protos.v1 import draft_pb2
from splitspec.errors import ConfigError
from splitspec.tokens import common_prefix
from splitspec.types import Drawing
from splitspec.wire import Draft

if TYPE_CHECKING:
    from draft_worker.drawing import DraftCounterNoise
    from splitspec.engine.scheduler import Steps


class LookupIndex:
    """Where each n-gram of a text was followed by a token, the latest place; an append can be taken back."""

    def __init__(self, lengths: range) -> None:
        """lengths: of the n-grams, the longest first."""
        self.tokens: list[int] = []
        self._lengths = lengths
        self._followers: dict[tuple[int, ...], int] = {}
        #: Of each token, what the n-grams before it led to until it came.
        self._replaced: list[list[int | None]] = []

    def read(self, token_ids: Sequence[int]) -> int:
        """Be the index of this text; how many of its tokens were held. A cut costs what it cuts."""
        held = common_prefix(self.tokens, token_ids)
        while len(self.tokens) > held:
            self.tokens.pop()
            for ngram, place in zip(self._ngrams(), self._replaced.pop(), strict=True):
                if place is None:
                    del self._followers[ngram]
                else:
                    self._followers[ngram] = place
        for place, token in enumerate(token_ids[held:], start=held):
            ngrams = list(self._ngrams())
            self._replaced.append([self._followers.get(ngram) for ngram in ngrams])
            self._followers |= dict.fromkeys(ngrams, place)
            self.tokens.append(token)
        return held

    def matches(self) -> Iterator[int]:
        """Places that followed the text's last n-gram earlier in it, the longest first."""
        for ngram in self._ngrams():
            if (place := self._followers.get(ngram)) is not None:
                yield place

    def _ngrams(self) -> Iterator[tuple[int, ...]]:
        return (tuple(self.tokens[-length:]) for length in self._lengths if length <= len(self.tokens))


@dataclass(eq=False)
class LookupState:
    """One session. tokens: those that were read last; states of other texts share the index."""

    index: LookupIndex
    tokens: Sequence[int] = ()

    def read(self, token_ids: Sequence[int]) -> int:
        self.tokens = token_ids[:]
        return self.index.read(token_ids)


class LookupDrafter:
    """Proposes with n-grams of max_ngram down to min_ngram tokens."""

    def __init__(self, name: str, max_ngram: int, min_ngram: int) -> None:
        self.info = draft_pb2.DrafterInfo(name=name, kind="lookup", modes=PREFETCH)
        self.pools = ()
        self._lengths = range(max_ngram, min_ngram - 1, -1)

    def open(self, tenant: str = "") -> LookupState:
        return LookupState(LookupIndex(self._lengths))

    def feed(self, state: LookupState, token_ids: Sequence[int]) -> Steps[int]:
        """See Drafter."""
        yield from ()
        return state.read(token_ids)

    def propose(
        self,
        state: LookupState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        """See Drafter. Always full length or empty: a match near the end goes on into the proposal itself,
        as a repeating text does."""
        yield from self.feed(state, token_ids)
        start = next(state.index.matches(), None)
        if start is None:
            return Draft.certain(())
        tokens = state.index.tokens
        continued = tokens[start : start + num_draft_tokens]
        period = len(tokens) - start
        while len(continued) < num_draft_tokens:
            continued.append(continued[-period])
        return Draft.certain(continued)

    def guess(
        self,
        state: LookupState,
        token_ids: Sequence[int],
        draft: Draft,
        drawing: Drawing,
        noise: DraftCounterNoise,
        counts: Sequence[int],
    ) -> Steps[list[list[tuple[int, LookupState]]]]:
        """See PrefetchDrafter: what followed the other matches, the longest first."""
        yield from ()

        def followers(path: Sequence[int]) -> Iterator[int]:
            state.index.read([*token_ids, *path])
            return (state.index.tokens[place] for place in state.index.matches())

        return [[(token, replace(state)) for token in after] for after in guessed(draft, counts, followers)]

    def rest(self, state: LookupState) -> None:
        """See Drafter. It holds next to nothing."""

    def free(self, state: LookupState) -> None:
        """See Drafter. Nothing refers to the state any more."""

    def held_tokens(self, state: LookupState) -> int:
        return len(state.tokens)

    def held_bytes(self, state: LookupState) -> int:
        return 0


def _build(
    name: str, checkpoint: str, loading: Loading, *, max_ngram: int = 4, min_ngram: int = 1
) -> LookupDrafter:
    if min_ngram > max_ngram:
        raise ConfigError(
            f"drafters: lookup has min_ngram {min_ngram}, expected at most max_ngram, {max_ngram}",
            field="drafters",
        )
    return LookupDrafter(name, max_ngram, min_ngram)


KIND = Kind(_build, has_checkpoint=False, options={"max_ngram": positive, "min_ngram": positive})
