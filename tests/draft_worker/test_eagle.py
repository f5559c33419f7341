"""The EAGLE drafter: paged rows are the plain network's, and state follows what was committed."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.drafters.eagle import EagleDrafter
from draft_worker.drawing import DraftCounterNoise
from draft_worker.eagle.loading import load_eagle
from draft_worker.eagle.model import EagleFeed, EagleLM
from draft_worker.eagle.network import EagleConfig, EagleNetwork
from draft_worker.eagle.state import EagleState
from draft_worker.eagle.trees import Growth, Round, chain, dynamic_tree, fixed_tree
from draft_worker.eagle.vocabulary import DraftVocabulary
from splitspec.engine.feed import Feed
from splitspec.engine.scheduler import run_alone
from splitspec.errors import ConfigError, HandshakeError, InvalidRequestError, OutOfSyncError
from splitspec.sampling.rows import ProcessedRows
from splitspec.tokens import TokenLog
from splitspec.types import Rule, Sampling
from splitspec.wire import Draft
from tests.draft_worker import eagles
from tests.drawings import drawing_of
from tests.engine import tiny

GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.95, seed=7)
#: Of logits of some tens: float32 sums in another order.
CLOSE = 1e-3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("target"), tiny.CONFIGS["llama"])


@pytest.fixture(scope="module")
def directory(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagles.checkpoint(tmp_path_factory.mktemp("eagle") / "draft", target)


def load(directory: Path, target: Path, dtype: str = "float32") -> tuple[EagleLM, DraftVocabulary]:
    return load_eagle(directory, "draft", target, "tiny", dtype=dtype, device="cpu", block_size=4)


@pytest.fixture(scope="module")
def loaded(directory: Path, target: Path) -> tuple[EagleLM, DraftVocabulary]:
    return load(directory, target)


@pytest.fixture(scope="module")
def dense(directory: Path, target: Path) -> eagles.Dense:
    network = EagleNetwork.load(directory, EagleConfig.load(directory)).float().requires_grad_(False)
    return eagles.Dense(network, eagles.embedding(target))


@pytest.fixture
def drafter(loaded: tuple[EagleLM, DraftVocabulary]) -> EagleDrafter:
    return EagleDrafter(*loaded, "eagle", chain)


def propose(
    drafter: EagleDrafter,
    state: EagleState,
    tokens: Sequence[int],
    count: int,
    sampling: Sampling = GREEDY,
    rule: Rule = Rule.BLOCK,
    *,
    features: Sequence[int] | None = None,
) -> Draft:
    """With the features that lack, of `features` instead of the tokens."""
    known = tokens if features is None else features
    start = drafter.held_features(state)
    drafter.take_features(state, start, eagles.features(known)[start : len(known) - 1])
    noise = DraftCounterNoise(7, len(tokens))
    return run_alone(drafter.propose(state, tokens, count, drawing_of(sampling, rule), noise))


class TestRows:
    def test_a_chain_equals_the_plain_network(self, drafter: EagleDrafter, dense: eagles.Dense) -> None:
        tokens = tiny.text(11)
        draft = propose(drafter, drafter.open(), tokens, 5)
        assert len(draft.token_ids) == 5
        features = eagles.features(tokens)[:-1]
        for depth, token in enumerate(draft.token_ids):
            logits = dense.after(tokens, features, draft.token_ids[:depth])
            assert eagles.IDS[int(logits.argmax())] == token

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_logits_of_every_row(
        self, directory: Path, target: Path, dense: eagles.Dense, dtype: str
    ) -> None:
        """Committed ones in pieces, then a tree level by level, another session beside it."""
        model, vocabulary = load(directory, target, dtype)
        tokens, features = tiny.text(14), eagles.features(tiny.text(14))[:-1]
        kv, beside = model.new_kv("", tokens[0]), model.new_kv("", 5)
        other = eagles.features(tiny.text(9))
        found = []
        for start, stop in ((0, 1), (1, 7), (7, 13)):
            feed = EagleFeed(kv, tokens[start + 1 : stop + 1], stop - start, features=features[start:stop])
            more = EagleFeed(beside, tiny.text(3), 1, features=other[:3])
            found.append(model.forward_batch([more, feed])[1])
        expected = dense.rows(tokens, dense.network.fused(features))[1]
        close = CLOSE if dtype == "float32" else 0.1 * float(expected.abs().max())
        torch.testing.assert_close(torch.cat(found), expected, atol=close, rtol=CLOSE)

        paths = {
            (3,): [12],
            (8,): [12],
            (3, 1): [12, 13],
            (8, 4): [12, 14],
            (8, 1): [12, 14],
            (8, 4, 7): [12, 14, 16],
        }
        for level in (1, 2, 3):
            here = [path for path in paths if len(path) == level]
            feed = EagleFeed(
                kv,
                vocabulary.to_target([path[-1] for path in here]),
                len(here),
                paths=[paths[path] for path in here],
            )
            (rows,) = model.forward_batch([feed])
            for row, path in zip(rows, here, strict=True):
                torch.testing.assert_close(
                    row, dense.after(tokens, features, vocabulary.to_target(path)), atol=close, rtol=CLOSE
                )

    def test_in_lock_step_equals_one_by_one(
        self, drafter: EagleDrafter, loaded: tuple[EagleLM, DraftVocabulary]
    ) -> None:
        texts = [tiny.text(length, seed=length) for length in (2, 5, 9, 17, 30)]
        alone = [propose(drafter, drafter.open(), text, 4, SAMPLED) for text in texts]
        states = [drafter.open() for _ in texts]
        jobs = []
        for state, text in zip(states, texts, strict=True):
            drafter.take_features(state, 0, eagles.features(text)[:-1])
            noise = DraftCounterNoise(7, len(text))
            jobs.append(drafter.propose(state, text, 4, drawing_of(SAMPLED), noise))
        for actual, expected in zip(eagles.run_together(jobs), alone, strict=True):
            eagles.assert_same_proposal(actual, expected)

    def test_feeds_that_make_no_sense(self, loaded: tuple[EagleLM, DraftVocabulary]) -> None:
        model, _ = loaded
        kv = model.new_kv("", 1)
        features = eagles.features(tiny.text(4))
        with pytest.raises(ValueError, match="expected a feature or a path for each"):
            model.forward_batch([EagleFeed(kv, [1, 2], 1, features=features[:1])])
        with pytest.raises(ValueError, match="beyond the context"):
            model.forward_batch([EagleFeed(kv, [1], 1, paths=[[tiny.CONTEXT - 1]])])
        with pytest.raises(ValueError, match="expected feeds of an EAGLE draft"):
            model.forward_batch([Feed(kv, [1], 1)])
        with pytest.raises(ValueError, match="token id 97 is outside the vocabulary"):
            model.forward_batch([EagleFeed(kv, [97], 1, features=features[:1])])
        assert kv.length == 0


class TestState:
    @pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_after_every_number_accepted(self, drafter: EagleDrafter, sampling: Sampling) -> None:
        """Draft rows go, and what was accepted is fed with the target's features."""
        for accepted in range(5):
            tokens, state = TokenLog(tiny.text(9)), drafter.open()
            for _ in range(2):
                draft = propose(drafter, state, tokens, 4, sampling)
                assert len(draft.token_ids) == 4
                assert drafter.held_tokens(state) == drafter.held_features(state) == len(tokens) - 1
                tokens.extend([*draft.token_ids[:accepted], 96])
            last = propose(drafter, state, tokens, 4, sampling)
            eagles.assert_same_proposal(last, propose(drafter, drafter.open(), tokens, 4, sampling))

    def test_the_same_tokens_again(self, drafter: EagleDrafter) -> None:
        state, tokens = drafter.open(), tiny.text(9)
        first = propose(drafter, state, tokens, 4)
        assert propose(drafter, state, tokens, 4) == first

    def test_without_all_features_nothing_is_proposed(self, drafter: EagleDrafter) -> None:
        state, tokens = drafter.open(), tiny.text(9, seed=4)
        for known, expected in ((1, 0), (4, 3), (8, 7), (9, 8)):
            draft = propose(drafter, state, tokens, 3, features=tokens[:known])
            assert drafter.held_features(state) == expected
            assert len(draft.token_ids) == (3 if expected == 8 else 0)
        assert draft == propose(drafter, drafter.open(), tokens, 3)

    def test_features_that_are_held_are_left_out_and_a_gap_is_refused(self, drafter: EagleDrafter) -> None:
        state, tokens = drafter.open(), tiny.text(9)
        features = eagles.features(tokens)
        drafter.take_features(state, 0, features[:4])
        drafter.take_features(state, 2, features[2:6])
        assert drafter.held_features(state) == 6
        with pytest.raises(
            OutOfSyncError, match="features start at token 7, but the drafter holds those of 6"
        ):
            drafter.take_features(state, 7, features[7:])
        with pytest.raises(InvalidRequestError, match=r"shape is \[2, 2, 31\], expected a hidden size of 32"):
            drafter.take_features(state, 6, features[6:8, :, :31])
        drafter.take_features(state, 3, features[3:8])
        draft = propose(drafter, state, tokens, 3)
        assert draft == propose(drafter, drafter.open(), tokens, 3)

    @pytest.mark.parametrize("cut", [0, 1, 2, 5, 8, 9])
    def test_after_a_cut(self, drafter: EagleDrafter, cut: int) -> None:
        """As at the next turn of a conversation: a text that ends earlier, and goes on in another way."""
        state, tokens = drafter.open(), tiny.text(9)
        propose(drafter, state, tokens, 4)
        for changed in (tokens[:cut], [*tokens[:cut], 5, 6, 7]):
            run_alone(drafter.feed(state, changed))
            assert drafter.held_features(state) < max(1, len(changed))
            again = propose(drafter, state, changed, 4)
            eagles.assert_same_proposal(again, propose(drafter, drafter.open(), changed, 4))

    @pytest.mark.parametrize("cut", [None, 3, 10, 12, 15])
    def test_features_wait_over_rounds_that_others_propose_in(
        self, drafter: EagleDrafter, cut: int | None
    ) -> None:
        """As in a hybrid: each round feeds and brings features; a cut drops those behind it alone."""
        text = tiny.text(20)
        state = drafter.open()
        propose(drafter, state, text[:9], 3)
        for length in (11, 16):
            run_alone(drafter.feed(state, text[:length]))
            start = drafter.held_features(state)
            drafter.take_features(state, start, eagles.features(text)[start : length - 1])
            assert drafter.held_features(state) == length - 1
        tokens = text if cut is None else [*text[:cut], 5, 6, 7]
        run_alone(drafter.feed(state, tokens))
        held = drafter.held_features(state)
        assert held == 15 if cut is None else cut - 1 <= held <= cut
        again = propose(drafter, state, tokens, 3)
        assert again == propose(drafter, drafter.open(), tokens, 3)

    @pytest.mark.parametrize("num_passes", range(4))
    def test_a_job_that_is_left_loses_nothing(self, drafter: EagleDrafter, num_passes: int) -> None:
        """Between two passes, or with a pass that ran and whose answer it never got: features still wait."""
        expected = propose(drafter, drafter.open(), tiny.text(9), 4)
        for answered in (True, False):
            state, tokens = drafter.open("another"), tiny.text(9)
            drafter.take_features(state, 0, eagles.features(tokens)[:8])
            steps = drafter.propose(state, tokens, 4, drawing_of(GREEDY), DraftCounterNoise(7, 1))
            wanted = next(steps)
            for _ in range(num_passes):
                (answer,) = wanted.model.forward_batch([wanted.feed])
                wanted = steps.send(answer)
            if not answered:
                wanted.model.forward_batch([wanted.feed])
            steps.close()
            assert drafter.held_features(state) == 8
            eagles.assert_same_proposal(propose(drafter, state, tokens, 4), expected)

    def test_a_text_that_another_session_has_had(self, drafter: EagleDrafter) -> None:
        """Its full blocks are shared within a tenant, and their features needn't come again."""
        tokens = tiny.text(23, seed=9)
        first = propose(drafter, drafter.open("a"), tokens, 4)
        held = {}
        for tenant, text in (("a", tokens), ("b", tokens), ("a", [(tokens[0] + 1) % 97, *tokens[1:]])):
            state = drafter.open(tenant)
            held[tenant, text[0]] = run_alone(drafter.feed(state, text))
            assert drafter.held_features(state) == held[tenant, text[0]]
            if text == tokens:
                eagles.assert_same_proposal(propose(drafter, state, text, 4), first)
        assert list(held.values()) == [20, 0, 0]

    def test_where_the_context_ends(self, drafter: EagleDrafter) -> None:
        state = drafter.open()
        for length in range(tiny.CONTEXT - 5, tiny.CONTEXT + 2):
            draft = propose(drafter, state, tiny.text(tiny.CONTEXT + 2)[:length], 4)
            assert len(draft.token_ids) == max(0, min(4, tiny.CONTEXT - length))
        assert drafter.held_tokens(state) == 0

    def test_blocks_go_back(self, loaded: tuple[EagleLM, DraftVocabulary], drafter: EagleDrafter) -> None:
        model, _ = loaded
        used = model.pool.num_used
        state = drafter.open()
        propose(drafter, state, tiny.text(30), 4)
        assert drafter.held_bytes(state) > 0
        assert model.pool.num_used > used
        drafter.free(state)
        assert model.pool.num_used == used

    def test_what_rested_may_be_gone(self, drafter: EagleDrafter) -> None:
        state, tokens = drafter.open(), tiny.text(9)
        first = propose(drafter, state, tokens, 4)
        drafter.rest(state)
        state.kv.truncate(0)
        assert run_alone(drafter.feed(state, tokens)) == 4
        eagles.assert_same_proposal(propose(drafter, state, tokens, 4), first)


