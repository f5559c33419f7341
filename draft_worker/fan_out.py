"""For which verdicts on a proposal continuations are prepared: how many next tokens at each place of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitspec.wire import Draft

#: What one verdict's weight is worth after each further one.
_FORGETTING = 0.98


class FanOut:
    """Fitted to one session's verdicts.

    A verdict ends at one of K + 1 places: 0 with nothing accepted, i + 1 behind draft token i. The chance
    that a draft token is accepted is taken as the same everywhere, a, for siblings one after the other; and
    the chance that the next token is none of the F likeliest ones as (F + 1)**-r. Then the best F of a place
    is about proportional to (chance that the verdict ends there)**(1 / (1 + r)), the allocation of Kumar et
    al. (2603.03251, section 4); here they are given out one by one to where the next one adds most, which is
    the same in whole numbers.
    """

    def __init__(self) -> None:
        # Priors of a few verdicts: a = 0.7, r = 1.
        self._accepted, self._tested = 2.1, 3.0
        self._hits, self._log_ranks = 2.0, 2.0

    @property
    def acceptance(self) -> float:
        """a."""
        return self._accepted / self._tested

    @property
    def exponent(self) -> float:
        """r."""
        return self._hits / self._log_ranks

    def counts(self, draft: Draft, budget: int) -> list[int]:
        """[K + 1] next tokens to prepare for at each place, `budget` of them in all."""
        a, r = self.acceptance, self.exponent
        # First that a place is reached, which a parent's is before its children's.
        chances = [1.0] * (len(draft.token_ids) + 1)
        for place, children in enumerate(draft.children):
            for node in children:
                chances[node + 1] = chances[place] * a
                chances[place] *= 1 - a
        counts = [0] * len(chances)

        def gain(k: int) -> float:
            return float(chances[k] * ((counts[k] + 1) ** -r - (counts[k] + 2) ** -r))

        for _ in range(budget):
            counts[max(range(len(counts)), key=gain)] += 1
        return counts

    def saw(self, draft: Draft, place: int, prepared: Sequence[int], rank: int) -> None:
        """A verdict. prepared: what `counts` had. rank: the next token's among those at its place; 0 for a
        miss."""
        children, parents = draft.children, draft.parents or range(len(draft.token_ids))
        accepted, tested, end = 0, len(children[place]), place
        while end:
            parent = parents[end - 1]
            accepted, tested = accepted + 1, tested + children[parent].index(end - 1) + 1
            end = parent
        self._accepted = _FORGETTING * self._accepted + accepted
        self._tested = _FORGETTING * self._tested + tested
        if rank:
            self._hits = _FORGETTING * self._hits + 1
            self._log_ranks = _FORGETTING * self._log_ranks + math.log(rank + 0.5)
        else:
            self._log_ranks += math.log(prepared[place] + 1)
