"""A draft's own vocabulary: some of the target's ids, so that its head is small.

All drafting is done in the draft's ids. Its ids rise with the target's, so that ties are broken alike.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import torch

from draft_worker.drawing import DraftCounterNoise
from splitspec.sampling.randomness import delays, race, shared_words
from splitspec.types import Drawing
from splitspec.wire import Draft, SparseDistribution


class DraftVocabulary:
    """The map between both. ids: [draft vocabulary] target ids, rising. Raises ValueError otherwise."""

    def __init__(self, ids: np.ndarray, target_size: int) -> None:
        if not len(ids) or ids[0] < 0 or ids[-1] >= target_size or (np.diff(ids) <= 0).any():
            raise ValueError(f"{len(ids)} draft token ids, expected rising ids below {target_size}")
        self._ids = ids.astype(np.int64)
        #: What has no id here gets the first one that nothing has: processing ignores it.
        self._of_target = np.full(target_size, len(ids), dtype=np.int64)
        self._of_target[self._ids] = np.arange(len(ids))

    def to_draft(self, token_ids: Collection[int]) -> list[int]:
        """The ids here of some of the target's; of those that lack, one beyond the vocabulary."""
        known = np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))
        return self._of_target[np.minimum(known, len(self._of_target) - 1)].tolist()  # type: ignore[no-any-return]

    def to_target(self, token_ids: Sequence[int]) -> list[int]:
        return self._ids[list(token_ids)].tolist()  # type: ignore[no-any-return]

    def drawing(self, drawing: Drawing) -> Drawing:
        """The same parameters in this vocabulary's ids."""
        sampling, output = drawing.sampling, drawing.output

        def some(token_ids: frozenset[int]) -> frozenset[int]:
            return frozenset(self.to_draft(token_ids))

        bias = sampling.logit_bias
        return replace(
            drawing,
            sampling=replace(
                sampling,
                logit_bias=dict(zip(self.to_draft(bias), bias.values(), strict=True)),
                allowed_token_ids=some(sampling.allowed_token_ids),
                banned_token_ids=some(sampling.banned_token_ids),
            ),
            output=replace(output, ending_token_ids=some(output.ending_token_ids)),
        )

    def draft(self, draft: Draft) -> Draft:
        """The same draft in the target's ids."""
        distributions = tuple(
            None if q is None else SparseDistribution(self._ids[q.ids].astype(np.uint32), q.weights)
            for q in draft.distributions
        )
        return Draft(tuple(self.to_target(draft.token_ids)), distributions, draft.parents)

    def noise(self, noise: DraftCounterNoise) -> VocabularyNoise:
        return VocabularyNoise(noise, self._ids)


class VocabularyNoise:
    """A round's noise for the draft's ids: a token races on the noise of its target id."""

    def __init__(self, noise: DraftCounterNoise, ids: np.ndarray) -> None:
        self._noise = noise
        self._ids = ids
        #: By position: all nodes of a tree's level have the same.
        self._delays: dict[int, np.ndarray] = {}

    def draft_token(self, index: int, q: SparseDistribution) -> int:
        return self._noise.draft_token(index, q)

    def race(self, position: int, weights: torch.Tensor) -> int:
        return race(self._words(position), weights.cpu().numpy())

    def delays(self, position: int, count: int) -> np.ndarray:
        if position not in self._delays:
            self._delays[position] = delays(self._words(position))
        return self._delays[position][:count]

    def _words(self, position: int) -> np.ndarray:
        words: np.ndarray = shared_words(self._noise.seed, position, int(self._ids[-1]) + 1)[self._ids]
        return words
