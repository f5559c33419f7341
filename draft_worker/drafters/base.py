"""The seam between the draft worker and its drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from protos.v1 import draft_pb2
from splitspec.types import Drawing
from splitspec.wire import Draft

if TYPE_CHECKING:
    from draft_worker.drawing import DraftCounterNoise

_BLOCK = 256


class Drafter(Protocol):
    """A way to propose tokens. One thread makes all calls; a state is opaque and belongs to one session."""

    @property
    def info(self) -> draft_pb2.DrafterInfo: ...

    def open(self) -> Any:
        """The state of a new session, which holds no tokens."""
        ...

    def feed(self, state: Any, token_ids: Sequence[int]) -> None:
        """Make the state hold exactly the session's committed tokens: all of them are passed.

        What it held before may be longer, shorter or different; the common prefix is kept.
        """
        ...

    def propose(
        self,
        state: Any,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Draft:
        """A proposal on the committed tokens, of at most `num_draft_tokens`; empty when it has none.

        Its length must not depend on the values drawn, and each distribution must be the one that its
        token was drawn from: else the output is no longer the target's.
        """
        ...

    def held_tokens(self, state: Any) -> int:
        """Tokens that the state holds."""
        ...

    def held_bytes(self, state: Any) -> int:
        """Bytes of KV that the state holds; 0 for a drafter without KV."""
        ...

    def close(self, state: Any) -> None:
        """Let go of all that the state holds."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """What a drafter's file declares: its `KIND`.

    build: called as build(name, checkpoint, dtype=, device=, **options); raises ConfigError.
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


def common_prefix(held: Sequence[int], committed: Sequence[int]) -> int:
    """How many leading tokens are the same.

    It starts from the first token each time: a cut may have replaced tokens anywhere since the last call.
    By blocks that costs some 50 us for 8,000 tokens.
    """
    shorter = min(len(held), len(committed))
    for start in range(0, shorter, _BLOCK):
        end = min(start + _BLOCK, shorter)
        if held[start:end] != committed[start:end]:
            return next(i for i in range(start, end) if held[i] != committed[i])
    return shorter
