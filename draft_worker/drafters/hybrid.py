"""The longest match where it is long enough, else another drafter: `hybrid,drafter=KIND...`.

A match of two tokens is right about the next one as often as a good small draft, a longer one more often, and
it costs nothing. The other drafter isn't fed while matches go on; then it takes all their tokens in one pass.
Which of the two proposes is a matter of committed tokens alone, as a match's length is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from draft_worker.drafters import DrafterSpec, build_drafter
from draft_worker.drafters.base import (
    PREFETCH,
    Drafter,
    FeatureDrafter,
    Kind,
    Loading,
    PrefetchDrafter,
    positive,
)
from draft_worker.drafters.suffix import OPTIONS, SuffixDrafter, SuffixState, build_suffix
from protos.v1 import draft_pb2
from splitspec.errors import ConfigError
from splitspec.types import Drawing
from splitspec.wire import Draft

if TYPE_CHECKING:
    import torch

    from draft_worker.drawing import DraftCounterNoise
    from splitspec.engine.blocks import BlockPool
    from splitspec.engine.scheduler import Steps


@dataclass(frozen=True, slots=True, eq=False)
class HybridState:
    """One session, as both drafters hold it."""

    suffix: SuffixState
    other: Any


class HybridDrafter:
    """Proposes what followed a match of at least `min_match` tokens, or whatever `other` does."""

    def __init__(self, name: str, suffix: SuffixDrafter, other: Drafter, min_match: int) -> None:
        self.info = draft_pb2.DrafterInfo()
        self.info.CopyFrom(other.info)
        self.info.name, self.info.kind = name, "hybrid"
        # Those in which each text that is assumed has a state of its own.
        self.info.modes[:] = [mode for mode in other.info.modes if mode in PREFETCH]
        self._suffix = suffix
        self._other = other
        self._min_match = min_match

    @property
    def pools(self) -> Sequence[BlockPool]:
        return self._other.pools

    def open(self, tenant: str = "") -> HybridState:
        return HybridState(self._suffix.open(tenant), self._other.open(tenant))

    def feed(self, state: HybridState, token_ids: Sequence[int]) -> Steps[int]:
        """See Drafter."""
        self._suffix.read(state.suffix, token_ids)
        return (yield from self._other.feed(state.other, token_ids))

    def propose(
        self,
        state: HybridState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        """See Drafter. A short match has its turn where the other has nothing, as beyond its context."""
        self._suffix.read(state.suffix, token_ids)
        continuation = self._suffix.continuation(state.suffix, num_draft_tokens, drawing)
        if continuation.match_length < self._min_match:
            draft = yield from self._other.propose(state.other, token_ids, num_draft_tokens, drawing, noise)
            if draft.token_ids:
                return draft
        return Draft.certain(continuation.token_ids)

    def guess(
        self,
        state: HybridState,
        token_ids: Sequence[int],
        draft: Draft,
        drawing: Drawing,
        noise: DraftCounterNoise,
        counts: Sequence[int],
    ) -> Steps[list[list[tuple[int, HybridState]]]]:
        """See PrefetchDrafter; called when the other is one. The other guesses, whoever has proposed."""
        other = cast(PrefetchDrafter, self._other)
        guesses = yield from other.guess(state.other, token_ids, draft, drawing, noise, counts)
        return [
            [(token, HybridState(state.suffix.fork(), behind)) for token, behind in after]
            for after in guesses
        ]

    def rest(self, state: HybridState) -> None:
        self._suffix.rest(state.suffix)
        self._other.rest(state.other)

    def free(self, state: HybridState) -> None:
        self._suffix.free(state.suffix)
        self._other.free(state.other)

    def held_tokens(self, state: HybridState) -> int:
        return self._other.held_tokens(state.other)

    def held_bytes(self, state: HybridState) -> int:
        return self._other.held_bytes(state.other)

    def held_features(self, state: HybridState) -> int:
        """See FeatureDrafter; called when the other is one."""
        return cast(FeatureDrafter, self._other).held_features(state.other)

    def take_features(self, state: HybridState, start: int, features: torch.Tensor) -> None:
        """See FeatureDrafter. The other takes them in every round, whether or not it proposes in it."""
        cast(FeatureDrafter, self._other).take_features(state.other, start, features)


def _build(
    name: str,
    checkpoint: str,
    loading: Loading,
    *,
    drafter: DrafterSpec | None = None,
    min_match: int = 2,
    **suffix: int,
) -> HybridDrafter:
    if drafter is None:
        raise ConfigError(
            "drafters: hybrid has no drafter, expected hybrid,drafter=KIND... with the drafter last",
            field="drafters",
        )
    other = build_drafter(drafter, loading)
    return HybridDrafter(name, build_suffix(name, checkpoint, loading, **suffix), other, min_match)


KIND = Kind(
    _build,
    has_checkpoint=False,
    options={**OPTIONS, "min_match": positive, "drafter": DrafterSpec.parse},
)
