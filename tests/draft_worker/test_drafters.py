"""Drafters keep their state equal to the committed tokens, and draw from the distribution that they send."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.drafters import Drafter, DrafterSpec, Loading, build_drafter
from draft_worker.drafters.layer_skip import middle_layers
from draft_worker.drafters.lookup import LookupDrafter
from draft_worker.drafters.model import ModelDrafter
from draft_worker.drawing import DraftCounterNoise
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.paged import BLOCK_SIZE
from splitspec.engine.scheduler import run_alone
from splitspec.errors import ConfigError
from splitspec.sampling.distribution import probabilities
from splitspec.sampling.randomness import Purpose
from splitspec.tokens import TokenLog, common_prefix
from splitspec.types import DRAFT_SUPPORT, Rule, Sampling
from splitspec.wire import Draft
from tests.drawings import drawing_of
from tests.engine import tiny

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("llama"), tiny.CONFIGS["llama"])


@pytest.fixture(scope="module")
def model(directory: Path) -> CausalLM:
    return CausalLM.load(directory, name="tiny", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def drafter(model: CausalLM) -> ModelDrafter:
    return ModelDrafter(model, "model")


def build(text: str) -> Drafter:
    return build_drafter(DrafterSpec.parse(text), Loading("float32", "cpu"))


def propose(drafter: Drafter, state: Any, tokens: Sequence[int], count: int, sampling: Sampling) -> Draft:
    noise = DraftCounterNoise(7, len(tokens))
    return run_alone(drafter.propose(state, tokens, count, drawing_of(sampling), noise))


def assert_same_proposal(actual: Draft, expected: Draft) -> None:
    """The same tokens, and distributions that differ by rounding alone."""
    assert actual.token_ids == expected.token_ids
    for a, b in zip(actual.distributions, expected.distributions, strict=True):
        if a is not None and b is not None:
            for token in set(a.ids.tolist()) | set(b.ids.tolist()):
                assert a.probability(token) == pytest.approx(b.probability(token), abs=1e-4)
        else:
            assert a is b


class TestState:
    """Faults 11 and 12: the KV holds the committed tokens, whatever was accepted."""

    @pytest.mark.parametrize(
        ("num_draft_tokens", "sampling"),
        [(1, GREEDY), (1, SAMPLED), (2, SAMPLED), (3, GREEDY), (4, SAMPLED)],
    )
    def test_after_every_pair_of_verdicts(
        self, drafter: ModelDrafter, num_draft_tokens: int, sampling: Sampling
    ) -> None:
        for accepted in itertools.product(range(num_draft_tokens + 1), repeat=2):
            tokens = TokenLog(tiny.text(9))
            state = drafter.open()
            for num_accepted in accepted:
                draft = propose(drafter, state, tokens, num_draft_tokens, sampling)
                assert len(draft.token_ids) == num_draft_tokens
                correction = 96 - (draft.token_ids[num_accepted] if num_accepted < num_draft_tokens else 0)
                tokens.extend([*draft.token_ids[:num_accepted], correction])
            run_alone(drafter.feed(state, tokens))
            assert state.kv.token_ids == list(tokens)
            assert drafter.held_tokens(state) == len(tokens)

            fresh = drafter.open()
            last = propose(drafter, state, tokens, num_draft_tokens, sampling)
            assert_same_proposal(last, propose(drafter, fresh, tokens, num_draft_tokens, sampling))

    @pytest.mark.parametrize("cut", [0, 1, 5, 8, 9, 10, 11])
    def test_after_a_cut(self, drafter: ModelDrafter, cut: int) -> None:
        state = drafter.open()
        tokens = tiny.text(9)
        propose(drafter, state, tokens, 4, GREEDY)
        for changed in (tokens[:cut], [*tokens[:cut], 5, 6, 7]):
            run_alone(drafter.feed(state, changed))
            assert drafter.held_tokens(state) == len(changed)
            again = propose(drafter, state, changed, 4, GREEDY)
            assert_same_proposal(again, propose(drafter, drafter.open(), changed, 4, GREEDY))

    def test_a_cut_that_no_call_saw(self, drafter: ModelDrafter) -> None:
        """Committed tokens may be cut and replaced between two calls: nothing of them is trusted."""
        state = drafter.open()
        run_alone(drafter.feed(state, tiny.text(20)))
        replaced = tiny.text(20)[:12] + tiny.text(15, seed=1)
        again = propose(drafter, state, replaced, 3, GREEDY)
        assert_same_proposal(again, propose(drafter, drafter.open(), replaced, 3, GREEDY))

    def test_a_kv_that_was_taken_while_a_job_waited(
        self, drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All of the text is adopted then, and the logits that were left are of another place."""
        monkeypatch.setattr("draft_worker.drafters.model.PIECE", BLOCK_SIZE)
        state, tokens = drafter.open("waits"), tiny.text(BLOCK_SIZE)
        propose(drafter, state, tokens, 3, SAMPLED)
        state.kv.truncate(0)
        again = propose(drafter, state, tokens, 3, SAMPLED)
        assert_same_proposal(again, propose(drafter, drafter.open("other"), tokens, 3, SAMPLED))

    def test_nothing_is_fed_twice(self, drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        fed: list[int] = []
        forward = CausalLM.forward_batch

        def counting(self: CausalLM, feeds: Sequence[Feed]) -> list[torch.Tensor]:
            fed.extend(len(feed.token_ids) for feed in feeds)
            return forward(self, feeds)

        monkeypatch.setattr(CausalLM, "forward_batch", counting)
        state = drafter.open()
        tokens = tiny.text(9)
        run_alone(drafter.feed(state, tokens))
        draft = propose(drafter, state, tokens, 3, GREEDY)
        assert fed == [9, 1, 1]
        # All accepted, and a bonus: the last draft token and the bonus are missing.
        propose(drafter, state, [*tokens, *draft.token_ids, 50], 1, GREEDY)
        assert fed == [9, 1, 1, 2]

    def test_a_state_that_is_dropped_gives_its_kv_back(self, drafter: ModelDrafter, model: CausalLM) -> None:
        used = model.pool.num_used
        state = drafter.open()
        assert drafter.held_bytes(state) == 0
        run_alone(drafter.feed(state, tiny.text(9)))
        assert drafter.held_bytes(state) > 0
        assert model.pool.num_used > used
        del state
        assert model.pool.num_used == used


class TestContext:
    """Faults 19 and 27: a proposal shrinks where the draft model's context ends, and nothing fails."""

    def test_lengths_around_the_limit(self, drafter: ModelDrafter) -> None:
        num_draft_tokens, longest = 4, tiny.CONTEXT
        state = drafter.open()
        for length in range(longest - num_draft_tokens - 1, longest + 3):
            tokens = tiny.text(length)
            draft = propose(drafter, state, tokens, num_draft_tokens, GREEDY)
            assert len(draft.token_ids) == max(0, min(num_draft_tokens, longest - length + 1))
            run_alone(drafter.feed(state, tokens))
            assert drafter.held_tokens(state) == (length if length <= longest else 0)
        # A cut brings the session back within the context.
        back = propose(drafter, state, tiny.text(20), 2, GREEDY)
        assert_same_proposal(back, propose(drafter, drafter.open(), tiny.text(20), 2, GREEDY))

    def test_no_tokens(self, drafter: ModelDrafter) -> None:
        assert propose(drafter, drafter.open(), [], 4, GREEDY) == Draft.certain(())


class EveryDraw(DraftCounterNoise):
    """Noise that gives chosen integers, and keeps the bounds it was asked for."""

    def __init__(self, values: Sequence[int]) -> None:
        super().__init__(0, 0)
        self.values = values
        self.bounds: list[int] = []

    def below(self, index: int, purpose: Purpose, bound: int) -> int:
        assert purpose is Purpose.DRAFT
        assert index == len(self.bounds)
        self.bounds.append(bound)
        return self.values[index] % bound


class TestDraw:
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(),
            Sampling(temperature=0.3),
            Sampling(top_k=3),
            Sampling(top_p=0.5),
            Sampling(temperature=1.7, top_k=20, top_p=0.9),
        ],
        ids=str,
    )
    def test_the_distribution_is_the_processed_one(
        self, drafter: ModelDrafter, model: CausalLM, sampling: Sampling
    ) -> None:
        """q is what the target would make of the same logits, truncated and on a grid of 1/65535."""
        tokens = tiny.text(9)
        q = propose(drafter, drafter.open(), tokens, 1, sampling).distributions[0]
        assert q is not None
        full = probabilities(model.forward(model.new_kv(), tokens, 1)[0], sampling).numpy()
        kept = np.argsort(-full, kind="stable")[: min(DRAFT_SUPPORT, np.count_nonzero(full))]
        assert sorted(q.ids.tolist()) == sorted(kept.tolist())
        weights = np.maximum(1, np.rint(65535 * (full[q.ids] / full.max())))
        assert q.weights.tolist() == weights.tolist()

    def test_every_token_is_drawn_as_often_as_its_own_weight_says(self, drafter: ModelDrafter) -> None:
        """All integers below the total, at the first position and at one that conditions on a draft token."""
        sampling = Sampling(temperature=0.5, top_k=4)
        state = drafter.open()
        for values in ([0, 0], [70000, 0]):
            drawn: dict[int, int] = {}
            noise = EveryDraw(values)
            draft = run_alone(drafter.propose(state, tiny.text(9), 2, drawing_of(sampling), noise))
            q = draft.distributions[1]
            assert q is not None
            assert noise.bounds[1] == q.total
            edges = np.concatenate([[0], np.cumsum(q.weights, dtype=np.int64)])
            for low, high in itertools.pairwise(edges.tolist()):
                first, last = (
                    run_alone(
                        drafter.propose(
                            state, tiny.text(9), 2, drawing_of(sampling), EveryDraw([values[0], value])
                        )
                    )
                    for value in (low, high - 1)
                )
                assert first.token_ids == last.token_ids
                drawn[first.token_ids[1]] = high - low
            assert drawn == dict(zip(q.ids.tolist(), q.weights.tolist(), strict=True))

    def test_a_longer_proposal_begins_like_a_shorter_one(self, drafter: ModelDrafter) -> None:
        tokens = tiny.text(9)
        long = propose(drafter, drafter.open(), tokens, 4, SAMPLED)
        for count in (1, 2, 3):
            short = propose(drafter, drafter.open(), tokens, count, SAMPLED)
            assert_same_proposal(short, Draft(long.token_ids[:count], long.distributions[:count]))

    def test_shared_noise_sends_the_winner_of_the_race_alone(
        self, drafter: ModelDrafter, model: CausalLM
    ) -> None:
        """As the target would draw it if q were its distribution, at the token's position in the session."""
        tokens, noise = tiny.text(9), DraftCounterNoise(7, 1)
        drawing = drawing_of(SAMPLED, Rule.SHARED_NOISE)
        draft = run_alone(drafter.propose(drafter.open(), tokens, 3, drawing, noise))
        assert draft.distributions == (None, None, None)
        rows = model.forward(model.new_kv(), [*tokens, *draft.token_ids], 4)
        assert draft.token_ids == tuple(noise.race(9 + i, probabilities(rows[i], SAMPLED)) for i in range(3))

    def test_penalties_see_the_draft_tokens_before(self, drafter: ModelDrafter, model: CausalLM) -> None:
        tokens = tiny.text(9)
        penalised = Sampling(temperature=0, repetition_penalty=1e6)
        draft = propose(drafter, drafter.open(), tokens, 6, penalised)
        assert len(set(draft.token_ids)) == 6
        assert not set(draft.token_ids) & set(tokens)

    def test_greedy_sends_the_argmax_alone(self, drafter: ModelDrafter, model: CausalLM) -> None:
        tokens = tiny.text(9)
        draft = propose(drafter, drafter.open(), tokens, 3, GREEDY)
        assert draft.distributions == (None, None, None)
        rows = model.forward(model.new_kv(), [*tokens, *draft.token_ids], 4)
        assert draft.token_ids == tuple(torch.argmax(rows, dim=1)[:3].tolist())