class TestDraw:
    @pytest.mark.parametrize(
        "sampling",
        [
            Sampling(),
            Sampling(temperature=0.7, top_k=5, top_p=0.9),
            Sampling(repetition_penalty=1.5, presence_penalty=1.0, frequency_penalty=0.5),
            Sampling(logit_bias={4: 3.0, 6: 50.0, 8: -5.0}, banned_token_ids=frozenset({1, 2, 3})),
            Sampling(allowed_token_ids=frozenset({3, 4, 5, 10})),
        ],
        ids=lambda sampling: str(sampling)[:40],
    )
    def test_q_is_the_whole_vocabularys_with_nothing_outside(
        self, drafter: EagleDrafter, dense: eagles.Dense, sampling: Sampling
    ) -> None:
        """Processed as the target would process logits that are -inf for all that the draft can't say."""
        tokens = tiny.text(12)
        draft = propose(drafter, drafter.open(), tokens, 3, sampling)
        for depth, q in enumerate(draft.distributions):
            path = draft.token_ids[:depth]
            logits = torch.full((1, tiny.VOCABULARY), -torch.inf)
            logits[0, eagles.IDS] = dense.after(tokens, eagles.features(tokens)[:-1], path)
            expected = ProcessedRows(logits, drawing_of(sampling), tokens, [path]).probabilities(0)
            assert q is not None
            for token in range(tiny.VOCABULARY):
                found = q.probability(token) if token in q.ids else 0.0
                assert found == pytest.approx(float(expected[token]), abs=2e-3)

    def test_shared_noise_sends_the_winner_of_the_target_ids_race(
        self, drafter: EagleDrafter, dense: eagles.Dense
    ) -> None:
        tokens, sampling = tiny.text(12), dataclasses.replace(SAMPLED, top_p=1.0)
        draft = propose(drafter, drafter.open(), tokens, 4, sampling, Rule.SHARED_NOISE)
        assert draft.distributions == (None,) * 4
        for depth, token in enumerate(draft.token_ids):
            path = draft.token_ids[:depth]
            logits = torch.full((1, tiny.VOCABULARY), -torch.inf)
            logits[0, eagles.IDS] = dense.after(tokens, eagles.features(tokens)[:-1], path)
            drawing = drawing_of(sampling, Rule.SHARED_NOISE)
            q = ProcessedRows(logits, drawing, tokens, [path]).probabilities(0)
            assert DraftCounterNoise(7, 1).race(12 + depth, q) == token


