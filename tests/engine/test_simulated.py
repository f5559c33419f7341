"""Simulated models: tables, pass times, and what they do in a whole service."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

from splitspec.cli.stack import Stack
from splitspec.client import AsyncClient
from splitspec.engine import simulated
from splitspec.engine.backends import load_model
from splitspec.engine.feed import Feed
from splitspec.engine.paged import PagedLM
from splitspec.engine.simulated import SimulatedConfig
from splitspec.errors import ConfigError, OverloadedError
from splitspec.types import Rule
from tests.integration.conftest import PATIENT

SIZES = (16, 64, 128)
TARGET = SimulatedConfig(vocabulary_size=64, seed=3)
DRAFT = replace(TARGET, acceptance=0.7)


def load(directory: Path, **options: object) -> PagedLM:
    settings = {"dtype": "float32", "device": "cpu", **options}
    return load_model(directory, name="simulated", **settings)  # type: ignore[arg-type]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    TARGET.save(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("acceptance", [0.35, 0.6, 0.8, 0.95, 1])
def test_a_draft_overlaps_its_target_as_asked(size: int, acceptance: float) -> None:
    p = SimulatedConfig(size).probabilities()
    q = SimulatedConfig(size, acceptance=acceptance).probabilities()
    np.testing.assert_allclose([p.sum(1), q.sum(1)], 1)
    np.testing.assert_allclose(np.minimum(p, q).sum(1), acceptance)
    assert np.sum(p.argmax(1) == q.argmax(1)) == round(acceptance * size)


@pytest.mark.parametrize("size", SIZES)
def test_greedy_text_says_every_token_before_it_repeats(size: int) -> None:
    follows = SimulatedConfig(size).probabilities().argmax(1)
    said = [0]
    while follows[said[-1]] not in said:
        said.append(follows[said[-1]])
    assert len(said) == size


def test_what_goes_over_the_wire_of_a_row_is_nearly_all_of_it() -> None:
    q = SimulatedConfig(512, acceptance=0.6).probabilities()
    assert np.sort(q, axis=1)[:, :-64].sum(1).max() < 2**-59


def test_another_seed_is_another_table() -> None:
    assert not np.array_equal(
        SimulatedConfig(seed=1).probabilities(), SimulatedConfig(seed=2).probabilities()
    )


def test_rows_are_those_of_the_last_token_on_each_path(directory: Path) -> None:
    model = load(directory)
    p = torch.from_numpy(TARGET.probabilities()).float()
    chain, tree = model.new_kv(), model.new_kv()
    tokens = [5, 9, 5, 60]
    rows, of_tree = model.forward_batch(
        [Feed(chain, tokens, 3), Feed(tree, [7, 1, 2, 3, 4], 5, parents=(0, 0, 2, 1))]
    )
    torch.testing.assert_close(rows.softmax(-1), p[tokens[1:]])
    torch.testing.assert_close(of_tree.softmax(-1), p[[7, 1, 2, 3, 4]])
    tree.keep_path(0, (1, 2))
    assert tree.token_ids == [7, 2, 3]
    torch.testing.assert_close(model.forward(tree, [8], 1).softmax(-1), p[[8]])


def test_its_kv_is_a_real_one(directory: Path) -> None:
    """Rewound, shared between sessions, and full at some point."""
    model = load(directory, kv_memory_bytes=4 * 64 * 8)
    assert model.pool.num_blocks == 4
    text = [index % 64 for index in range(130)]
    kv = model.new_kv()
    model.forward(kv, text, 0)
    kv.finalise(130)
    other = model.new_kv(token_ids=text)
    assert (other.length, model.pool.num_shared) == (128, 2)
    kv.truncate(64)
    third = model.new_kv()
    with pytest.raises(OverloadedError):
        model.forward(third, [1] * 129, 0)
    assert (kv.length, third.length) == (64, 0)


def test_a_pass_takes_as_long_as_its_positions_of_all_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(TARGET, pass_ms=25, position_ms=0.3).save(tmp_path)
    model = load(tmp_path)
    due: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 8.0)
    monkeypatch.setattr(simulated, "sleep_until", due.append)
    model.forward_batch([Feed(model.new_kv(), [1, 2, 3], 3), Feed(model.new_kv(), [4], 1)])
    model.forward_batch([])
    assert due == [pytest.approx(8 + 0.025 + 4 * 0.0003, abs=1e-9)]


def test_sleeping_ends_when_it_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps for all but the last moment, and not at all when nothing is left."""
    now = 10.0
    slept: list[float] = []

    def clock() -> float:
        nonlocal now
        now += 1e-6
        return now

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(time, "perf_counter", clock)
    monkeypatch.setattr(time, "sleep", sleep)
    simulated.sleep_until(10.5)
    assert now == pytest.approx(10.5, abs=3e-6)
    simulated.sleep_until(9.0)
    assert slept == [pytest.approx(0.4998, abs=1e-5)]


