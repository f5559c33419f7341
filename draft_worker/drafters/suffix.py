"""What followed the longest match of the session's end, earlier in it or in past answers; no model.

SAM-Decoding (2411.10666), with a proposal that is the longer, the longer the match: of a match of one token
the next one is right in a fifth of cases, of one of eight in four fifths, and each token that is proposed
costs the round something. A match's length is a matter of committed tokens alone: nothing drawn has a say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from draft_worker.automaton import SuffixAutomaton
from draft_worker.drafters.base import PREFETCH, Kind, Loading, guessed, positive
from draft_worker.past_answers import Book, PastAnswers
from protos.v1 import draft_pb2
from splitspec.tokens import common_prefix
from splitspec.types import Drawing
from splitspec.wire import Draft

if TYPE_CHECKING:
    from draft_worker.drawing import DraftCounterNoise
    from splitspec.engine.blocks import BlockPool
    from splitspec.engine.scheduler import Steps


@dataclass(eq=False)
class SuffixState:
    """One session. tokens: those that were read last; what is proposed on other texts shares the automaton.

    drawing: of the request that its last proposal was for; None once that has ended.
    """

    tenant: str
    automaton: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    tokens: Sequence[int] = ()
    drawing: Drawing | None = None

    def fork(self) -> SuffixState:
        """Another state of the same text, which may read on in another way."""
        return replace(self)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What to propose: token_ids followed a match of `match_length` tokens. Both empty without a match."""

    match_length: int
    token_ids: Sequence[int]


class SuffixDrafter:
    """Proposes up to `reach` tokens for each token of the match. past_answers: None keeps none."""

    pools: Sequence[BlockPool] = ()

    def __init__(self, name: str, reach: int, past_answers: PastAnswers | None = None) -> None:
        self.info = draft_pb2.DrafterInfo(name=name, kind="suffix", modes=PREFETCH)
        self._reach = reach
        self._past = past_answers

    def open(self, tenant: str = "") -> SuffixState:
        return SuffixState(tenant)

    def feed(self, state: SuffixState, token_ids: Sequence[int]) -> Steps[int]:
        """See Drafter."""
        yield from ()
        return self.read(state, token_ids)

    def propose(
        self,
        state: SuffixState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        """See Drafter. Empty when the session's last token is new."""
        yield from ()
        self.read(state, token_ids)
        return Draft.certain(self.continuation(state, num_draft_tokens, drawing).token_ids)

    def guess(
        self,
        state: SuffixState,
        token_ids: Sequence[int],
        draft: Draft,
        drawing: Drawing,
        noise: DraftCounterNoise,
        counts: Sequence[int],
    ) -> Steps[list[list[tuple[int, SuffixState]]]]:
        """See PrefetchDrafter: what followed ever shorter matches in the session."""
        yield from ()

        def followers(path: Sequence[int]) -> Iterator[int]:
            self.read(state, [*token_ids, *path])
            return state.automaton.followers()

        guesses = [[(token, state.fork()) for token in after] for after in guessed(draft, counts, followers)]
        self.read(state, token_ids)
        return guesses

    def read(self, state: SuffixState, token_ids: Sequence[int]) -> int:
        """As `feed`, which needs no passes."""
        held = common_prefix(state.automaton.tokens, token_ids)
        state.automaton.truncate(held)
        state.automaton.extend(token_ids[held:])
        state.tokens = token_ids[:]
        return held

    def continuation(self, state: SuffixState, num_draft_tokens: int, drawing: Drawing) -> Continuation:
        """On the tokens that were read last. Of equally long matches the session's own counts."""
        state.drawing = drawing
        source: SuffixAutomaton | Book = state.automaton
        match, tokens = state.automaton.match, state.automaton.tokens
        for book in self._past.books(state.tenant, drawing) if self._past else ():
            found = book.find(tokens)
            if found.length > match.length:
                match, source = found, book
        count = min(num_draft_tokens, self._reach * match.length)
        return Continuation(match.length, source.continued(match.end, count))

    def rest(self, state: SuffixState) -> None:
        """See Drafter. The request's answer becomes a past one."""
        if self._past is not None and state.drawing is not None:
            answer = state.tokens[state.drawing.output.start :]
            self._past.add(state.tenant, answer, state.drawing.seed)
        state.drawing = None

    def free(self, state: SuffixState) -> None:
        """See Drafter. A session without a lease ends without a rest."""
        self.rest(state)

    def held_tokens(self, state: SuffixState) -> int:
        return len(state.tokens)

    def held_bytes(self, state: SuffixState) -> int:
        return 0


def tokens_to_keep(text: str) -> int:
    """An option that says how many tokens of past answers are kept."""
    if not text.isdecimal() or int(text) < 1000:
        raise ValueError("a whole number of tokens, at least 1000")
    return int(text)


def build_suffix(
    name: str, checkpoint: str, loading: Loading, *, reach: int = 3, past_answers: int | None = None
) -> SuffixDrafter:
    """A drafter by its options, OPTIONS."""
    return SuffixDrafter(name, reach, None if past_answers is None else PastAnswers(past_answers))


OPTIONS = {"reach": positive, "past_answers": tokens_to_keep}
KIND = Kind(build_suffix, has_checkpoint=False, options=OPTIONS)