class TestTrees:
    @pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.SHARED_NOISE, Rule.BLOCK])
    @pytest.mark.parametrize("growth", [fixed_tree, dynamic_tree])
    def test_a_tree_on_paged_rows_is_that_on_plain_ones(
        self,
        loaded: tuple[EagleLM, DraftVocabulary],
        dense: eagles.Dense,
        growth: Callable[..., Growth],
        rule: Rule,
    ) -> None:
        """Twice in a row: after the first, its path is committed and fed with the target's features."""
        sampling = GREEDY if rule is Rule.GREEDY else SAMPLED
        drawing, (model, vocabulary) = drawing_of(sampling, rule), loaded
        drafter = EagleDrafter(model, vocabulary, "eagle", functools.partial(growth, depth=4, width=3))
        state, tokens = drafter.open(), tiny.text(13)
        for _ in range(2):
            draft = propose(drafter, state, tokens, 10, sampling, rule)
            round_ = Round(rule, len(tokens), vocabulary.noise(DraftCounterNoise(7, len(tokens))))
            growing = growth(round_, 10, depth=4, width=3)
            paths = next(growing)
            try:
                while True:
                    rows = [
                        dense.after(tokens, eagles.features(tokens)[:-1], vocabulary.to_target(path))
                        for path in paths
                    ]
                    warm = drawing_of(Sampling()) if rule is Rule.GREEDY else drawing
                    paths = growing.send(ProcessedRows(torch.stack(rows), warm, tokens, paths))
            except StopIteration as end:
                eagles.assert_same_proposal(draft, vocabulary.draft(end.value))
            assert len(draft.token_ids) == 10
            assert drafter.held_tokens(state) == len(tokens) - 1
            tokens = [*tokens, *max(draft.paths, key=len), 11]


