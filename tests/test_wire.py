"""Proposals to bytes and back; what is broken becomes one-hot and is counted."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError
from splitspec.types import DRAFT_SUPPORT, MAX_NUM_DRAFT_TOKENS, Drawing, Output, Rule, Sampling
from splitspec.wire import Draft, SparseDistribution, seal_key

KEY = b"what the draft is drawn under"
VOCABULARY_SIZE = 151_936


def distribution(ids: list[int], weights: list[int]) -> SparseDistribution:
    return SparseDistribution(np.array(ids, dtype=np.uint32), np.array(weights, dtype=np.uint16))


def decode(body: bytes, key: bytes = KEY) -> tuple[Draft, int]:
    """The draft and how many of its tokens count as one-hot, when the seal isn't to blame."""
    draft, num_one_hot, mismatch = Draft.decode(body, key, VOCABULARY_SIZE)
    assert not mismatch
    return draft, num_one_hot


def body_of(
    tokens: list[int], rows: list[common_pb2.DraftDistribution], parents: list[int] | None = None
) -> bytes:
    """A body as its sender meant it, whatever it holds; sealed as docs/protocol.md says."""
    digest = hashlib.blake2b(digest_size=8)
    parts = [
        KEY,
        struct.pack(f"<{len(tokens)}I", *tokens),
        struct.pack(f"<{len(parents or [])}I", *parents or []),
    ]
    for row in rows:
        parts += [row.token_ids, row.weights]
    for part in parts:
        digest.update(struct.pack("<Q", len(part)) + part)
    seal = int.from_bytes(digest.digest(), "little") if rows else 0
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
@given(drafts(), st.binary())
def test_round_trip(draft: Draft, key: bytes) -> None:
    assert decode(draft.encode(key), key) == (draft, 0)


def test_certain_tokens_send_only_ids() -> None:
    draft = Draft.certain([3, 0, 151_935])
    body = draft.encode(KEY)
    assert not common_pb2.ProposalBody.FromString(body).distributions
    # No distribution was meant, so none is missed, whatever the seal.
    assert decode(body) == decode(body, key=b"another") == (draft, 0)


def test_a_row_of_64_takes_about_390_bytes() -> None:
    generator = np.random.default_rng(1)
    rows = []
    for _ in range(MAX_NUM_DRAFT_TOKENS):
        ids = generator.choice(VOCABULARY_SIZE, DRAFT_SUPPORT, replace=False)
        rows.append(SparseDistribution.quantised(ids, generator.dirichlet(np.ones(DRAFT_SUPPORT))))
    draft = Draft(tuple(int(row.ids[0]) for row in rows), tuple(rows))
    per_token = len(draft.encode(KEY)) / MAX_NUM_DRAFT_TOKENS
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
    assert Draft.decode(body, b"another", VOCABULARY_SIZE) == (Draft.certain([5, 6]), 2, True)
    assert decode(body)[1] == 0


def test_the_seal_covers_tokens_and_distributions() -> None:
    sent = common_pb2.ProposalBody.FromString(body_of([5, 6], [row([5, 6], [2, 1])] * 2))
    for change in (
        lambda body: body.token_ids.__setitem__(0, 6),
        lambda body: body.parents.extend([0, 1]),
        lambda body: setattr(body.distributions[0], "weights", struct.pack("<2H", 1, 2)),
        lambda body: setattr(body.distributions[1], "token_ids", struct.pack("<2I", 6, 5)),
    ):
        changed = common_pb2.ProposalBody.FromString(sent.SerializeToString())
        change(changed)
        draft, num_one_hot, mismatch = Draft.decode(changed.SerializeToString(), KEY, VOCABULARY_SIZE)
        assert (mismatch, num_one_hot) == (True, 2)
        assert not any(draft.distributions)


DRAWING = Drawing(Sampling(seed=1), Rule.BLOCK, Output(3))


