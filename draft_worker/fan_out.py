"""For which verdicts on a proposal continuations are prepared: how many next tokens after each prefix."""

from __future__ import annotations

import math

#: What one verdict's weight is worth after each further one.
_FORGETTING = 0.98


class FanOut:
    """Fitted to one session's verdicts.

    The chance that a draft token is accepted is taken as the same at each place, a, and the chance that the
    next token is none of the F likeliest ones as (F + 1)**-r. Then the best F_k is about proportional to
    (chance of k accepted)**(1 / (1 + r)), the allocation of Kumar et al. (2603.03251, section 4); here places
    are given out one by one to where the next one adds most, which is the same in whole numbers.
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

    def counts(self, num_draft_tokens: int, budget: int) -> list[int]:
        """[K + 1] next tokens to prepare for after 0 to K accepted ones, `budget` of them in all."""
        a, r = self.acceptance, self.exponent
        chances = [a**k * (1 - a) for k in range(num_draft_tokens)] + [a**num_draft_tokens]
        counts = [0] * len(chances)

        def gain(k: int) -> float:
            return float(chances[k] * ((counts[k] + 1) ** -r - (counts[k] + 2) ** -r))

        for _ in range(budget):
            counts[max(range(len(counts)), key=gain)] += 1
        return counts

    def saw(self, num_accepted: int, prepared: list[int], rank: int) -> None:
        """A verdict. prepared: what `counts` had. rank: place of its next token among them; 0 for a miss."""
        num_draft_tokens = len(prepared) - 1
        self._accepted = _FORGETTING * self._accepted + num_accepted
        self._tested = _FORGETTING * self._tested + min(num_accepted + 1, num_draft_tokens)
        if rank:
            self._hits = _FORGETTING * self._hits + 1
            self._log_ranks = _FORGETTING * self._log_ranks + math.log(rank + 0.5)
        else:
            self._log_ranks += math.log(prepared[num_accepted] + 1)