class TestLoading:
    def test_what_it_says_it_is(self, directory: Path, target: Path) -> None:
        built = build_drafter(
            DrafterSpec.parse(f"eagle={directory},tree=dynamic"), Loading("bfloat16", "cpu")
        )
        info = built.info
        assert (info.name, info.kind) == ("eagle", "eagle")
        assert list(info.features.layers) == list(eagles.LAYERS)
        assert info.features.dtype == "bfloat16"
        assert (info.model.vocabulary_size, info.model.max_context) == (tiny.VOCABULARY, tiny.CONTEXT)

    def test_another_targets_draft_is_refused(self, directory: Path, tmp_path: Path) -> None:
        other = tiny.checkpoint(tmp_path / "other", tiny.CONFIGS["llama"], seed=1)
        with pytest.raises(HandshakeError, match="with the weights hash"):
            load(directory, other)
        smaller = tiny.checkpoint(tmp_path / "smaller", tiny.CONFIGS["llama"], vocabulary=90)
        with pytest.raises(HandshakeError, match="with the vocabulary hash"):
            load(directory, smaller)

    @pytest.mark.parametrize(
        ("change", "expected"),
        [
            (lambda tensors: tensors.pop("fuse.weight"), r"Missing key.*fuse\.weight"),
            (lambda tensors: tensors.update({"fuse.bias": torch.ones(32)}), r"Unexpected key.*fuse\.bias"),
            (lambda tensors: tensors["head.weight"][1, 2:3].fill_(torch.nan), r"finite.*: head\.weight"),
            (lambda tensors: tensors.update(fuse=tensors.pop("fuse.weight")), r"Missing key.*fuse\.weight"),
        ],
    )
    def test_weights_that_are_not_its_own_are_refused(
        self, directory: Path, target: Path, tmp_path: Path, change: Any, expected: str
    ) -> None:
        other = tmp_path / "draft"
        shutil.copytree(directory, other)
        tensors = load_file(other / "model.safetensors")
        change(tensors)
        save_file(tensors, other / "model.safetensors")
        with pytest.raises(ConfigError, match=expected):
            load(other, target)

    def test_broken_ones_are_refused(self, directory: Path, target: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"config\.json of an EAGLE draft"):
            load(tmp_path, target)
        config = EagleConfig.load(directory)
        unsorted = tmp_path / "unsorted"
        unsorted.mkdir()
        eagles.network(config, eagles.IDS[::-1]).save(unsorted)
        with pytest.raises(ConfigError, match="rising ids below 97"):
            load(unsorted, target)
        with pytest.raises(ConfigError, match="tree to be one of chain, static, dynamic, best"):
            DrafterSpec.parse("eagle=x,tree=round")
