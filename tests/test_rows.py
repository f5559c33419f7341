"""Every parameter at every row of a block: against the transformers library's processors, token by token."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from protos.v1 import common_pb2
from splitspec.sampling.logprobs import Logprobs
from splitspec.sampling.rows import ProcessedRows
from splitspec.tokens import TokenLog
from splitspec.types import Drawing, Output, Sampling
from splitspec.wire import Draft
from tests.drawings import drawing_of
from tests.processors import processed_logits, warped

SIZE = 24


ids = st.integers(0, SIZE - 1)
#: What the library holds in float32 for a bias.
eighths = st.integers(-800, 800).map(lambda n: n / 8)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    top_k=st.sampled_from([0, 0, 1, 5, SIZE + 3]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.8, 1.3]),
    presence_penalty=st.sampled_from([0.0, -1.5, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 1.9, -0.4]),
    logit_bias=st.dictionaries(ids, eighths, max_size=4),
    allowed_token_ids=st.frozensets(ids, max_size=6) | st.just(frozenset()),
    banned_token_ids=st.frozensets(ids, max_size=4),
    logprobs=st.integers(0, 5),
)
extreme_samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 1e308),
    top_k=st.integers(0, SIZE + 2),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 1e308, exclude_min=True),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    logit_bias=st.dictionaries(st.integers(0, 2 * SIZE), st.floats(-100, 100), max_size=4),
    allowed_token_ids=st.frozensets(st.integers(0, 2 * SIZE), max_size=6),
    banned_token_ids=st.frozensets(st.integers(0, 2 * SIZE), max_size=6),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """A block of rows: committed tokens, and a chain or a tree of draft tokens behind them."""

    sampling: Sampling
    output: Output
    tokens: tuple[int, ...]
    draft: Draft
    seed: int
    ruled_out: frozenset[int] = frozenset()

    @property
    def logits(self) -> torch.Tensor:
        """[draft tokens + 1, vocabulary] float32."""
        generator = np.random.default_rng(self.seed)
        rows = generator.normal(scale=3, size=(len(self.draft.paths), SIZE))
        rows[:, sorted(self.ruled_out)] = -np.inf
        return torch.from_numpy(rows.astype(np.float32))

    @property
    def drawing(self) -> Drawing:
        return drawing_of(self.sampling, output=self.output)

    @property
    def rows(self) -> ProcessedRows:
        return ProcessedRows(self.logits, self.drawing, TokenLog(self.tokens), self.draft.paths)

    def left_out(self, row: int) -> set[int]:
        """Ids that may not come in a row, from the parameters' definition."""
        early = len(self.tokens) + len(self.draft.paths[row]) - self.output.start < self.output.min_tokens
        banned = self.sampling.banned_token_ids | (self.output.ending_token_ids if early else frozenset())
        allowed = self.sampling.allowed_token_ids or frozenset(range(SIZE))
        return set(range(SIZE)) - (allowed - banned)


@st.composite
def cases(draw: st.DrawFn, sampling: st.SearchStrategy[Sampling] = samplings, top: int = SIZE) -> Case:
    token = st.integers(0, top - 1)
    tokens = tuple(draw(st.lists(token, min_size=1, max_size=8)))
    drafted = draw(st.lists(token, max_size=4, unique=True))
    parents = [draw(st.integers(0, node)) for node in range(len(drafted))] if draw(st.booleans()) else []
    output = Output(
        start=draw(st.integers(0, len(tokens))),
        min_tokens=draw(st.integers(0, 8)),
        ending_token_ids=draw(st.frozensets(token, max_size=2)),
    )
    chosen, draft = draw(sampling), Draft.certain(drafted, parents)
    return Case(chosen, output, tokens, draft, draw(st.integers(0, 2**32)))


@given(cases())
def test_each_row_is_what_transformers_makes_of_it_token_by_token(case: Case) -> None:
    rows = case.rows
    for row, path in enumerate(case.draft.paths):
        if len(case.left_out(row)) == SIZE:  # such requests are refused
            continue
        logits = processed_logits(case.logits[row], [*case.tokens, *path], case.sampling, case.output)
        best = int(torch.argmax(logits))
        certain = functional.one_hot(torch.tensor(best), SIZE).double()
        expected = certain if case.sampling.greedy else warped(logits, case.sampling)
        torch.testing.assert_close(rows.probabilities(row), expected, rtol=1e-9, atol=0)
        assert rows.argmax(row) == best


