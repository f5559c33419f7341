"""What the target does with the KV of one session, pass by pass: take over a text, verify, decode."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from splitspec.engine.feed import PIECE, Feed
from splitspec.engine.kv import KV
from splitspec.engine.paged import PagedLM
from splitspec.engine.scheduler import Pass, Steps, Timer
from splitspec.sampling.logprobs import Logprobs
from splitspec.sampling.randomness import CounterNoise
from splitspec.sampling.rows import ProcessedRows
from splitspec.tokens import common_prefix
from splitspec.types import Drawing, Origin, Rule
from splitspec.verification.outcome import Outcome
from splitspec.verification.rules import decide, rule_for
from splitspec.wire import Draft


@dataclass(frozen=True, slots=True)
class Verified:
    """A draft's outcome, by `rule`. committed: the accepted tokens and the next one, unless it is held back.

    next_origin: the next token's, None when it is held back. path: indices of the accepted tokens of a tree;
    empty for a chain. logprobs: of each committed token, or none at all when they weren't asked for.
    """

    outcome: Outcome
    rule: Rule
    committed: tuple[int, ...]
    next_origin: Origin | None
    path: tuple[int, ...]
    logprobs: tuple[Logprobs, ...]


def take_over(model: PagedLM, kv: KV, tokens: Sequence[int]) -> Steps[int]:
    """Make the KV hold all of the tokens, which are final, but the last; how many it had already.

    What it holds of another text is dropped; an empty one begins with what other sessions have left.
    """
    kv.wake()
    most = len(tokens) - 1
    kv.truncate(min(common_prefix(kv.token_ids, tokens), most))
    if not kv.length:
        kv.adopt(tokens[:most], PIECE)
    cached = kv.length
    if cached < most:
        yield Pass(model, Feed(kv, tokens[cached:most], 0))
    kv.finalise(most)
    return cached


def verify(
    model: PagedLM,
    kv: KV,
    tokens: Sequence[int],
    draft: Draft,
    drawing: Drawing,
    round_number: int,
    timer: Timer,
    hold_bonus: bool = False,
) -> Steps[Verified]:
    """Verify a draft on the committed tokens in one pass over K+1 positions; K = 0 is plain decoding.

    kv holds all committed tokens but the last, before and after: rejected tokens are rolled back. hold_bonus:
    when all draft tokens are accepted, commit no bonus: the next draft's first token is to be verified in its
    place. What a bonus would be has no part in that (PEARL, 2408.11850, draws none either).
    """
    base_length = len(tokens)
    fed = [tokens[-1], *draft.token_ids]
    logits = yield Pass(model, Feed(kv, fed, len(fed), draft.parents))
    started = time.perf_counter()
    rows = ProcessedRows(logits, drawing, tokens, draft.paths)
    outcome = decide(drawing.rule, rows, draft, base_length, CounterNoise(drawing.seed, round_number))
    accepted = tuple(draft.token_ids[node] for node in outcome.path)
    hold = hold_bonus and outcome.next_origin is Origin.BONUS
    committed = accepted if hold else (*accepted, outcome.next_token)
    logprobs: tuple[Logprobs, ...] = ()
    if drawing.sampling.logprobs is not None:
        visited = [0, *(node + 1 for node in outcome.path)]
        logprobs = tuple(rows.logprobs(row, token) for row, token in zip(visited, committed, strict=False))
    if draft.parents:
        kv.keep_path(base_length - 1, outcome.path)
    else:
        kv.truncate(base_length + len(committed) - 1)
    timer.sampling_s += time.perf_counter() - started
    path = outcome.path if draft.parents else ()
    next_origin = None if hold else outcome.next_origin
    return Verified(outcome, rule_for(drawing.rule, draft), committed, next_origin, path, logprobs)


def decode(
    model: PagedLM,
    kv: KV,
    tokens: Sequence[int],
    drawing: Drawing,
    rounds: Iterable[int],
    timer: Timer,
    emit: Callable[[int, Verified], None],
) -> Steps[None]:
    """A plain token for each of the rounds, behind `tokens`; each is told as soon as it is there."""
    text = list(tokens[:])
    for round_number in rounds:
        verified = yield from verify(model, kv, text, Draft.certain(()), drawing, round_number, timer)
        text.extend(verified.committed)
        emit(round_number, verified)
