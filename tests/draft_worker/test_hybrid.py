"""Which of its two drafters a hybrid lets propose, and that each is told all that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.drafters.hybrid import HybridDrafter, HybridState
from draft_worker.drafters.lookup import LookupDrafter, LookupIndex, LookupState
from draft_worker.drafters.model import ModelDrafter, ModelState
from draft_worker.drafters.suffix import SuffixDrafter
from draft_worker.drawing import DraftCounterNoise
from draft_worker.past_answers import PastAnswers
from protos.v1 import common_pb2
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from splitspec.engine.scheduler import Steps, run_alone
from splitspec.errors import ConfigError
from splitspec.tokens import TokenLog, common_prefix
from splitspec.types import Drawing, Rule, Sampling
from splitspec.wire import Draft
from tests.draft_worker.test_automaton import STEPS, longest_suffix_in
from tests.drawings import drawing_of
from tests.engine import tiny

GREEDY = drawing_of(Sampling(temperature=0.0))
SAMPLED = drawing_of(Sampling(temperature=0.8, seed=7))
#: Its last three tokens occur before, and its last four don't.
MATCHED = [5, 1, 2, 3, 9, 8, 7, 1, 2, 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("llama"), tiny.CONFIGS["llama"])


@pytest.fixture(scope="module")
def model(directory: Path) -> ModelDrafter:
    return ModelDrafter(CausalLM.load(directory, name="tiny", dtype="float32", device="cpu"), "model")


def hybrid_of(other: ModelDrafter | LookupDrafter, min_match: int, reach: int = 2) -> HybridDrafter:
    return HybridDrafter("hybrid", SuffixDrafter("suffix", reach), other, min_match)


def propose(
    drafter: HybridDrafter | ModelDrafter,
    state: object,
    tokens: Sequence[int],
    count: int,
    drawing: Drawing = GREEDY,
) -> Draft:
    noise = DraftCounterNoise(drawing.seed, len(tokens))
    return run_alone(drafter.propose(state, tokens, count, drawing, noise))  # type: ignore[arg-type]


class TestChoice:
    @settings(max_examples=15, deadline=None)
    @given(steps=STEPS, min_match=st.integers(1, 5), count=st.integers(1, 3))
    def test_the_length_of_the_match_decides(
        self, model: ModelDrafter, steps: list[tuple[int, list[int]]], min_match: int, count: int
    ) -> None:
        """Over any extensions and cuts; and each drafter proposes what it proposes alone."""
        drafter = hybrid_of(model, min_match)
        state = drafter.open()
        suffix = SuffixDrafter("suffix", 2)
        tokens: list[int] = []
        for cut, more in steps:
            tokens = [*tokens[: max(0, len(tokens) - cut)], *more][: tiny.CONTEXT]
            draft = propose(drafter, state, tokens, count)
            long = longest_suffix_in(tokens, tokens[:-1]) >= min_match
            alone = suffix if long or not tokens else model
            steps_alone = alone.propose(alone.open(), tokens, count, GREEDY, DraftCounterNoise(7, 1))  # type: ignore[arg-type]
            assert draft == run_alone(steps_alone)
        drafter.free(state)

    def test_drawn_values_have_no_say(self, model: ModelDrafter) -> None:
        """Neither in who proposes nor in how much: whatever tokens a seed draws, they are as many."""
        for min_match, certain in ((3, True), (4, False)):
            drafter = hybrid_of(model, min_match)
            drafts = {
                propose(drafter, drafter.open(), MATCHED, 4, drawing_of(Sampling(seed=seed), rule)).token_ids
                for seed in range(8)
                for rule in (Rule.TOKEN, Rule.BLOCK)
            }
            assert {len(token_ids) for token_ids in drafts} == {4}
            assert (len(drafts) == 1) == certain

    def test_the_models_tokens_keep_their_distributions(self, model: ModelDrafter) -> None:
        draft = propose(hybrid_of(model, 4), hybrid_of(model, 4).open(), MATCHED, 4, SAMPLED)
        assert draft == propose(model, model.open(), MATCHED, 4, SAMPLED)
        assert all(q is not None for q in draft.distributions)

    def test_beyond_the_models_context_a_short_match_has_its_turn(self, model: ModelDrafter) -> None:
        tokens = [*tiny.text(tiny.CONTEXT), 5, 6, 7, 7, 5]
        drafter = hybrid_of(model, 4)
        assert propose(model, model.open(), tokens, 4) == Draft.certain(())
        assert propose(drafter, drafter.open(), tokens, 4).token_ids == (6, 7)


class TestAhead:
    @pytest.mark.parametrize("min_match", [1, 4])
    def test_a_branch_proposes_what_a_fresh_state_does(self, model: ModelDrafter, min_match: int) -> None:
        """Whether a match or the model proposes on the text before, and on the assumed one."""
        drafter = hybrid_of(model, min_match)
        state = drafter.open()
        run_alone(drafter.feed(state, MATCHED))
        draft = propose(drafter, state, MATCHED, 3)
        noise = DraftCounterNoise(7, 1)
        guesses = run_alone(drafter.guess(state, MATCHED, draft, GREEDY, noise, [2] * 4))
        assert [len(after) for after in guesses] == [2] * 4
        certain = set()
        for path, after in zip(draft.paths, guesses, strict=True):
            for token, branch in [*after, (MATCHED[0], after[0][1])]:
                text = [*MATCHED, *path, token]
                found = propose(drafter, branch, text, 3, SAMPLED)
                assert found == propose(drafter, drafter.open(), text, 3, SAMPLED)
                certain.add(found.distributions[0] is None)
        assert certain == ({True, False} if min_match == 1 else {False})
        again = [*MATCHED, draft.token_ids[0], 7]
        assert propose(drafter, state, again, 3) == propose(drafter, drafter.open(), again, 3)

    def test_assumed_tokens_never_become_a_past_answer(self, model: ModelDrafter) -> None:
        past = PastAnswers(1000)
        drafter = HybridDrafter("hybrid", SuffixDrafter("suffix", 2, past), model, 3)
        state = drafter.open()
        draft = propose(drafter, state, MATCHED, 3)
        noise = DraftCounterNoise(7, 1)
        guesses = run_alone(drafter.guess(state, MATCHED, draft, GREEDY, noise, [2] * 4))
        (_, dropped), (token, kept) = guesses[1]
        propose(drafter, kept, [*MATCHED, draft.token_ids[0], token], 3)
        propose(drafter, dropped, [*MATCHED, draft.token_ids[0], 95], 3)
        drafter.rest(state)
        (book,) = past.books("", GREEDY)
        assert len(book) == len(MATCHED) + 1
        drafter.rest(kept)
        assert len(book) == len(MATCHED) + 1 + len(MATCHED) + 2 + 1


class TestState:
    def test_the_model_catches_up_in_one_pass(
        self, model: ModelDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fed: list[int] = []
        forward = CausalLM.forward_batch

        def counting(self: CausalLM, feeds: Sequence[Feed]) -> list[torch.Tensor]:
            fed.extend(len(feed.token_ids) for feed in feeds)
            return forward(self, feeds)

        monkeypatch.setattr(CausalLM, "forward_batch", counting)
        drafter = hybrid_of(model, 3)
        state, tokens = drafter.open(), TokenLog(MATCHED)
        run_alone(drafter.feed(state, tokens))
        assert fed == [len(MATCHED)]
        for _ in range(3):
            tokens.extend(propose(drafter, state, tokens, 2).token_ids)
        assert fed == [len(MATCHED)]
        tokens.extend([50])
        draft = propose(drafter, state, tokens, 1)
        assert fed == [len(MATCHED), 7]
        assert draft.token_ids == propose(model, model.open(), tokens, 1).token_ids

    def test_after_any_verdicts_it_proposes_as_a_new_session_does(self, model: ModelDrafter) -> None:
        drafter = hybrid_of(model, 3)
        for num_accepted in (0, 2, 4):
            state, tokens = drafter.open(), TokenLog(MATCHED)
            for _ in range(4):
                draft = propose(drafter, state, tokens, 4, SAMPLED)
                tokens.extend([*draft.token_ids[:num_accepted], 3])
                again = propose(drafter, drafter.open(), tokens, 4, SAMPLED)
                kept = propose(drafter, state, tokens, 4, SAMPLED)
                assert kept.token_ids == again.token_ids

    def test_both_are_opened_for_the_tenant_rest_and_are_freed(
        self, model: ModelDrafter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[tuple[str, object]] = []
        new_kv, rest = CausalLM.new_kv, ModelDrafter.rest

        def opened(self: CausalLM, tenant: str = "") -> KV:
            calls.append(("open", tenant))
            return new_kv(self, tenant)

        def rested(self: ModelDrafter, state: ModelState) -> None:
            calls.append(("rest", state))
            rest(self, state)

        monkeypatch.setattr(CausalLM, "new_kv", opened)
        monkeypatch.setattr(ModelDrafter, "rest", rested)
        past = PastAnswers(1000)
        drafter = HybridDrafter("hybrid", SuffixDrafter("suffix", 2, past), model, 2)
        state = drafter.open("a")
        propose(drafter, state, tiny.text(40), 4)
        run_alone(drafter.feed(state, tiny.text(40)))
        assert drafter.held_tokens(state) == 40
        assert drafter.held_bytes(state) == model.held_bytes(state.other) > 0
        assert drafter.pools == model.pools
        drafter.rest(state)
        assert calls == [("open", "a"), ("rest", state.other)]
        assert [len(past.books(tenant, GREEDY)) for tenant in ("a", "b", "")] == [1, 0, 0]
        drafter.free(state)
        assert drafter.held_tokens(state) == 0


class FeatureState(LookupState):
    """With the features that were taken, one number a token."""

    def __init__(self) -> None:
        super().__init__(LookupIndex(range(1, 0, -1)))
        self.features: list[float] = []


class FeatureLookup(LookupDrafter):
    """A drafter with features that proposes nothing without them, and else token 90 plus their number."""

    def __init__(self) -> None:
        super().__init__("features", 1, 1)
        self.info.features.CopyFrom(common_pb2.FeatureRequest(layers=[1], dtype="float32"))

    def open(self, tenant: str = "") -> FeatureState:
        return FeatureState()

    def feed(self, state: LookupState, token_ids: Sequence[int]) -> Steps[int]:
        assert isinstance(state, FeatureState)
        del state.features[common_prefix(state.tokens, token_ids) :]
        return (yield from super().feed(state, token_ids))

    def propose(
        self,
        state: LookupState,
        token_ids: Sequence[int],
        num_draft_tokens: int,
        drawing: Drawing,
        noise: DraftCounterNoise,
    ) -> Steps[Draft]:
        assert isinstance(state, FeatureState)
        yield from self.feed(state, token_ids)
        complete = len(state.features) == len(token_ids) - 1
        return Draft.certain((90 + len(state.features),) if complete else ())

    def held_features(self, state: FeatureState) -> int:
        return len(state.features)

    def take_features(self, state: FeatureState, start: int, features: torch.Tensor) -> None:
        assert start == len(state.features)
        state.features += features.flatten().tolist()


class TestFeatures:
    def round(self, drafter: HybridDrafter, state: HybridState, tokens: Sequence[int]) -> Draft:
        """As the worker has it: the tokens, the features that lack, a proposal."""
        run_alone(drafter.feed(state, tokens))
        start = drafter.held_features(state)
        lacking = torch.arange(start, len(tokens) - 1, dtype=torch.float32).reshape(-1, 1, 1)
        drafter.take_features(state, start, lacking)
        return propose(drafter, state, tokens, 4)

    def test_they_reach_the_other_in_every_round(self) -> None:
        drafter = hybrid_of(FeatureLookup(), 3)
        state, tokens = drafter.open(), list(MATCHED)
        assert drafter.info.features.layers == [1]
        for length in (10, 12, 14):
            assert len(tokens) == length
            tokens += self.round(drafter, state, tokens).token_ids[:2]
            assert drafter.held_features(state) == length - 1
        tokens = [*tokens, 50]
        assert self.round(drafter, state, tokens).token_ids == (90 + 16,)
        assert state.other.features == list(range(16))
        tokens = [*tokens[:12], 51]
        assert self.round(drafter, state, tokens).token_ids == (90 + 12,)


class TestSpec:
    def test_the_rest_of_the_text_is_the_other_drafter(self, directory: Path) -> None:
        text = f"hybrid,min_match=5,reach=4,name=both,drafter=layer_skip={directory},skip=1+2"
        spec = DrafterSpec.parse(text)
        other = DrafterSpec("layer_skip", str(directory), "layer_skip", {"skip": [1, 2]})
        assert spec == DrafterSpec("hybrid", "", "both", {"min_match": 5, "reach": 4, "drafter": other})
        loading = Loading("float32", "cpu", kv_memory_bytes=2**20)
        drafter = build_drafter(spec, loading)
        assert (drafter.info.name, drafter.info.kind) == ("both", "hybrid")
        assert drafter.info.model == build_drafter(other, loading).info.model

    @pytest.mark.parametrize(
        ("text", "wrong", "expected"),
        [
            ("hybrid=x,drafter=lookup", "", "hybrid without a checkpoint"),
            ("hybrid,drafter=guess", "guess", "one of the known drafters: "),
            ("hybrid,drafter=model", "model", "model=CHECKPOINT"),
            (
                "hybrid,drafter=lookup,min_match=3",
                "lookup,min_match=3",
                "lookup with options of: name, max_ngram",
            ),
            ("hybrid,min_match=0,drafter=lookup", "", "min_match to be a whole number, at least 1"),
            ("lookup,drafter=lookup", "", "lookup with options of: name, max_ngram, min_ngram"),
        ],
    )
    def test_wrong_ones_are_named(self, text: str, wrong: str, expected: str) -> None:
        with pytest.raises(ConfigError) as caught:
            DrafterSpec.parse(text)
        assert str(caught.value).startswith(f"drafters has {wrong or text!r}, expected {expected}")

    def test_without_another_drafter(self) -> None:
        with pytest.raises(ConfigError, match="hybrid has no drafter, expected hybrid,drafter=KIND"):
            build_drafter(DrafterSpec.parse("hybrid"), Loading("float32", "cpu"))
