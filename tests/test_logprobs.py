"""Log-probabilities of a row against torch.log_softmax, and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from splitspec.sampling.logprobs import Logprobs
from splitspec.sampling.rows import ProcessedRows
from splitspec.types import Sampling
from tests.drawings import drawing_of


def logprobs(row: torch.Tensor, sampling: Sampling, token: int, tokens: tuple[int, ...] = (0,)) -> Logprobs:
    return ProcessedRows(row[None], drawing_of(sampling), tokens, [()]).logprobs(0, token)


def test_both_distributions_of_a_random_row() -> None:
    row = torch.randn(500, generator=torch.Generator().manual_seed(1)) * 3
    sampling = Sampling(temperature=0.5, top_k=7, repetition_penalty=1.5, logprobs=5)
    raw = torch.log_softmax(row.double(), dim=0)
    first, second = torch.topk(raw, 2).indices.tolist()
    found = logprobs(row, sampling, second, tokens=(3, first))
    penalised = row.double()
    for token in (3, first):
        value = penalised[token]
        penalised[token] = value * 1.5 if value < 0 else value / 1.5
    kept = torch.topk(penalised / 0.5, 7)
    processed = dict(zip(kept.indices.tolist(), torch.log_softmax(kept.values, 0).tolist(), strict=True))
    assert found.raw == pytest.approx(float(raw[second]), abs=1e-12)
    assert found.processed == pytest.approx(processed[second], abs=1e-12)
    best = torch.topk(raw, 5)
    assert [token for token, _ in found.top_raw] == best.indices.tolist()
    assert [value for _, value in found.top_raw] == pytest.approx(best.values.tolist(), abs=1e-12)
    falling = sorted(processed.items(), key=lambda item: -item[1])[:5]
    assert [token for token, _ in found.top_processed] == [token for token, _ in falling]
    assert [value for _, value in found.top_processed] == pytest.approx([v for _, v in falling], abs=1e-12)


def test_ties_by_id_and_none_of_probability_0() -> None:
    found = logprobs(torch.tensor([1.0, 3.0, 1.0, 3.0]), Sampling(top_k=2, logprobs=4), 3)
    assert [token for token, _ in found.top_raw] == [1, 3, 0, 2]
    assert found.top_processed == ((1, math.log(0.5)), (3, math.log(0.5)))
    assert found.processed == math.log(0.5)


def test_at_temperature_0_the_token_is_certain() -> None:
    found = logprobs(torch.tensor([1.0, 3.0, 1.0]), Sampling(temperature=0, logprobs=3), 1)
    assert (found.processed, found.top_processed) == (0.0, ((1, 0.0),))
    assert found.raw == pytest.approx(3 - math.log(2 * math.e + math.e**3))


def test_none_of_the_others_when_none_are_asked_for() -> None:
    found = logprobs(torch.zeros(4), Sampling(logprobs=0), 2)
    assert (found.top_raw, found.top_processed) == ((), ())
    assert found.raw == pytest.approx(-math.log(4))


def test_over_the_wire() -> None:
    found = logprobs(torch.tensor([1.0, 3.0, 1.0]), Sampling(temperature=2, logprobs=2), 0)
    message = found.to_proto()
    assert (message.raw, message.processed) == (found.raw, found.processed)
    for sent, told in ((message.top_raw, found.top_raw), (message.top_processed, found.top_processed)):
        assert [(top.id, top.logprob) for top in sent] == list(told)
        assert len(told) == 2