@given(cases(), st.randoms(use_true_random=False))
def test_a_row_of_a_block_is_the_row_of_a_pass_of_its_own_in_any_order(case: Case, random: Random) -> None:
    rows, logits = case.rows, case.logits
    order = list(range(len(case.draft.paths)))
    random.shuffle(order)
    for row in order:
        alone = ProcessedRows(
            logits[row : row + 1], case.drawing, [*case.tokens, *case.draft.paths[row]], [()]
        )
        assert torch.equal(rows.probabilities(row), alone.probabilities(0))
        assert rows.argmax(row) == alone.argmax(0)
        token = rows.argmax(row)
        assert rows.logprobs(row, token) == alone.logprobs(0, token)


@given(cases(extreme_samplings, 2 * SIZE), st.frozensets(ids, max_size=SIZE - 1))
def test_any_row_under_any_parameters_is_a_distribution_without_what_is_left_out(
    case: Case, ruled_out: frozenset[int]
) -> None:
    """Tokens and parameters may name ids beyond the table; the model itself may rule tokens out."""
    case = dataclasses.replace(case, ruled_out=ruled_out)
    rows = case.rows
    for row in range(len(case.draft.paths)):
        found, left_out = rows.probabilities(row), case.left_out(row)
        assert float(found.sum()) == pytest.approx(1, abs=1e-12)
        assert float(found.min()) >= 0
        possible = set(range(SIZE)) - left_out
        if possible:
            assert not found[sorted(left_out)].any()
            assert rows.argmax(row) in possible
        if possible - ruled_out:
            assert not found[sorted(ruled_out)].any()
            assert rows.argmax(row) not in ruled_out


def rows_of(
    logits: Sequence[Sequence[float]],
    sampling: Sampling,
    *,
    tokens: Sequence[int] = (0,),
    path: Sequence[int] = (),
    output: Output | None = None,
) -> ProcessedRows:
    """Rows of a chain behind committed tokens that are all prompt."""
    drawing = drawing_of(sampling, output=output or Output(start=len(tokens)))
    return ProcessedRows(torch.tensor(logits), drawing, tokens, Draft.certain(path).paths)


def test_frequency_and_presence_count_the_output_up_to_each_row() -> None:
    sampling = Sampling(temperature=0, presence_penalty=0.25, frequency_penalty=0.5)
    # Token 1 leads by 1.5 and is drafted again and again: at 0.75, 1.25 and 1.75 below.
    rows = rows_of([[0.0, 1.5, 0.0]] * 4, sampling, tokens=[1, 1, 1], path=[1, 1, 1])
    assert [rows.argmax(row) for row in range(4)] == [1, 1, 1, 0]


def test_repetition_counts_the_session_once_and_each_token_of_the_path() -> None:
    sampling = Sampling(repetition_penalty=2.0)
    rows = rows_of([[2.0, 2.0, -1.0, 2.0]] * 2, sampling, tokens=[1, 1, 2], path=[3])
    for row, logits in enumerate([[2.0, 1.0, -2.0, 2.0], [2.0, 1.0, -2.0, 1.0]]):
        expected = torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0)
        torch.testing.assert_close(rows.probabilities(row), expected, rtol=1e-12, atol=0)


def test_an_ending_token_may_come_in_the_row_behind_min_tokens_and_no_earlier() -> None:
    output = Output(start=2, min_tokens=3, ending_token_ids=frozenset([1]))
    rows = rows_of([[0.0, 9.0]] * 4, Sampling(temperature=0), tokens=[0, 0, 0], path=[0, 0, 0], output=output)
    assert [rows.argmax(row) for row in range(4)] == [0, 0, 1, 1]


def test_a_bias_of_minus_100_holds_in_every_row() -> None:
    rows = rows_of([[0.0, 50.0]] * 3, Sampling(temperature=0, logit_bias={1: -100.0}), path=[1, 1])
    assert [rows.argmax(row) for row in range(3)] == [0, 0, 0]


def test_where_the_model_rules_out_all_that_may_come_they_are_equally_probable() -> None:
    row = [-math.inf, 3.0, -math.inf, -math.inf]
    sampling = Sampling(allowed_token_ids=frozenset([0, 2, 3]), banned_token_ids=frozenset([3]))
    rows = rows_of([row], sampling)
    assert rows.probabilities(0).tolist() == [0.5, 0, 0.5, 0]
    assert rows.argmax(0) == 0


def test_a_table_without_any_of_the_ids_that_may_come_leaves_none_out() -> None:
    rows = rows_of([[1.0, 1.0]], Sampling(allowed_token_ids=frozenset([2, 3])), tokens=[3])
    assert rows.probabilities(0).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("temperature", [1.0, 1e308])
@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300, 1e308])
def test_penalties_that_overflow_leave_an_order(penalty: float, temperature: float) -> None:
    """All tokens were there before: one logit overflows, the other vanishes. Ruled out stays ruled out."""
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    rows = rows_of([[5.0, -5.0, 0.0, -math.inf]], sampling, tokens=[0, 1, 2, 3])
    probabilities = rows.probabilities(0)
    assert float(probabilities.sum()) == pytest.approx(1, abs=1e-12)
    assert probabilities[3] == 0
    assert rows.argmax(0) == 0


