"""What a target would accept of a draft's tokens, measured on texts that the target wrote."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Acceptance:
    """Sums over anchors: places from which a chain of draft tokens is judged.

    Greedy texts: is the draft's first choice the target's, and all before it too? Sampled texts: the mass
    that both distributions share, which is what rejection sampling accepts of a token (2211.17192), and its
    product along the text.
    """

    def __init__(self, depth: int) -> None:
        self._accepted = {True: torch.zeros(depth), False: torch.zeros(depth)}
        self._anchors = {True: 0, False: 0}

    def add(
        self,
        target: Sequence[torch.Tensor],
        draft: Sequence[torch.Tensor],
        draft_token_ids: torch.Tensor | None,
        *,
        greedy: bool,
    ) -> None:
        """Judge anchors. target, draft: of each depth, logits [anchors, vocabulary] and [anchors, draft's].

        draft_token_ids: the target's ids of a draft's smaller vocabulary.
        """
        alive = torch.ones(len(target[0]), device=target[0].device)
        for depth, (ours, theirs) in enumerate(zip(draft, target, strict=True)):
            if greedy:
                choice = ours.argmax(dim=-1)
                if draft_token_ids is not None:
                    choice = draft_token_ids[choice]
                alive = alive * (choice == theirs.argmax(dim=-1))
            else:
                p = theirs.softmax(dim=-1)
                if draft_token_ids is not None:
                    p = p[:, draft_token_ids]
                alive = alive * torch.minimum(p, ours.softmax(dim=-1)).sum(dim=-1)
            self._accepted[greedy][depth] += alive.sum().cpu()
        self._anchors[greedy] += len(alive)

    def figures(self) -> dict[str, float]:
        """Of greedy and of sampled texts: the chance that the first 1, 2, ... draft tokens are accepted,
        and tokens per pass of the target, its own included.
        """
        figures: dict[str, float] = {}
        for greedy, name in ((True, "greedy"), (False, "sampled")):
            if not self._anchors[greedy]:
                continue
            chances = (self._accepted[greedy] / self._anchors[greedy]).tolist()
            for depth, chance in enumerate(chances, start=1):
                figures[f"{name}_{depth}"] = chance
            figures[f"{name}_length"] = 1 + sum(chances)
        return figures
