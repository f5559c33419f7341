"""Trees and shared noise that look right and aren't; see wrong.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from splitspec.sampling.randomness import Noise, Purpose
from splitspec.sampling.rows import Rows
from splitspec.verification.outcome import Outcome
from splitspec.verification.walk import walk
from splitspec.wire import Draft, SparseDistribution
from tests.exactness import drafting
from tests.exactness.drafting import RoundNoise, top
from tests.exactness.law import Decide


def sibling_removed(
    noise: RoundNoise, nodes: Sequence[int], q: Rows
) -> tuple[list[int], SparseDistribution | None]:
    """Reranking: of two drawn children, keep the more probable one."""
    tokens, sent = drafting.drawn_children(3)(noise, [nodes[0], 100 + nodes[0]], q)
    assert sent is not None
    return [max(tokens, key=sent.probability)], sent


def top_sent_as_drawn(
    noise: RoundNoise, nodes: Sequence[int], q: Rows
) -> tuple[list[int], SparseDistribution]:
    """The most probable children, sent with q as if they had been drawn from it."""
    sent = top(q.probabilities(0), 3)
    return sent.ids[: len(nodes)].tolist(), sent


def drawn_with_replacement(
    noise: RoundNoise, nodes: Sequence[int], q: Rows
) -> tuple[list[int], SparseDistribution]:
    """Children drawn independently, and those that are equal are merged."""
    sent = top(q.probabilities(0), 3)
    return list(dict.fromkeys(noise.draft_token(node, sent) for node in nodes)), sent


def recursive(
    *, renormalised: bool = True, p_updated: bool = True, q_updated: bool = True, by_probability: bool = False
) -> Decide:
    """Recursive rejection with one mistake."""

    def decide(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
        children = draft.children

        def choose(row: int, _: int) -> int:
            p, sent = rows.probabilities(row), draft.distributions[row]
            if sent is None:
                return noise.draw(row, Purpose.NEXT, p)
            tried = [(node, draft.token_ids[node]) for node in children[row]]
            if by_probability:
                tried.sort(key=lambda child: -sent.probability(child[1]))
            q = dense = torch.zeros_like(p)
            dense[torch.from_numpy(sent.ids.astype(np.int64))] = torch.from_numpy(sent.probabilities)
            for node, token in tried:
                if noise.accepts(node, float(p[token]), float(q[token])):
                    return token
                if p_updated:
                    rest = (p - q).clamp(min=0)
                    p = rest / rest.sum() if rest.sum() > 0 else p
                if q_updated:
                    q = q.clone()
                    q[token] = 0
                    q = q / q.sum() if renormalised and q.sum() > 0 else q
            return noise.draw(row, Purpose.RESIDUAL, p)

        return walk(draft, choose)

    return decide


def siblings_tried_independently(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    """Certain children accepted with p(c) each, as if those before hadn't been refused."""
    children = draft.children

    def choose(row: int, _: int) -> int:
        p = rows.probabilities(row)
        for node in children[row]:
            if noise.accepts(node, float(p[draft.token_ids[node]]), 1.0):
                return draft.token_ids[node]
        rest = p.clone()
        rest[[draft.token_ids[node] for node in children[row]]] = 0
        return noise.draw(row, Purpose.RESIDUAL, rest if rest.sum() > 0 else p)

    return walk(draft, choose)


# Shared noise: what is emitted depends on the draft.


def race_by_round(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    """The position within the round instead of the absolute one, so that each round races anew."""
    return walk(draft, lambda row, depth: noise.race(depth, rows.probabilities(row)))


def race_by_node(rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    """The row instead of the depth: the same for chains only."""
    return walk(draft, lambda row, _: noise.race(base_length + row, rows.probabilities(row)))


def race_of_float32(words: np.ndarray, weights: np.ndarray) -> int:
    """Uniforms with 24 bits."""
    u = ((words >> np.uint64(40)).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    return int(np.argmin(-np.log(u.astype(np.float64)) / weights))