def test_a_running_model_takes_what_is_saved_anew(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(directory)
    due: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    monkeypatch.setattr(simulated, "sleep_until", due.append)
    kv = model.new_kv()
    before = model.forward(kv, [1], 1)
    changed = replace(TARGET, acceptance=0.5, pass_ms=7)
    changed.save(directory)
    after = model.forward(kv, [1], 1)
    assert due == [0, 0.007]
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.softmax(-1).double(), torch.from_numpy(changed.probabilities()[[1]]))
    replace(TARGET, seed=4).save(directory)
    with pytest.raises(ConfigError, match="seed is 4, expected 3 while the model runs"):
        model.forward(kv, [1], 1)
    TARGET.save(directory)
    assert torch.equal(model.forward(kv, [1], 1), before)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("vocabulary_size", 15, "a whole number from 16 to 4096"),
        ("vocabulary_size", 64.0, "a whole number from 16 to 4096"),
        ("acceptance", 0.3, "a number from 0.35 to 1"),
        ("acceptance", math.nan, "a number from 0.35 to 1"),
        ("pass_ms", -1, "a number from 0 to 60000"),
        ("max_context", True, "a whole number from 2 to 16777216"),
    ],
)
def test_wrong_parameters_are_named(field: str, value: object, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is {value}, expected {expected}"):
        SimulatedConfig(**{field: value})  # type: ignore[arg-type]


def test_another_model_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="holds a model, expected a new directory"):
        TARGET.save(tmp_path)
    assert (tmp_path / "config.json").read_text() == '{"model_type": "llama"}'


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"device": "cuda"}, "device is cuda, expected cpu"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of"),
        ({"feature_layers": "1+2"}, "feature_layers is '1\\+2', expected auto or none"),
    ],
)
def test_what_it_cannot_do_is_refused(directory: Path, option: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load(directory, **option)


def test_a_config_with_a_missing_key_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text('{"model_type": "splitspec_simulated", "seed": 1}')
    with pytest.raises(ConfigError, match="has the keys seed, expected the model_type splitspec_simulated"):
        load(directory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the command made a target and a draft."""
    directory = tmp_path_factory.mktemp("simulated")
    command = Path(sys.executable).with_name("splitspec")
    for name, acceptance in {"target": "1", "draft": "0.7"}.items():
        flags = ["--vocabulary", "64", "--seed", "3", "--acceptance", acceptance]
        done = subprocess.run([command, "simulate", directory / name, *flags], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (0, f"{directory / name}\n"), done.stderr
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(made: Path) -> AsyncIterator[AsyncClient]:
    drafters = [f"model={made / 'draft'}"]
    async with (
        Stack(model=made / "target", drafters=drafters, coordinator_args=PATIENT) as stack,
        AsyncClient(stack.address) as connected,
    ):
        yield connected


@pytest.mark.asyncio(loop_scope="module")
async def test_acceptance_of_a_service_is_the_tables(client: AsyncClient) -> None:
    """By the token rule a draft token that is reached is accepted with probability 0.7; a sigma is 0.014."""
    result = await client.generate(
        [1, 2, 3], rule=Rule.TOKEN, num_draft_tokens=3, max_tokens=1200, seed=9
    ).result()
    counts = result.finished.acceptance.acceptance_histogram
    accepted, rejected = sum(index * count for index, count in enumerate(counts)), sum(counts[:3])
    assert accepted / (accepted + rejected) == pytest.approx(0.7, abs=0.045)


@pytest.mark.asyncio(loop_scope="module")
async def test_greedy_text_of_a_service_walks_the_cycle(client: AsyncClient) -> None:
    """In one walk through it a share of 0.7 of the draft's choices is the target's."""
    follows = TARGET.probabilities().argmax(1)
    result = await client.generate([0], temperature=0.0, num_draft_tokens=1, max_tokens=65).result()
    expected = [int(follows[0])]
    while len(expected) < 65:
        expected.append(int(follows[expected[-1]]))
    assert list(result.token_ids) == expected
    assert result.text.split() == [str(token) for token in expected]


@pytest.mark.asyncio(loop_scope="module")
async def test_ids_are_words(client: AsyncClient) -> None:
    chat = await client.generate([{"role": "user", "content": "5 6"}], max_tokens=2).result()
    text = await client.generate("5 6", max_tokens=2).result()
    assert chat.started.prompt_tokens == text.started.prompt_tokens == 2
