"""The text of a request doesn't depend on the order in which messages arrive, in any mode."""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from coordinator.control.controller import Choice, Controller
from coordinator.control.seen import RoundSeen
from coordinator.control.shared import Shared
from draft_worker.drafters.model import ModelDrafter, ModelState
from draft_worker.servicer import DraftWorker
from protos.v1 import draft_pb2, target_pb2
from splitspec.engine.simulated import SimulatedConfig, SimulatedLM
from splitspec.telemetry import Telemetry
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Mode, Output, Rule, Sampling
from splitspec.wire import Draft
from target_worker.servicer import TargetWorker
from tests.overlap.shuffled import K, Worlds
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

AHEAD = [Mode.PIPELINED, Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH]
PROMPT = [3, 1, 4, 1, 5]
LENGTH = 40
ORDERS = range(3)


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    """A simulated target, with drafts that are right in 0.6, 0.9 and all of the cases."""
    directory = tmp_path_factory.mktemp("simulated")

    def model(name: str, acceptance: float) -> SimulatedLM:
        SimulatedConfig(vocabulary_size=32, acceptance=acceptance).save(directory / name)
        return SimulatedLM(directory / name, name, "float32")

    acceptance = {"fair": 0.6, "good": 0.9, "sure": 1.0}
    drafters = {name: ModelDrafter(model(name, a), name) for name, a in acceptance.items()}
    target = TargetWorker("target", model("target", 1), Telemetry(), max_sessions=64, max_positions=512)
    draft = DraftWorker("draft", drafters, Telemetry(), max_sessions=64, max_positions=512)
    yield Worlds(target, draft)
    target.scheduler.close()
    draft.scheduler.close()


@pytest.mark.parametrize("drafter", ["fair", "good"])
@pytest.mark.parametrize("mode", AHEAD)
@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SHARED_NOISE])
async def test_text_is_that_of_plain_decoding(worlds: Worlds, rule: Rule, mode: Mode, drafter: str) -> None:
    run = functools.partial(worlds.run, PROMPT, LENGTH, rule=rule, seed=7, drafter=drafter)
    plain, _, _ = await run(mode=Mode.PLAIN, order=None)
    ahead = 0
    for order in ORDERS:
        tokens, stats, _ = await run(mode=mode, order=order)
        assert tokens == plain, order
        assert stats.missed_rounds == 0
        ahead += stats.ahead_rounds
    assert ahead > 0


@pytest.mark.parametrize("drafter", ["fair", "good"])
@pytest.mark.parametrize("mode", AHEAD)
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
async def test_text_is_the_same_in_every_order(worlds: Worlds, rule: Rule, mode: Mode, drafter: str) -> None:
    """For prefetch it is that of drafting in sequence: the branch that is sent is the fresh proposal.

    Where the output ends, a pipelined round may or may not have a bonus: nothing is drafted ahead there, but
    what has been is verified as it was meant.
    """
    certain = LENGTH if mode is not Mode.PIPELINED else LENGTH - 3 * (K + 1)
    run = functools.partial(worlds.run, PROMPT, LENGTH, rule=rule, seed=7, drafter=drafter)
    texts: Counter[tuple[int, ...]] = Counter()
    if mode is not Mode.PIPELINED:
        texts[tuple((await run(mode=Mode.SEQUENTIAL, order=None))[0])] += 1
    ahead = 0
    for order in ORDERS:
        tokens, stats, _ = await run(mode=mode, order=order)
        texts[tuple(tokens[:certain])] += 1
        assert stats.missed_rounds == 0
        ahead += stats.ahead_rounds
    assert len(texts) == 1
    assert ahead > 0