def test_the_models_logits_stay_as_they_are() -> None:
    logits = torch.randn((2, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    before = logits.clone()
    sampling = Sampling(
        top_p=0.5, logit_bias={1: 5.0}, repetition_penalty=2.0, banned_token_ids=frozenset([2]), logprobs=2
    )
    rows = ProcessedRows(logits, drawing_of(sampling), [1, 3], [(), (4,)])
    for row in range(2):
        rows.probabilities(row)
        rows.argmax(row)
        rows.logprobs(row, 1)
    assert torch.equal(logits, before)


class TestLogprobs:
    def test_raw_is_the_models_own_and_processed_is_what_the_token_was_drawn_from(self) -> None:
        row = [0.5, 2.0, 1.0, 2.0, -1.0]
        sampling = Sampling(temperature=0.5, top_k=3, logit_bias={0: 1.25}, logprobs=2)
        found = rows_of([row], sampling).logprobs(0, 0)
        raw = torch.log_softmax(torch.tensor(row, dtype=torch.float64), dim=0).tolist()
        assert found.raw == pytest.approx(raw[0], rel=1e-12)
        assert [token for token, _ in found.top_raw] == [1, 3]
        assert found.top_raw[1][1] == pytest.approx(raw[3], rel=1e-12)
        # Kept: 1.75, 2 and 2, twice as far apart at half the temperature.
        total = math.exp(3.5) + 2 * math.exp(4)
        assert found.processed == pytest.approx(math.log(math.exp(3.5) / total), rel=1e-12)
        assert [token for token, _ in found.top_processed] == [1, 3]
        assert found.top_processed[0][1] == pytest.approx(math.log(math.exp(4) / total), rel=1e-12)

    def test_ties_go_by_id_and_tokens_that_cant_come_arent_told(self) -> None:
        row = [1.0] * 40 + [-math.inf]
        found = rows_of([row], Sampling(banned_token_ids=frozenset([0, 5]), logprobs=6)).logprobs(0, 7)
        assert [token for token, _ in found.top_raw] == [0, 1, 2, 3, 4, 5]
        assert [token for token, _ in found.top_processed] == [1, 2, 3, 4, 6, 7]
        few = rows_of([[0.0, -math.inf, 0.0]], Sampling(logprobs=20)).logprobs(0, 0)
        assert few.top_raw == few.top_processed == ((0, math.log(0.5)), (2, math.log(0.5)))

    def test_at_temperature_0_the_token_is_certain(self) -> None:
        found = rows_of([[0.0, math.log(3)]], Sampling(temperature=0, logprobs=5)).logprobs(0, 1)
        assert found.processed == 0
        assert found.top_processed == ((1, 0.0),)
        assert found.raw == pytest.approx(math.log(0.75), rel=1e-7)
        assert [token for token, _ in found.top_raw] == [1, 0]

    def test_none_of_the_others_with_0(self) -> None:
        found = rows_of([[0.0, 0.0]], Sampling(logprobs=0)).logprobs(0, 1)
        assert found == Logprobs(math.log(0.5), math.log(0.5), (), ())

    @given(cases())
    def test_each_row_has_its_own(self, case: Case) -> None:
        """The row of a real token has its log-probability, and the most probable ones fall."""
        rows = case.rows
        count = case.sampling.logprobs
        for row in range(len(case.draft.paths)):
            token = rows.argmax(row)
            found, p = rows.logprobs(row, token), rows.probabilities(row)
            raw = torch.log_softmax(case.logits[row].double(), dim=0)
            assert found.raw == float(raw[token])
            processed = [math.log(value) if value else -math.inf for value in p.tolist()]
            assert found.processed == processed[token]
            for top, logs in ((found.top_raw, raw.tolist()), (found.top_processed, processed)):
                best = sorted((-log, token) for token, log in enumerate(logs) if log > -math.inf)
                assert top == tuple((token, -negative) for negative, token in best[:count])

    def test_over_the_wire(self) -> None:
        message = Logprobs(-1.5, -0.25, ((7, -0.5), (1, -2.0)), ((7, -0.25),)).to_proto()
        assert message == common_pb2.Logprobs(
            raw=-1.5,
            processed=-0.25,
            top_raw=[
                common_pb2.TokenLogprob(id=7, logprob=-0.5),
                common_pb2.TokenLogprob(id=1, logprob=-2.0),
            ],
            top_processed=[common_pb2.TokenLogprob(id=7, logprob=-0.25)],
        )