class TestLayerSkip:
    def test_all_layers_but_the_skipped_ones_draft(self, directory: Path) -> None:
        drafter = build(f"layer_skip={directory},skip=1+2")
        assert (drafter.info.name, drafter.info.kind) == ("layer_skip", "layer_skip")
        kept = ModelDrafter(
            CausalLM.load(directory, name="kept", dtype="float32", device="cpu", keep_layers=[0, 3]), "kept"
        )
        expected = propose(kept, kept.open(), [5, 6], 4, GREEDY)
        assert propose(drafter, drafter.open(), [5, 6], 4, GREEDY) == expected

    @pytest.mark.parametrize(("count", "expected"), [(30, [13, 14, 15, 16, 17]), (4, [2]), (12, [5, 6])])
    def test_the_default_is_a_sixth_in_the_middle(self, count: int, expected: list[int]) -> None:
        assert middle_layers(count) == expected

    @pytest.mark.parametrize("skip", ["4", "0+1+2+3"])
    def test_layers_that_cannot_be_skipped(self, directory: Path, skip: str) -> None:
        with pytest.raises(ConfigError, match="some but not all of the layers 0 to 3") as caught:
            build(f"layer_skip={directory},skip={skip}")
        assert caught.value.field == "drafters"


def naive_lookup(tokens: Sequence[int], max_ngram: int, min_ngram: int, count: int) -> list[int]:
    """Scan for the longest suffix that occurred before, the latest time; copy on, over the end if need be."""
    for length in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for start in range(len(tokens) - length - 1, -1, -1):
            if list(tokens[start : start + length]) == list(tokens[-length:]):
                extended = list(tokens)
                for i in range(count):
                    extended.append(extended[start + length + i])
                return extended[len(tokens) :]
    return []


