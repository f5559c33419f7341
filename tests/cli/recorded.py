"""Generations as they were recorded, for what shows them."""

from __future__ import annotations

from splitspec.client import AcceptanceStats, Finished, Result, Started, Timings, Token, Usage
from splitspec.types import FinishReason, Origin, Rule


def result(
    ids: tuple[int, ...] = (1, 2, 3, 4),
    *,
    drafter: str = "",
    spec_steps: int = 0,
    plain_steps: int = 4,
    total_us: int = 2_500_000,
) -> Result:
    """Generated ids; 0.5 s of prompt, 0.2 s of draft, 1 s of target, 0.1 s of wires."""
    accepted = len(ids) - spec_steps - plain_steps
    return Result(
        started=Started("request", "session", 7, 5, 0),
        tokens=tuple(Token(token, Origin.PLAIN, i + 1) for i, token in enumerate(ids)),
        text="x" * len(ids),
        finished=Finished(
            reason=FinishReason.EOS,
            stop_string="",
            usage=Usage(5, 0, len(ids)),
            acceptance=AcceptanceStats(
                num_spec_steps=spec_steps,
                num_draft_tokens=4 * spec_steps,
                num_accepted_draft_tokens=accepted,
                mean_acceptance_length=(accepted + spec_steps) / spec_steps if spec_steps else 1.0,
                draft_acceptance_rate=accepted / (4 * spec_steps) if spec_steps else 0.0,
                acceptance_histogram=(),
                num_plain_steps=plain_steps,
                num_one_hot_tokens=0,
                num_draft_missed_steps=0,
                num_seal_mismatches=0,
                num_ahead_steps=0,
            ),
            timings=Timings(
                time_to_first_token_us=600_000,
                total_us=total_us,
                open_us=500_000,
                draft_us=200_000,
                target_us=1_000_000,
                draft_wire_us=50_000,
                target_wire_us=50_000,
            ),
            rule=Rule.GREEDY,
            drafter=drafter,
            requested_rule=None,
            rule_reason="",
            durable=True,
        ),
    )
