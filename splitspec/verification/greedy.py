"""The greedy rule: accept while equal to the target's argmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from splitspec.sampling.distribution import argmax
from splitspec.verification.outcome import Outcome


def verify_greedy(logits: torch.Tensor, draft_tokens: Sequence[int]) -> Outcome:
    """Accept draft tokens while each equals the target's argmax; then the argmax itself.

    logits: [K+1, vocabulary]; row i conditions on the first i draft tokens. draft_tokens: K ids.
    Source: Leviathan et al., 2211.17192, section 2.2, in the limit of temperature 0.
    """
    best = argmax(logits).tolist()
    num_accepted = 0
    while num_accepted < len(draft_tokens) and draft_tokens[num_accepted] == best[num_accepted]:
        num_accepted += 1
    return Outcome(len(draft_tokens), num_accepted, best[num_accepted])
