"""The seam between the draft worker and its drafters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from protos.v1 import draft_pb2
from splitspec.types import Drawing, Mode
from splitspec.wire import Draft

if TYPE_CHECKING:
    import torch

    from draft_worker.drawing import DraftCounterNoise
    from splitspec.engine.blocks import BlockPool
    from splitspec.engine.scheduler import Steps


#: The modes of a drafter that can prepare for verdicts, as its info has them.
PREFETCH = [Mode.PREFETCH_PULL.value, Mode.PREFETCH_PUSH.value]


class Drafter(Protocol):
    """A way to propose tokens. A state is opaque and belongs to one session.

    `feed` and `propose` are jobs of the worker's scheduler: what they do runs on its thread, and they yield
    the passes that they need, so that sessions draft in step.
    """

    @property
    def info(self) -> draft_pb2.DrafterInfo: ...

    @property
    def pools(self) -> Sequence[BlockPool]:
        """Where its models keep their KV; none for a drafter without KV."""
        ...

    def open(self, tenant: str = "") -> Any:
        """The state of a new session, which holds no tokens. Nothing is shared across tenants."""
        ...

    def feed(self, state: Any, token_ids: Sequence[int]) -> Steps[int]:
        """Make the state hold exactly the session's committed tokens: all of them are passed.

        What it held before may be longer, shorter or different; the common prefix is kept. Returns how
        many tokens needn't be fed.
        """
        ...

    def propose(
        self,
        state: Any,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        """A proposal on the committed tokens, of at most `num_draft_tokens`; empty when it has none.

        Its length must not depend on the values drawn, and each distribution must be the one that its
        token was drawn from: else the output is no longer the target's.
        """
        ...

    def rest(self, state: Any) -> None:
        """Nobody works on the session for now: what it holds may go where room is needed."""
        ...

    def free(self, state: Any) -> None:
        """The session has ended."""
        ...

    def held_tokens(self, state: Any) -> int:
        """Tokens that the state holds."""
        ...

    def held_bytes(self, state: Any) -> int:
        """Bytes of KV that the state holds; 0 for a drafter without KV."""
        ...


class FeatureDrafter(Drafter, Protocol):
    """A drafter that drafts from features of the target: its info.features names layers.

    It is told those of all committed tokens but the last, in order; a long text's take several rounds.
    Until then it proposes nothing, or without them.
    """

    def held_features(self, state: Any) -> int:
        """Tokens, from the first on, whose features the state holds; `feed` drops those behind a cut."""
        ...

    def take_features(self, state: Any, start: int, features: torch.Tensor) -> None:
        """Features of tokens that were fed, from `start` on, which is at most held_features(state).

        features: [tokens, layers, hidden size] on the CPU, layers and element type as info.features has
        them. Called on the model's thread.
        """
        ...


class PrefetchDrafter(Drafter, Protocol):
    """A drafter that can prepare for verdicts: its info.modes has prefetch."""

    def guess(
        self,
        state: Any,
        token_ids: Sequence[int],
        draft: Draft,
        drawing: Drawing,
        noise: DraftCounterNoise,
        counts: Sequence[int],
    ) -> Steps[list[list[tuple[int, Any]]]]:
        """[K + 1] lists of the likeliest next tokens at each place of a draft, as its `paths` has them:
        counts[place] of them at most, the likeliest first, each with a state to draft on behind it. Or no
        lists at all.

        state: of token_ids, which the draft was made on; it and all the new ones hold their own text from now
        on. No draft token that follows at a place is a next token there.
        """
        ...


def guessed(
    draft: Draft, counts: Sequence[int], followers: Callable[[Sequence[int]], Iterable[int]]
) -> Iterator[list[int]]:
    """For `guess`, place by place: of the tokens that may follow a path, in their order, the first so many
    different ones that aren't draft tokens there. Nothing is looked for where none is wanted.
    """
    for path, nodes, count in zip(draft.paths, draft.children, counts, strict=True):
        found: list[int] = []
        passed_over = {draft.token_ids[node] for node in nodes}
        for token in followers(path) if count else ():
            if token not in passed_over:
                found.append(token)
                passed_over.add(token)
            if len(found) == count:
                break
        yield found


@dataclass(frozen=True, slots=True)
class Loading:
    """How drafters' models are loaded: see `CausalLM.load`."""

    dtype: str
    device: str
    kv_memory_bytes: int | None = None
    attention: str = "auto"


@dataclass(frozen=True, slots=True)
class Kind:
    """What a drafter's file declares: its `KIND`.

    build: called as build(name, checkpoint, loading, **options); raises ConfigError.
    options: for each option the function that reads its text, or raises ValueError saying what it expects.
    """

    build: Callable[..., Drafter]
    has_checkpoint: bool
    options: Mapping[str, Callable[[str], Any]]


def positive(text: str) -> int:
    """An option that is a whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ValueError("a whole number, at least 1")
    return int(text)
