"""Proposals to bytes and back; what is broken becomes one-hot and is counted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError
from splitspec.types import DRAFT_SUPPORT, MAX_NUM_DRAFT_TOKENS
from splitspec.wire import Draft, SparseDistribution

SEAL = 0xFEDCBA9876543210
VOCABULARY_SIZE = 151_936


def distribution(ids: list[int], weights: list[int]) -> SparseDistribution:
    return SparseDistribution(np.array(ids, dtype=np.uint32), np.array(weights, dtype=np.uint16))


def decode(body: bytes, seal: int = SEAL) -> tuple[Draft, int]:
    return Draft.decode(body, seal, VOCABULARY_SIZE)


def body_of(
    tokens: list[int],
    rows: list[common_pb2.DraftDistribution],
    seal: int = SEAL,
    parents: list[int] | None = None,
) -> bytes:
    return common_pb2.ProposalBody(
        token_ids=tokens, distributions=rows, seal=seal, parents=parents or []
    ).SerializeToString()


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    tokens = draw(st.lists(st.integers(0, VOCABULARY_SIZE - 1), max_size=MAX_NUM_DRAFT_TOKENS))
    rows: list[SparseDistribution | None] = []
    for token in tokens:
        others = draw(st.sets(st.integers(0, VOCABULARY_SIZE - 1), max_size=5)) - {token}
        ids = draw(st.permutations([token, *others]))
        weights = draw(st.lists(st.integers(1, 65535), min_size=len(ids), max_size=len(ids)))
        rows.append(draw(st.sampled_from([None, distribution(list(ids), weights)])))
    return Draft(tuple(tokens), tuple(rows))


@settings(deadline=None)
@given(drafts(), st.integers(0, 2**64 - 1))
def test_round_trip(draft: Draft, seal: int) -> None:
    assert decode(draft.encode(seal), seal) == (draft, 0)


def test_certain_tokens_send_only_ids() -> None:
    draft = Draft.certain([3, 0, 151_935])
    body = draft.encode(SEAL)
    assert not common_pb2.ProposalBody.FromString(body).distributions
    # No distribution was meant, so none is missed, whatever the seal.
    assert decode(body) == decode(body, seal=1) == (draft, 0)


def test_a_row_of_64_takes_about_390_bytes() -> None:
    generator = np.random.default_rng(1)
    rows = []
    for _ in range(MAX_NUM_DRAFT_TOKENS):
        ids = generator.choice(VOCABULARY_SIZE, DRAFT_SUPPORT, replace=False)
        rows.append(SparseDistribution.quantised(ids, generator.dirichlet(np.ones(DRAFT_SUPPORT))))
    draft = Draft(tuple(int(row.ids[0]) for row in rows), tuple(rows))
    per_token = len(draft.encode(SEAL)) / MAX_NUM_DRAFT_TOKENS
    assert 6 * DRAFT_SUPPORT < per_token < 420


def row(ids: list[int], weights: list[int]) -> common_pb2.DraftDistribution:
    return distribution(ids, weights).to_proto()


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(row([4, 6], [1, 1]), id="without the drawn token"),
        pytest.param(row([5, 6], [0, 1]), id="weight 0 of the drawn token"),
        pytest.param(row([5, 6], [1, 0]), id="weight 0 of another token"),
        pytest.param(row([5, 6, 6], [1, 1, 1]), id="token twice"),
        pytest.param(row([5, 5], [1, 1]), id="drawn token twice"),
        pytest.param(row([5, VOCABULARY_SIZE], [1, 1]), id="outside the vocabulary"),
        pytest.param(row([5, 6], [1]), id="too few weights"),
        pytest.param(row([5, 6], [1, 1, 1]), id="too many weights"),
        pytest.param(row([], [1]), id="weights without ids"),
        pytest.param(row([5], []), id="ids without weights"),
        pytest.param(
            common_pb2.DraftDistribution(token_ids=b"\5\0\0\0\6", weights=b"\1\0"), id="part of an id"
        ),
        pytest.param(
            common_pb2.DraftDistribution(token_ids=b"\5\0\0\0", weights=b"\1"), id="part of a weight"
        ),
    ],
)
def test_a_broken_distribution_counts_as_one_hot(broken: common_pb2.DraftDistribution) -> None:
    good = row([5, 6], [65535, 1])
    draft, num_lost = decode(body_of([5, 5, 5], [good, broken, common_pb2.DraftDistribution()]))
    assert draft == Draft((5, 5, 5), (distribution([5, 6], [65535, 1]), None, None))
    assert num_lost == 1


def test_another_seal_makes_all_one_hot() -> None:
    body = body_of([5, 6], [row([5, 6], [2, 1])] * 2)
    assert decode(body, seal=SEAL ^ 1) == (Draft.certain([5, 6]), 2)
    assert decode(body)[1] == 0


@pytest.mark.parametrize("num_rows", [1, 3])
def test_too_few_or_many_distributions_make_all_one_hot(num_rows: int) -> None:
    assert decode(body_of([5, 6], [row([5, 6], [2, 1])] * num_rows)) == (Draft.certain([5, 6]), 2)


@pytest.mark.parametrize("body", [b"\xff", b"\x0a\x05\x01", b"\x1a\x02\x0a\x09", b"\x0a\x01\x80"])
def test_a_body_that_is_no_message_is_refused(body: bytes) -> None:
    with pytest.raises(InvalidRequestError, match=r"expected a serialised ProposalBody$") as caught:
        decode(body)
    assert caught.value.field == "proposal.body"


def test_every_cut_of_a_body_is_refused_or_read_without_a_wrong_distribution() -> None:
    sent = Draft((5, 6), (distribution([5, 6], [2, 1]), distribution([6, 7], [3, 4])))
    body = sent.encode(SEAL)
    for length in range(len(body)):
        try:
            draft, _ = decode(body[:length])
        except InvalidRequestError:
            continue
        assert draft in (Draft.certain(sent.token_ids), Draft.certain([]))


@settings(deadline=None)
@given(st.data())
def test_a_changed_byte_is_refused_or_leaves_valid_distributions(data: st.DataObject) -> None:
    body = bytearray(Draft((5, 6), (distribution([5, 6], [2, 1]), distribution([6, 7], [3, 4]))).encode(SEAL))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        draft, num_lost = decode(bytes(body))
    except InvalidRequestError:
        return
    assert 0 <= num_lost <= len(draft.token_ids)
    for token, q in zip(draft.token_ids, draft.distributions, strict=True):
        assert token < VOCABULARY_SIZE
        assert q is None or (q.probability(token) > 0 and len(set(q.ids)) == len(q.ids) == len(q.weights))


@pytest.mark.parametrize("token", [VOCABULARY_SIZE, 2**32 - 1])
def test_a_token_outside_the_vocabulary_is_refused(token: int) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body_of([5, token], []))
    assert caught.value.field == "proposal.token_ids"
    assert str(caught.value) == f"proposal.token_ids is {token}, expected an id below {VOCABULARY_SIZE}"


def test_a_tree_is_refused() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body_of([5, 6], [], parents=[0, 0]))
    assert caught.value.field == "proposal.parents"


def test_a_draft_needs_a_distribution_for_each_token() -> None:
    with pytest.raises(ValueError, match="2 tokens with 1 distributions"):
        Draft((5, 6), (None,))


def test_quantised_keeps_positive_tokens_with_weights_of_16_bits() -> None:
    q = SparseDistribution.quantised(np.array([9, 3, 7, 5]), np.array([0.2, 0.0, 0.4, 1e-12]))
    assert q == distribution([9, 7, 5], [32768, 65535, 1])  # 32767.5 rounds to even
    assert q.total == 32768 + 65535 + 1
    assert q.probability(7) == 65535 / q.total
    assert q.probability(3) == q.probability(1) == 0
    assert q.probabilities.tolist() == [32768 / q.total, 65535 / q.total, 1 / q.total]


@pytest.mark.parametrize("scale", [1e-300, 1.0, 1e300])
def test_quantised_takes_any_scale(scale: float) -> None:
    assert SparseDistribution.quantised(np.array([1, 2]), scale * np.array([1.0, 3.0])) == distribution(
        [1, 2], [21845, 65535]
    )


def test_one_hot() -> None:
    q = SparseDistribution.one_hot(7)
    assert (q.total, q.probability(7), q.probability(6), q.token_at(0)) == (1, 1.0, 0.0, 7)


def test_each_token_has_as_many_integers_as_its_weight() -> None:
    q = distribution([9, 3, 7], [2, 1, 3])
    assert [q.token_at(value) for value in range(q.total)] == [9, 9, 3, 7, 7, 7]
    with pytest.raises(IndexError):
        q.token_at(q.total)


def test_totals_beyond_16_and_32_bits() -> None:
    ids = np.arange(70_000, dtype=np.uint32)
    q = SparseDistribution(ids, np.full(len(ids), 65535, dtype=np.uint16))
    assert q.total == 70_000 * 65535 > 2**32
    assert q.token_at(q.total - 1) == 69_999


@pytest.mark.parametrize("change", [lambda q: q.ids[::-1], lambda q: q.ids[:1], lambda q: q.ids + 1])
def test_distributions_are_equal_by_value(change: Callable[[SparseDistribution], np.ndarray]) -> None:
    q = distribution([1, 2], [3, 3])
    assert q == distribution([1, 2], [3, 3])
    assert q != SparseDistribution(change(q), q.weights)
    assert q != "another type"
