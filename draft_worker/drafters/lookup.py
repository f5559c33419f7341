"""Prompt lookup: what followed the same tokens earlier in the session; no model.

The longest match is taken: the more of the text agrees, the likelier it goes on alike. Among equally long
ones the latest wins, since text near by is more alike than text far away, and since an index of latest
positions grows by one entry a token and match length, so that a round costs the same at any length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draft_worker.drafters.base import Kind, Loading, positive
from protos.v1 import draft_pb2
from splitspec.errors import ConfigError
from splitspec.tokens import common_prefix
from splitspec.types import Drawing
from splitspec.wire import Draft

if TYPE_CHECKING:
    from draft_worker.drawing import DraftCounterNoise
    from splitspec.engine.scheduler import Steps


class LookupState:
    """One session's tokens. followers: for each n-gram that a token follows, where the latest such is."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.followers: dict[tuple[int, ...], int] = {}


class LookupDrafter:
    """Proposes with n-grams of max_ngram down to min_ngram tokens."""

    def __init__(self, name: str, max_ngram: int, min_ngram: int) -> None:
        self.info = draft_pb2.DrafterInfo(name=name, kind="lookup")
        self.pools = ()
        self._lengths = range(max_ngram, min_ngram - 1, -1)

    def open(self, tenant: str = "") -> LookupState:
        return LookupState()

    def feed(self, state: LookupState, token_ids: Sequence[int]) -> Steps[int]:
        """See Drafter. A cut, which is rare, rebuilds the index: it keeps no older positions."""
        yield from ()
        if common_prefix(state.tokens, token_ids) < len(state.tokens):
            state.tokens.clear()
            state.followers.clear()
        tokens, held = state.tokens, len(state.tokens)
        for position, token in enumerate(token_ids[held:], start=held):
            for length in self._lengths:
                if length <= position:
                    state.followers[tuple(tokens[-length:])] = position
            tokens.append(token)
        return held

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
        tokens, count = state.tokens, len(state.tokens)
        matches = (
            state.followers.get(tuple(tokens[-length:])) for length in self._lengths if length <= count
        )
        start = next((position for position in matches if position is not None), None)
        if start is None:
            return Draft.certain(())
        continued = tokens[start : start + num_draft_tokens]
        period = count - start
        while len(continued) < num_draft_tokens:
            continued.append(continued[-period])
        return Draft.certain(continued)

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
