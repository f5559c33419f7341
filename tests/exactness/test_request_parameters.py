"""Parameters that act by position, and stop tokens: the law is that of plain decoding under the same ones."""

from __future__ import annotations

import pytest

from splitspec.types import Rule, Sampling
from tests.exactness import drafting, law, tables
from tests.exactness.drafting import Propose, chain, tree
from tests.exactness.law import Implementation, decide_by

DRAFTERS: dict[str, Propose] = {
    "chain": chain(drafting.drawn),
    "certain chain": chain(drafting.certain),
    "tree": tree(drafting.drawn_children(2), 2, 1),
    "certain tree": tree(drafting.top_children, 2, 1),
}
PARAMETERS = {
    "repetition penalty": Sampling(repetition_penalty=1.8),
    "presence penalty": Sampling(presence_penalty=1.5),
    "frequency penalty": Sampling(temperature=0.8, frequency_penalty=1.2),
    "negative penalties": Sampling(presence_penalty=-1, frequency_penalty=-2, repetition_penalty=0.6),
    "bans and bias": Sampling(banned_token_ids=frozenset([1]), logit_bias={0: 2.0, 2: -1.5}),
    "allowed": Sampling(allowed_token_ids=frozenset([0, 3]), repetition_penalty=1.3),
    "all at once": Sampling(
        temperature=0.8,
        top_k=3,
        top_p=0.95,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={1: 0.8},
        banned_token_ids=frozenset([2]),
    ),
}
PROMPT = (1, 1, 3)


@pytest.mark.parametrize(
    ("drafter", "rule"), [("chain", Rule.TOKEN), *((drafter, Rule.BLOCK) for drafter in DRAFTERS)]
)
@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_act_at_each_position(name: str, drafter: str, rule: Rule) -> None:
    p, q = (tables.processed_model(4, seed, PARAMETERS[name], prompt=PROMPT) for seed in (60, 61))
    emitted = law.emitted_law(Implementation(DRAFTERS[drafter], decide_by(rule)), p, q, 3, 2)
    law.assert_exact(emitted, law.target_law(p, 3))


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_stop_tokens_and_minimum_length(drafter: str, min_tokens: int) -> None:
    """The earliest stop token wins, and none comes before there are min_tokens tokens."""
    stop = frozenset([0, 2])
    p, q = (
        tables.processed_model(4, seed, Sampling(), prompt=PROMPT, min_tokens=min_tokens, ending=stop)
        for seed in (62, 63)
    )
    implementation = Implementation(DRAFTERS[drafter], decide_by(Rule.BLOCK))
    emitted = law.emitted_law(implementation, p, q, 4, 2, stop)
    law.assert_exact(emitted, law.target_law(p, 4, stop))
    lengths = {len(tokens) for tokens in emitted}
    assert lengths == set(range(min(min_tokens + 1, 4), 5))
    assert all(not stop.intersection(tokens[:-1]) for tokens in emitted)
