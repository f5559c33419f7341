"""Which rule decides on which draft."""

from __future__ import annotations

from splitspec.sampling.randomness import Noise
from splitspec.sampling.rows import Rows
from splitspec.types import Rule
from splitspec.verification.block import verify_block
from splitspec.verification.greedy import verify_greedy
from splitspec.verification.outcome import Outcome
from splitspec.verification.shared_noise import verify_shared_noise
from splitspec.verification.token import verify_token
from splitspec.verification.tree_recursive import verify_tree_recursive
from splitspec.verification.tree_top_m import verify_tree_top_m
from splitspec.wire import Draft


def rule_for(rule: Rule, draft: Draft) -> Rule:
    """The rule that a draft is verified by: a tree brings its own where equality isn't asked for."""
    if not draft.parents or rule in (Rule.GREEDY, Rule.SHARED_NOISE):
        return rule
    drawn = any(q is not None for q in draft.distributions)
    return Rule.TREE_RECURSIVE if drawn else Rule.TREE_TOP_M


def decide(rule: Rule, rows: Rows, draft: Draft, base_length: int, noise: Noise) -> Outcome:
    """The decision on a draft by the rule that `rule_for` gives. base_length: committed tokens before it."""
    match rule_for(rule, draft):
        case Rule.GREEDY:
            return verify_greedy(rows, draft)
        case Rule.TOKEN:
            return verify_token(rows, draft, noise)
        case Rule.BLOCK:
            return verify_block(rows, draft, noise)
        case Rule.SHARED_NOISE:
            return verify_shared_noise(rows, draft, base_length, noise)
        case Rule.TREE_TOP_M:
            return verify_tree_top_m(rows, draft, noise)
        case Rule.TREE_RECURSIVE:
            return verify_tree_recursive(rows, draft, noise)