@pytest.mark.parametrize(
    "changed",
    [
        {"temperature": 0.9},
        {"top_k": 5},
        {"top_p": 0.9},
        {"min_p": 0.1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": frozenset({3})},
        {"banned_token_ids": frozenset({3})},
    ],
)
def test_the_key_covers_every_parameter_of_the_distribution(changed: dict[str, Any]) -> None:
    other = Drawing(Sampling(seed=1, **changed), Rule.BLOCK, Output(3))
    assert seal_key(other, "v", 1) != seal_key(DRAWING, "v", 1)


def test_the_key_covers_output_rule_vocabulary_and_prefix() -> None:
    sampling = Sampling(seed=1)
    keys = {
        seal_key(DRAWING, "v", 1),
        seal_key(DRAWING, "w", 1),
        seal_key(DRAWING, "v", 2),
        seal_key(Drawing(sampling, Rule.TOKEN, Output(3)), "v", 1),
        seal_key(Drawing(sampling, Rule.BLOCK, Output(4)), "v", 1),
        seal_key(Drawing(sampling, Rule.BLOCK, Output(3, 1)), "v", 1),
        seal_key(Drawing(sampling, Rule.BLOCK, Output(3, 1, frozenset({2}))), "v", 1),
    }
    assert len(keys) == 7
    # Who verifies needs neither the seed nor what is only told.
    assert seal_key(Drawing(Sampling(seed=2, logprobs=3), Rule.BLOCK, Output(3)), "v", 1) in keys


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
    body = sent.encode(KEY)
    for length in range(len(body)):
        try:
            draft, _, _ = Draft.decode(body[:length], KEY, VOCABULARY_SIZE)
        except InvalidRequestError:
            continue
        assert draft in (Draft.certain(sent.token_ids), Draft.certain([]))


@settings(deadline=None)
@given(st.data())
def test_a_changed_byte_is_refused_or_leaves_valid_distributions(data: st.DataObject) -> None:
    body = bytearray(Draft((5, 6), (distribution([5, 6], [2, 1]), distribution([6, 7], [3, 4]))).encode(KEY))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        draft, num_lost, _ = Draft.decode(bytes(body), KEY, VOCABULARY_SIZE)
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


#: Two children of the committed tokens, one of the first's, one of that one's.
PARENTS = (0, 0, 1, 3)


@pytest.mark.parametrize(
    "rows", [(None,) * 5, ([7, 8], None, None, [7], None), ([7, 8], [9], None, [7], None)]
)
def test_trees_round_trip(rows: tuple[list[int] | None, ...]) -> None:
    distributions = tuple(distribution(ids, [3] * len(ids)) if ids else None for ids in rows)
    tree = Draft((7, 8, 9, 7), distributions, PARENTS)
    assert decode(tree.encode(KEY)) == (tree, 0)
    assert tree.children == [[0, 1], [2], [], [3], []]
    assert tree.paths == [(), (7,), (8,), (7, 9), (7, 9, 7)]


def test_a_chain_has_the_rows_of_its_tree() -> None:
    chain = Draft.certain([5, 6])
    assert chain.children == Draft.certain([5, 6], parents=[0, 1]).children == [[0], [1], []]
    assert chain.paths == [(), (5,), (5, 6)]


def test_a_broken_distribution_of_a_tree_makes_its_children_certain() -> None:
    rows = [row([7, 8], [1, 1]), row([9], [1]), row([], []), row([6], [1]), row([], [])]
    draft, num_one_hot = decode(body_of([7, 8, 9, 7], rows, list(PARENTS)))
    assert draft == Draft(
        (7, 8, 9, 7), (distribution([7, 8], [1, 1]), distribution([9], [1]), None, None, None), PARENTS
    )
    assert num_one_hot == 1


@pytest.mark.parametrize("ids", [[7, 5], [5, 8], [5, 6]])
def test_every_child_of_a_row_must_be_in_its_distribution(ids: list[int]) -> None:
    """Not the first alone: else it would be accepted without a probability to have come by."""
    draft, num_one_hot = decode(body_of([7, 8], [row(ids, [1, 1]), row([], []), row([], [])], [0, 0]))
    assert draft == Draft.certain((7, 8), (0, 0))
    assert num_one_hot == 2


@pytest.mark.parametrize("parents", [[0], [0, 2], [1, 0], [0, 1, 2]])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        decode(body_of([5, 6], [], parents))
    assert caught.value.field == "proposal.parents"


def test_siblings_of_one_token_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="siblings with different tokens"):
        decode(body_of([5, 5], [], [0, 0]))
    assert decode(body_of([5, 5], [], [0, 1]))[1] == 0


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
