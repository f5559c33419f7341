"""EAGLE drafts on assumed tokens, whose target features haven't come."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from draft_worker.drafters.eagle import EagleDrafter
from draft_worker.drawing import DraftCounterNoise
from draft_worker.eagle.loading import load_eagle
from draft_worker.eagle.network import EagleConfig, EagleNetwork
from draft_worker.eagle.state import EagleState
from draft_worker.eagle.trees import Growth, chain, dynamic_tree, fixed_tree
from splitspec.engine.scheduler import run_alone
from splitspec.types import Drawing, Rule, Sampling
from splitspec.wire import Draft
from tests.draft_worker import eagles
from tests.drawings import drawing_of
from tests.engine import tiny

GREEDY = drawing_of(Sampling(temperature=0.0))
SHARED = drawing_of(Sampling(seed=7), Rule.SHARED_NOISE)
TREES: dict[str, Callable[..., Growth]] = {
    "chain": chain,
    "static": functools.partial(fixed_tree, depth=3, width=3),
    "dynamic": functools.partial(dynamic_tree, depth=3, width=3),
}
K = 5
TOKENS = tiny.text(13)

Guesses = list[list[tuple[int, EagleState]]]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.checkpoint(tmp_path_factory.mktemp("target"), tiny.CONFIGS["llama"])


@pytest.fixture(scope="module")
def directory(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagles.checkpoint(tmp_path_factory.mktemp("eagle") / "draft", target)


@pytest.fixture(scope="module")
def dense(directory: Path, target: Path) -> eagles.Dense:
    network = EagleNetwork.load(directory, EagleConfig.load(directory)).float().requires_grad_(False)
    return eagles.Dense(network, eagles.embedding(target))


@pytest.fixture(scope="module", params=TREES)
def drafter(request: pytest.FixtureRequest, directory: Path, target: Path) -> EagleDrafter:
    model, vocabulary = load_eagle(
        directory, "draft", target, "tiny", dtype="float32", device="cpu", block_size=4
    )
    return EagleDrafter(model, vocabulary, "eagle", TREES[request.param])


@pytest.fixture
def state(drafter: EagleDrafter, request: pytest.FixtureRequest) -> Iterator[EagleState]:
    """Of a tenant of its own, which finds nothing that others have left."""
    state = drafter.open(request.node.name)
    yield state
    drafter.free(state)


def propose(
    drafter: EagleDrafter, state: EagleState, tokens: Sequence[int], drawing: Drawing = GREEDY
) -> Draft:
    """With whatever features it has."""
    return run_alone(drafter.propose(state, tokens, K, drawing, DraftCounterNoise(7, len(tokens))))


def bring(drafter: EagleDrafter, state: EagleState, tokens: Sequence[int]) -> None:
    """The features of all tokens but the last, as a Propose brings those that lack."""
    run_alone(drafter.feed(state, tokens))
    start = drafter.held_features(state)
    drafter.take_features(state, start, eagles.features(tokens)[start : len(tokens) - 1])


def guess(
    drafter: EagleDrafter,
    state: EagleState,
    tokens: Sequence[int],
    draft: Draft,
    drawing: Drawing = GREEDY,
    count: int = 2,
) -> Guesses:
    """`count` next tokens at each place."""
    counts = [count] * len(draft.paths)
    noise = DraftCounterNoise(7, len(tokens))
    return run_alone(drafter.guess(state, tokens, draft, drawing, noise, counts))


def grown(draft: Draft, guesses: Guesses) -> list[tuple[list[int], EagleState]]:
    """What is assumed behind the text, with its state."""
    return [
        ([*path, token], state)
        for path, after in zip(draft.paths, guesses, strict=True)
        for token, state in after
    ]


def likeliest(
    dense: eagles.Dense, tokens: Sequence[int], num_featured: int, text: Sequence[int]
) -> list[int]:
    """Ids behind a text, the likeliest first, when the target's features are those of its first
    `num_featured` tokens.
    """
    known = eagles.features(tokens)[:num_featured]
    logits = dense.after(text[: num_featured + 1], known, text[num_featured + 1 :])
    return [eagles.IDS[index] for index in logits.argsort(descending=True).tolist()]


def assert_surest(
    dense: eagles.Dense, drafter: EagleDrafter, num_featured: int, text: Sequence[int], draft: Draft
) -> None:
    """Each draft token is among the likeliest behind its path, where features are known up to a token."""
    assert len(draft.token_ids) == K
    for path, nodes in zip(draft.paths, draft.children, strict=True):
        found = [draft.token_ids[node] for node in nodes]
        assert found == likeliest(dense, text, num_featured, [*text, *path])[: len(found)]


class TestAssumed:
    def test_the_likeliest_next_tokens(
        self, drafter: EagleDrafter, dense: eagles.Dense, state: EagleState
    ) -> None:
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS)
        for path, nodes, after in zip(
            draft.paths, draft.children, guess(drafter, state, TOKENS, draft), strict=True
        ):
            drafted = [draft.token_ids[node] for node in nodes]
            ranked = likeliest(dense, TOKENS, len(TOKENS) - 1, [*TOKENS, *path])
            assert [token for token, _ in after] == [t for t in ranked if t not in drafted][:2]

    def test_under_shared_noise_they_are_the_races_runners_up(
        self, drafter: EagleDrafter, dense: eagles.Dense, state: EagleState
    ) -> None:
        """Of the race that the target runs at the same position, on the same noise."""
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS, SHARED)
        features = eagles.features(TOKENS)[:-1]
        for path, nodes, after in zip(
            draft.paths, draft.children, guess(drafter, state, TOKENS, draft, SHARED), strict=True
        ):
            delays = DraftCounterNoise(7, 1).delays(len(TOKENS) + len(path), tiny.VOCABULARY)[eagles.IDS]
            weights = dense.after(TOKENS, features, path).double().softmax(0) / torch.from_numpy(delays)
            ranked = [eagles.IDS[index] for index in weights.argsort(descending=True).tolist()]
            drafted = [draft.token_ids[node] for node in nodes]
            assert [token for token, _ in after] == [t for t in ranked if t not in drafted][:2]

    def test_a_branch_reads_the_networks_own_outputs(
        self, drafter: EagleDrafter, dense: eagles.Dense, state: EagleState
    ) -> None:
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS)
        branches = grown(draft, guess(drafter, state, TOKENS, draft))
        assert len(branches) == 2 * (K + 1)
        for growth, branch in branches:
            text = [*TOKENS, *growth]
            assert_surest(dense, drafter, len(TOKENS) - 1, text, propose(drafter, branch, text))

    def test_features_that_come_later_correct_what_follows(
        self, drafter: EagleDrafter, dense: eagles.Dense, state: EagleState
    ) -> None:
        """A branch that came true: what is prepared behind it reads them, and so does a fresh proposal."""
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS)
        for growth, branch in grown(draft, guess(drafter, state, TOKENS, draft, count=1)):
            text = [*TOKENS, *growth]
            prepared = propose(drafter, branch, text)
            assert drafter.held_features(branch) == len(TOKENS) - 1
            bring(drafter, branch, text)
            assert drafter.held_features(branch) == len(text) - 1
            for more, behind in grown(prepared, guess(drafter, branch, text, prepared, count=1)):
                longer = [*text, *more]
                assert_surest(dense, drafter, len(text) - 1, longer, propose(drafter, behind, longer))
            fresh = [*text, *prepared.token_ids[:1], 96]
            bring(drafter, branch, fresh)
            assert_surest(dense, drafter, len(fresh) - 1, fresh, propose(drafter, branch, fresh))

    def test_without_features_it_goes_on_ahead_of_itself(
        self, drafter: EagleDrafter, dense: eagles.Dense, state: EagleState
    ) -> None:
        """A target that brings none for some rounds: each branch goes on from the one before."""
        bring(drafter, state, TOKENS)
        text, at = list(TOKENS), state
        for _ in range(3):
            draft = propose(drafter, at, text)
            assert_surest(dense, drafter, len(TOKENS) - 1, text, draft)
            growth, at = grown(draft, guess(drafter, at, text, draft, count=1))[-1]
            text += growth

    def test_a_text_that_nothing_leads_to(self, drafter: EagleDrafter, state: EagleState) -> None:
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS)
        (*_, (growth, branch)) = grown(draft, guess(drafter, state, TOKENS, draft))
        assert propose(drafter, branch, [*TOKENS, *growth, 5]).token_ids == ()
        assert propose(drafter, branch, [*TOKENS, 96, 95]).token_ids == ()
        assert propose(drafter, branch, [*TOKENS, *growth]).token_ids != ()


class TestForks:
    def test_what_is_drafted_on_one_changes_no_bit_of_the_others(
        self, drafter: EagleDrafter, state: EagleState
    ) -> None:
        fresh = [*TOKENS, 96]

        def begin(name: str) -> tuple[EagleState, list[tuple[list[int], EagleState]]]:
            begun = drafter.open(f"{state.tenant} {name}")
            bring(drafter, begun, TOKENS)
            draft = propose(drafter, begun, TOKENS, SHARED)
            branches = grown(draft, guess(drafter, begun, TOKENS, draft, SHARED))
            return begun, sorted(branches, key=lambda branch: len(branch[0]))

        def go_on(begun: EagleState, text: list[int]) -> list[object]:
            """On an assumed text and what follows it, then on a committed one."""
            draft = propose(drafter, begun, text, SHARED)
            following = [growth for growth, _ in grown(draft, guess(drafter, begun, text, draft, SHARED))]
            bring(drafter, begun, fresh)
            return [draft, following, propose(drafter, begun, fresh, SHARED)]

        _, (*_, (growth, branch)) = begin("the branch alone")
        text = [*TOKENS, *growth]
        alone = propose(drafter, branch, text, SHARED)
        origin_alone = go_on(begin("what it is forked from alone")[0], text)

        begun, (*others, (_, branch)) = begin("together")
        for other, at in others:
            propose(drafter, at, [*TOKENS, *other], SHARED)
            bring(drafter, at, [*TOKENS, *other])
            propose(drafter, at, [*TOKENS, *other], SHARED)
        assert propose(drafter, branch, text, SHARED) == alone
        assert go_on(begun, text) == origin_alone

    def test_others_share_nothing_that_was_fed_without_features(
        self, drafter: EagleDrafter, state: EagleState
    ) -> None:
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS)
        growth, branch = max(grown(draft, guess(drafter, state, TOKENS, draft)), key=lambda b: len(b[0]))
        text = [*TOKENS, *growth, 5, 6, 7, 8]
        prepared = propose(drafter, branch, [*TOKENS, *growth])
        guess(drafter, branch, [*TOKENS, *growth], prepared)
        other = drafter.open(state.tenant)
        assert run_alone(drafter.feed(other, text)) == 12
        bring(drafter, branch, text)
        propose(drafter, branch, text)
        assert run_alone(drafter.feed(drafter.open(state.tenant), text)) == (len(text) - 2) // 4 * 4

    def test_blocks_go_back_with_the_last_that_refers_to_them(self, drafter: EagleDrafter) -> None:
        (pool,) = drafter.pools
        used, state = pool.num_used, drafter.open("blocks")
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS)
        branches = grown(draft, guess(drafter, state, TOKENS, draft))
        for growth, branch in branches:
            propose(drafter, branch, [*TOKENS, *growth])
        growth, kept = branches[3]
        assert pool.num_used > used + len(branches)
        del branches, branch, state
        assert propose(drafter, kept, [*TOKENS, *growth]).token_ids
        drafter.rest(kept)
        assert pool.num_used == used + 3  # those of twelve rows with features
        drafter.free(kept)
        assert pool.num_used == used

    @pytest.mark.parametrize("num_passes", range(3))
    def test_guesses_that_are_left_lose_no_features(
        self, drafter: EagleDrafter, state: EagleState, num_passes: int
    ) -> None:
        """A verdict comes while they are made: the next proposal on the same state is as ever."""
        bring(drafter, state, TOKENS)
        draft = propose(drafter, state, TOKENS)
        growth, branch = grown(draft, guess(drafter, state, TOKENS, draft))[-1]
        text = [*TOKENS, *growth]
        prepared = propose(drafter, branch, text)
        bring(drafter, branch, text)
        noise = DraftCounterNoise(7, len(text))
        steps = drafter.guess(branch, text, prepared, GREEDY, noise, [1] * len(prepared.paths))
        wanted = next(steps)
        for _ in range(num_passes):
            (answer,) = wanted.model.forward_batch([wanted.feed])
            wanted = steps.send(answer)
        steps.close()
        assert drafter.held_features(branch) == len(text) - 1
        fresh = drafter.open(f"{state.tenant} fresh")
        bring(drafter, branch, [*text, 9])
        bring(drafter, fresh, [*text, 9])
        eagles.assert_same_proposal(propose(drafter, branch, [*text, 9]), propose(drafter, fresh, [*text, 9]))
