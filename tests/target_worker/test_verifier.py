"""Passes of one session on the target: what is committed, what its KV holds then, which noise it takes."""

from __future__ import annotations

import dataclasses

import pytest

from splitspec.engine.feed import PIECE
from splitspec.engine.kv import KV
from splitspec.engine.scheduler import Timer, run_alone
from splitspec.engine.simulated import SimulatedConfig, SimulatedLM
from splitspec.sampling.randomness import Purpose
from splitspec.types import Drawing, Origin, Output, Rule, Sampling
from splitspec.wire import Draft
from target_worker.verifier import Verified, decode, take_over, verify
from tests.drawings import drawing_of
from tests.exactness.asked import Asked, recording

GREEDY = drawing_of(Sampling(temperature=0.0, logprobs=3, presence_penalty=0.5), output=Output(3))
SAMPLED = drawing_of(Sampling(seed=9))
TEXT = [3, 1, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SimulatedLM:
    directory = tmp_path_factory.mktemp("simulated") / "target"
    SimulatedConfig(vocabulary_size=32).save(directory)
    return SimulatedLM(directory, "target", "float32")


def held(model: SimulatedLM, text: list[int] = TEXT) -> KV:
    """A KV of all of a text but its last token."""
    kv = model.new_kv()
    model.forward(kv, text[:-1], 0)
    return kv


def verified(model: SimulatedLM, kv: KV, draft: Draft, drawing: Drawing, *, hold: bool = False) -> Verified:
    return run_alone(verify(model, kv, TEXT, draft, drawing, 5, Timer(), hold))


def spoken(model: SimulatedLM, drawing: Drawing, count: int) -> list[int]:
    """What is drawn plainly, by the noise of one round for each token."""
    kv, found = held(model), list[int]()
    run_alone(
        decode(model, kv, TEXT, drawing, range(5, 5 + count), Timer(), lambda _, v: found.extend(v.committed))
    )
    return found


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("num_right", range(4))
def test_kv_holds_all_but_the_last_token(model: SimulatedLM, num_right: int, shape: str) -> None:
    """Whatever is accepted, and whether or not a bonus is held back."""
    right = spoken(model, GREEDY, 4)
    drafted = [*right[:num_right], *(token + 1 if token < 31 else 0 for token in right[num_right:3])]
    draft = Draft.certain(drafted, range(3) if shape == "tree" else ())
    for hold in (False, True) if shape == "chain" else (False,):
        kv = held(model)
        found = verified(model, kv, draft, GREEDY, hold=hold)
        kept = hold and num_right == 3
        assert found.committed == tuple(right[: num_right + 1 - kept])
        assert found.next_origin is (None if kept else Origin.BONUS if num_right == 3 else Origin.CORRECTION)
        assert kv.token_ids == [*TEXT, *found.committed][:-1]
        assert kv.num_tree_tokens == 0
        assert len(found.logprobs) == len(found.committed)


def test_logprobs_of_a_tree_s_path_are_those_of_its_tokens(model: SimulatedLM) -> None:
    """Wrong siblings stand before and beside the right ones, so that no row is where it is in a chain."""
    right = spoken(model, GREEDY, 3)
    wrong = [token for token in range(32) if token not in right]
    tree = Draft.certain([wrong[0], right[0], wrong[1], wrong[2], right[1]], [0, 0, 1, 2, 2])
    found = verified(model, held(model), tree, GREEDY)
    assert found.path == (1, 4)
    assert found.committed == tuple(right)
    as_chain = verified(model, held(model), Draft.certain(right[:2]), GREEDY)
    assert found.logprobs == as_chain.logprobs
    assert len({logprobs.raw for logprobs in found.logprobs}) > 1
    for logprobs, token in zip(found.logprobs, right, strict=True):
        assert logprobs.top_processed == ((token, 0.0),)


def test_each_plain_token_of_a_grant_has_the_noise_of_its_own_round(model: SimulatedLM) -> None:
    with recording() as recorder:
        spoken(model, SAMPLED, 12)
    assert recorder.by() == [Asked(9, number, 0, Purpose.NEXT) for number in range(5, 17)]


def test_plain_tokens_of_a_grant_count_those_before_them(model: SimulatedLM) -> None:
    """As if each were granted by itself: what came often comes sooner here."""
    drawing = drawing_of(Sampling(temperature=0.0, frequency_penalty=-2.0), output=Output(3))
    kv, text = held(model), [*TEXT]
    for number in range(5, 17):
        alone = verify(model, kv, text, Draft.certain(()), drawing, number, Timer())
        text += run_alone(alone).committed
    assert spoken(model, drawing, 12) == text[3:]
    assert len(set(text[3:])) < 12


def test_plain_tokens_under_shared_noise_have_that_of_their_positions(model: SimulatedLM) -> None:
    drawing = dataclasses.replace(SAMPLED, rule=Rule.SHARED_NOISE)
    with recording() as recorder:
        spoken(model, drawing, 12)
    assert recorder.by() == [Asked(9, 0, position, Purpose.SHARED) for position in range(3, 15)]


@pytest.mark.parametrize("length", [PIECE, PIECE + 64, 2 * PIECE, 2 * PIECE + 63])
def test_a_text_begins_with_whole_pieces_that_others_left(model: SimulatedLM, length: int) -> None:
    """Else it would be fed in other pieces than alone, whose sums may have another order."""
    text = [(place * place + length) % 31 for place in range(length + 1)]
    first = model.new_kv()
    assert run_alone(take_over(model, first, text)) == 0
    assert first.token_ids == text[:-1]
    # Full blocks are shared, up to the last whole piece.
    assert run_alone(take_over(model, model.new_kv(), [*text, 1])) == length // PIECE * PIECE
    # One that is held already stays, and only what lacks is fed.
    assert run_alone(take_over(model, first, [*text, 1, 2])) == length
    assert run_alone(take_over(model, first, [*text[:70], 1, 2])) == 70
    assert first.token_ids == [*text[:70], 1]
    other = model.new_kv()
    changed = [text[0] + 1, *text[1:]]
    assert run_alone(take_over(model, other, changed)) == 0
    assert other.token_ids == changed[:-1]


@pytest.mark.parametrize("min_tokens", [0, 3])
@pytest.mark.parametrize("start", [1, 3])
def test_the_output_counts_from_its_start(model: SimulatedLM, min_tokens: int, start: int) -> None:
    """All ids but one end the output: that one comes until min_tokens are there, some of them in the text."""
    ending = frozenset(range(31))
    drawing = drawing_of(
        Sampling(temperature=0.0, logit_bias={31: -50.0}), output=Output(start, min_tokens, ending)
    )
    expected = max(0, min_tokens - (len(TEXT) - start))
    assert [token == 31 for token in spoken(model, drawing, 5)] == [place < expected for place in range(5)]
