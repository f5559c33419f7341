"""What an EAGLE draft holds of one session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from splitspec.engine.kv import KV


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A row to go on from. index: in the KV. logits: [draft vocabulary], of the token behind it."""

    index: int
    logits: torch.Tensor


class EagleState:
    """One session.

    kv: first `num_featured` rows that read the target's features, one for each token but the first. Behind
    them, in any order, rows of draft tokens and of assumed ones, which read the network's own outputs.
    rows: those, by the tokens that lead to them from behind the last featured row, and that row under (); it
    lacks when there is none, or its logits are gone.
    tokens: those that were fed last. features: [tokens, layers, hidden size] that have come for them, those
    of token features_start on, and aren't in kv yet.
    """

    def __init__(self, kv: KV, tenant: str) -> None:
        self.kv = kv
        self.tenant = tenant
        self.first_token: int | None = None
        self.num_featured = 0
        self.rows: dict[tuple[int, ...], Row] = {}
        self.tokens: Sequence[int] = ()
        self.features: torch.Tensor | None = None
        self.features_start = 0

    @property
    def held_features(self) -> int:
        """Tokens, from the first on, whose features were taken."""
        waiting = 0 if self.features is None else self.features_start + len(self.features)
        return max(self.num_featured, waiting)

    def fork(self) -> EagleState:
        """Another state of the same text: what is drafted on one changes nothing in the other."""
        copy = EagleState(self.kv.fork(), self.tenant)
        copy.first_token, copy.num_featured, copy.rows = self.first_token, self.num_featured, dict(self.rows)
        copy.tokens, copy.features, copy.features_start = self.tokens, self.features, self.features_start
        return copy

    def begin(self, kv: KV, first_token: int | None) -> None:
        """Hold another text, of which nothing is known yet."""
        self.kv.free()
        self.kv, self.first_token = kv, first_token
        self.num_featured, self.rows = 0, {}

    def truncate(self, num_featured: int) -> None:
        """Keep the first featured rows, and nothing to go on from."""
        self.kv.truncate(num_featured)
        self.num_featured, self.rows = num_featured, {}

    def drop_drafted(self) -> None:
        """Keep the featured rows alone."""
        self.kv.truncate(min(self.kv.length, self.num_featured))
        self.rows = {path: row for path, row in self.rows.items() if not path}

    def lead(self, path: tuple[int, ...]) -> list[int]:
        """The rows that lead to the last token of a path, from the last featured one on."""
        return [self.rows[path[:end]].index for end in range(len(path))]
