"""EAGLE drafts that are made ahead of the target's features, with messages that arrive in any order."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.drafters.base import Drafter
from draft_worker.servicer import DraftWorker
from protos.v1 import draft_pb2
from splitspec.telemetry import Telemetry
from splitspec.types import Mode, Rule
from target_worker.servicer import TargetWorker
from tests.draft_worker import eagles
from tests.engine import tiny
from tests.overlap.shuffled import Worlds
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

#: Few, so that a random draft is right now and then.
VOCABULARY = 8
PROMPT = [3, 1, 4, 1, 5]
LENGTH = 40
DRAFTERS = ("chain", "static", "dynamic", "hybrid")
PREFETCH = (Mode.PREFETCH_PULL, Mode.PREFETCH_PUSH)
ORDERS = range(3)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = copy.deepcopy(tiny.CONFIGS["llama"])
    config.vocab_size = VOCABULARY
    return tiny.checkpoint(tmp_path_factory.mktemp("target"), config, VOCABULARY)


@pytest.fixture(scope="module")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Drafter]:
    draft = eagles.checkpoint(tmp_path_factory.mktemp("eagle") / "draft", target, ids=range(VOCABULARY))
    spec = f"eagle={draft},depth=3,width=2"
    specs = [f"{spec},tree={tree},name={tree}" for tree in DRAFTERS[:3]]
    specs.append(f"hybrid,min_match=3,drafter={spec}")
    loading = Loading("float32", "cpu", kv_memory_bytes=2**20)
    built = [build_drafter(DrafterSpec.parse(text), loading) for text in specs]
    return {drafter.info.name: drafter for drafter in built}


@pytest.fixture(scope="module")
def worlds(target: Path, drafters: Mapping[str, Drafter]) -> Iterator[Worlds]:
    model = tiny.load(target, feature_layers=eagles.LAYERS)
    verifying = TargetWorker("target", model, Telemetry(), max_sessions=64, max_positions=512)
    drafting = DraftWorker("draft", drafters, Telemetry(), max_sessions=64, max_positions=512)
    yield Worlds(verifying, drafting)
    verifying.scheduler.close()
    drafting.scheduler.close()


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", PREFETCH)
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


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mode", PREFETCH)
@pytest.mark.parametrize("draft_after", [0, 1])
async def test_features_and_blocks(
    worlds: Worlds, drafters: Mapping[str, Drafter], mode: Mode, drafter: str, draft_after: int
) -> None:
    """Each Propose brings the features of all committed tokens but the last, whether or not its proposal was
    prepared, and also if the target's first verdict came before the session was open at the draft worker. In
    the end no block is held; without the help of the collector, which doesn't know of pools.
    """
    (pool,) = drafters[drafter].pools
    gc.collect()
    used = pool.num_used
    gc.disable()
    try:
        _, stats, wire = await worlds.run(
            PROMPT, LENGTH, mode, Rule.SHARED_NOISE, seed=7, order=1, drafter=drafter, draft_after=draft_after
        )
        await until(lambda: pool.num_used == used)
    finally:
        gc.enable()
    assert stats.ahead_rounds > 0
    asked = [m for m in wire.seen if isinstance(m, draft_pb2.DraftSessionRequest) and m.HasField("propose")]
    for message in asked:
        features = message.propose.features
        assert features.start + features.shape[0] == message.stamp.base_length - 1
