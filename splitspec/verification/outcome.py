"""What a rule decides."""

from __future__ import annotations

from dataclasses import dataclass

from splitspec.types import Origin


@dataclass(frozen=True, slots=True)
class Outcome:
    """The accepted prefix of a chain of draft tokens, and the token that follows it."""

    num_draft_tokens: int
    num_accepted: int
    next_token: int

    def __post_init__(self) -> None:
        if not 0 <= self.num_accepted <= self.num_draft_tokens:
            raise ValueError(f"{self.num_accepted} of {self.num_draft_tokens} draft tokens accepted")

    @property
    def next_origin(self) -> Origin:
        if self.num_draft_tokens == 0:
            return Origin.PLAIN
        return Origin.BONUS if self.num_accepted == self.num_draft_tokens else Origin.CORRECTION
