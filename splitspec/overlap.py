"""When a proposal that was drafted before its parent's verdict holds: the same on all three sides."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from protos.v1 import common_pb2
from splitspec.tokens import TokenLog
from splitspec.types import Rule


def begins_with(stamp: common_pb2.Stamp, tokens: TokenLog, rule: Rule) -> tuple[int, ...] | None:
    """The committed tokens that a proposal must begin with to hold; None when it can't.

    stamp: the proposal's. tokens: those committed once its parent has its verdict. It holds if the text that
    it builds on is exactly those. Where the rule asks for equality alone it also holds if it begins with the
    one token that was committed beyond that text: which one that is doesn't depend on the draft. Under the
    other rules that would choose among drafts by what was drawn in them.
    """
    behind = len(tokens) - stamp.base_length
    most = 1 if rule in (Rule.GREEDY, Rule.SHARED_NOISE) else 0
    if not 0 <= behind <= most or tokens.prefix_hash(stamp.base_length) != stamp.prefix_hash:
        return None
    return tuple(tokens[stamp.base_length :])


def holds(proposal: common_pb2.Proposal, tokens: TokenLog, rule: Rule) -> bool:
    """Whether a proposal holds once `tokens` are committed; see `begins_with`."""
    first = begins_with(proposal.stamp, tokens, rule)
    if not first:
        return first is not None
    try:
        body = common_pb2.ProposalBody.FromString(proposal.body)
    except DecodeError:
        return False
    return not body.parents and tuple(body.token_ids[:1]) == first