@pytest.mark.parametrize("mode", [Mode.SEQUENTIAL, *AHEAD])
@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE])
async def test_what_is_verified_is_the_fresh_proposal_of_its_round(
    worlds: Worlds, rule: Rule, mode: Mode
) -> None:
    """Drafted ahead or not: on the text that it names, with the noise of its own round."""
    tokens, _, wire = await worlds.run(PROMPT, LENGTH, mode, rule, seed=7, order=None, drafter="fair")
    text, drawing = PROMPT + tokens, Drawing(Sampling(seed=7), rule, Output(len(PROMPT)))
    verdicts = [m.verdict for m in wire.seen if isinstance(m, target_pb2.TargetSessionResponse)]
    rounds = {verdict.stamp.round for verdict in verdicts if verdict.num_draft_tokens}
    sent = [m.verify.proposal for m in wire.seen if isinstance(m, target_pb2.TargetSessionRequest)]
    verified = []
    for proposal in sent:
        stamp, base = proposal.stamp, text[: proposal.stamp.base_length]
        if stamp.round not in rounds or stamp.prefix_hash != TokenLog(base).prefix_hash():
            continue  # one of the branches that didn't come true
        draft, _, _ = Draft.decode(proposal.body, worlds.key(drawing, stamp.prefix_hash), 32)
        assert draft == worlds.fresh("fair", drawing, base, stamp.round, proposal.num_draft_tokens)
        assert (None in draft.distributions) is (rule is Rule.SHARED_NOISE)
        verified.append(stamp.round)
    assert len(verified) == len(set(verified)) >= len(rounds) - 2


class Wavering(Controller):
    """Asks for a longer proposal, then for shorter ones. seen: what it was told of the rounds."""

    def __init__(self, mode: Mode) -> None:
        super().__init__(Shared(), "target", mode=mode, branches=4)
        self._mode = mode
        self._cycle = itertools.cycle([7, 3, 2, 4])
        self.seen: list[RoundSeen] = []

    def choose(self, limit: int) -> Choice:
        choice, k = super().choose(limit), min(limit, next(self._cycle))
        return dataclasses.replace(choice, mode=self._mode, num_draft_tokens=k, num_ahead=4)

    def observe(self, seen: RoundSeen) -> None:
        self.seen.append(seen)
        super().observe(seen)


@pytest.mark.parametrize("mode", AHEAD)
async def test_prepared_proposals_are_as_long_as_was_asked_for_then(worlds: Worlds, mode: Mode) -> None:
    """Of a draft that is always right, no more is accepted than was asked for, whenever that was."""
    control = Wavering(mode)
    _, stats, _ = await worlds.run(
        PROMPT, 4 * LENGTH, mode, Rule.GREEDY, seed=7, order=None, drafter="sure", control=control
    )
    drafted = [seen for seen in control.seen if seen.num_draft_tokens]
    assert stats.ahead_rounds > 0
    assert len({seen.num_draft_tokens for seen in drafted}) > 1
    assert all(seen.num_accepted == seen.num_draft_tokens <= seen.num_asked for seen in drafted)


async def test_stale_branches_cost_no_pass(worlds: Worlds) -> None:
    """Pushed branches that didn't come true are dropped by the target before any pass."""
    num_sent = counted = num_ahead = 0
    while num_sent <= counted or not num_ahead:  # branches of both kinds have to be drafted in time
        _, stats, wire = await worlds.run(
            PROMPT, LENGTH, Mode.PREFETCH_PUSH, Rule.GREEDY, seed=7, order=None, drafter="fair"
        )
        sent = [message for message in wire.seen if isinstance(message, target_pb2.TargetSessionRequest)]
        num_sent = sum(message.HasField("verify") for message in sent)
        counted, num_ahead = sum(stats.histogram.values()), stats.ahead_rounds
        assert counted > num_ahead
    verdicts = [message for message in wire.seen if isinstance(message, target_pb2.TargetSessionResponse)]
    rounds = [message.verdict.stamp.round for message in verdicts if message.HasField("verdict")]
    # One verdict for each round, and none but those that the request counted and what its end has cut off.
    assert rounds == sorted(set(rounds))
    assert len(rounds) - counted - stats.plain_rounds <= 2
    proposals = [
        m for m in wire.seen if isinstance(m, draft_pb2.DraftSessionResponse) and m.HasField("proposal")
    ]
    assert max(m.proposal.num_draft_tokens for m in proposals) == K


@pytest.mark.parametrize("mode", [Mode.SEQUENTIAL, *AHEAD])
async def test_what_a_session_held_goes_with_its_stream(worlds: Worlds, mode: Mode) -> None:
    """By its references alone: a search for cycles comes late, and logits are large."""

    def held() -> int:
        return sum(type(found) is ModelState for found in gc.get_objects())

    gc.collect()
    before = held()
    gc.disable()
    try:
        for order in ORDERS:
            await worlds.run(PROMPT, LENGTH, mode=mode, rule=Rule.TOKEN, seed=7, drafter="fair", order=order)
        await until(lambda: held() == before)  # the model's thread lets go of them last
    finally:
        gc.enable()
