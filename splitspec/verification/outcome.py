"""What a rule decides."""

from __future__ import annotations

from dataclasses import dataclass

from splitspec.types import Origin


@dataclass(frozen=True, slots=True)
class Outcome:
    """The draft tokens that are accepted, and the token that follows them.

    path: indices of the accepted tokens in the draft, from the root; of a chain the first ones.
    complete: no draft token hangs under the last accepted one, so that the next token is a bonus.
    """

    num_draft_tokens: int
    path: tuple[int, ...]
    next_token: int
    complete: bool

    def __post_init__(self) -> None:
        if not all(0 <= node < self.num_draft_tokens for node in self.path):
            raise ValueError(f"path is {self.path}, expected indices of {self.num_draft_tokens} draft tokens")

    @classmethod
    def of_chain(cls, num_draft_tokens: int, num_accepted: int, next_token: int) -> Outcome:
        """The first num_accepted tokens of a chain are accepted."""
        path = tuple(range(num_accepted))
        return cls(num_draft_tokens, path, next_token, num_accepted == num_draft_tokens)

    @property
    def num_accepted(self) -> int:
        return len(self.path)

    @property
    def next_origin(self) -> Origin:
        if self.num_draft_tokens == 0:
            return Origin.PLAIN
        return Origin.BONUS if self.complete else Origin.CORRECTION