class TestLookup:
    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.tuples(st.integers(0, 12), st.lists(st.integers(0, 3), max_size=8)), max_size=8),
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 6),
    )
    def test_equals_a_naive_scan(
        self, steps: list[tuple[int, list[int]]], max_ngram: int, min_ngram: int, count: int
    ) -> None:
        """Over any sequence of extensions and cuts."""
        drafter = LookupDrafter("lookup", max_ngram, min(min_ngram, max_ngram))
        state = drafter.open()
        tokens: list[int] = []
        for cut, more in steps:
            tokens = tokens[: max(0, len(tokens) - cut)] + more
            draft = propose(drafter, state, tokens, count, SAMPLED)
            assert list(draft.token_ids) == naive_lookup(tokens, max_ngram, min(min_ngram, max_ngram), count)
            assert draft == Draft.certain(draft.token_ids)
            assert drafter.held_tokens(state) == len(tokens)

    def test_the_longest_match_wins_and_then_the_latest(self) -> None:
        drafter = LookupDrafter("lookup", 3, 1)
        tokens = [1, 2, 3, 10, 2, 3, 11, 3, 12, 9, 2, 3]
        assert propose(drafter, drafter.open(), tokens, 1, GREEDY).token_ids == (11,)
        assert propose(drafter, drafter.open(), [*tokens, 9, 1, 2, 3], 2, GREEDY).token_ids == (10, 2)

    def test_a_repeating_text_is_continued_beyond_its_end(self) -> None:
        drafter = LookupDrafter("lookup", 4, 1)
        assert propose(drafter, drafter.open(), [7, 1, 2, 3, 1, 2, 3], 5, GREEDY).token_ids == (1, 2, 3, 1, 2)

    def test_nothing_repeated_proposes_nothing(self) -> None:
        drafter = LookupDrafter("lookup", 3, 1)
        assert propose(drafter, drafter.open(), [1, 2, 3], 4, GREEDY) == Draft.certain(())
        assert propose(drafter, drafter.open(), [], 4, GREEDY) == Draft.certain(())

    def test_a_round_reads_the_new_tokens_alone(self) -> None:
        """At 8,000 tokens the index isn't built again: it grows by the new tokens' entries, or loses them."""
        drafter = LookupDrafter("lookup", 4, 1)
        state = drafter.open()
        tokens = list(range(8000))
        run_alone(drafter.feed(state, tokens))
        index, size = state.index._followers, len(state.index._followers)
        propose(drafter, state, [*tokens, 8000, 8001], 4, GREEDY)
        assert len(index) == size + 2 * 4
        propose(drafter, state, tokens, 4, GREEDY)
        assert state.index._followers is index
        assert len(index) == size


@given(st.lists(st.integers(0, 2), max_size=600), st.lists(st.integers(0, 2), max_size=600))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    shorter = min(len(a), len(b))
    expected = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    assert common_prefix(a, b) == expected
    assert common_prefix(a, a + b) == common_prefix(TokenLog(a + b), a) == len(a)


class TestSpec:
    def test_every_part(self) -> None:
        assert DrafterSpec.parse("lookup") == DrafterSpec("lookup", "", "lookup", {})
        assert DrafterSpec.parse("lookup,max_ngram=4,name=wide") == DrafterSpec(
            "lookup", "", "wide", {"max_ngram": 4}
        )
        assert DrafterSpec.parse("model=a/b") == DrafterSpec("model", "a/b", "model", {})
        assert DrafterSpec.parse("layer_skip=x,skip=14+10").options == {"skip": [10, 14]}

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", "one of the known drafters: eagle, hybrid, layer_skip, lookup, model, suffix"),
            ("medusa=x", "one of the known drafters: eagle, hybrid, layer_skip, lookup, model, suffix"),
            ("model", "model=CHECKPOINT"),
            ("lookup=x", "lookup without a checkpoint"),
            ("model=x,skip=1", "model with options of: name"),
            ("lookup,max=3", "lookup with options of: name, max_ngram, min_ngram"),
            ("lookup,max_ngram=0", "max_ngram to be a whole number, at least 1"),
            ("lookup,max_ngram", "max_ngram to be a whole number, at least 1"),
            ("lookup,name=", "name to be a name"),
            ("layer_skip=x,skip=1-2", "skip to be layer numbers, counted from 0, such as 10+12+14"),
        ],
    )
    def test_wrong_ones_are_named(self, text: str, expected: str) -> None:
        with pytest.raises(ConfigError) as caught:
            DrafterSpec.parse(text)
        assert str(caught.value) == f"drafters has {text!r}, expected {expected}"
        assert caught.value.field == "drafters"

    def test_built_ones_say_what_they_are(self, directory: Path) -> None:
        info = build(f"model={directory},name=tiny").info
        assert (info.name, info.kind) == ("tiny", "model")
        assert info.model.name == str(directory)
        lookup = build("lookup,max_ngram=2,min_ngram=2")
        assert (lookup.info.name, lookup.info.kind, lookup.info.HasField("model")) == (
            "lookup",
            "lookup",
            False,
        )
        with pytest.raises(ConfigError, match="min_ngram 5, expected at most max_ngram, 4"):
            build("lookup,min_ngram=5")
        with pytest.raises(ConfigError, match="dtype is 'int8'"):
            build_drafter(DrafterSpec.parse(f"model={directory}"), Loading("int8", "cpu"))
