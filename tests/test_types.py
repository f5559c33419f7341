"""Values refuse what is wrong, and say which field, what it was and what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos.v1 import common_pb2, coordinator_pb2
from splitspec.errors import InvalidRequestError
from splitspec.types import Drawing, FinishReason, Origin, Output, Rule, Sampling, Stop


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("temperature", -0.1, "a finite number, at least 0"),
        ("temperature", math.nan, "a finite number, at least 0"),
        ("temperature", math.inf, "a finite number, at least 0"),
        ("temperature", -math.inf, "a finite number, at least 0"),
        ("top_k", -1, "an integer from 0 (keeps all) to 2**32 - 1"),
        ("top_k", 2**32, "an integer from 0 (keeps all) to 2**32 - 1"),
        ("top_p", 0.0, "a number above 0 and at most 1"),
        ("top_p", -0.5, "a number above 0 and at most 1"),
        ("top_p", 1.0000001, "a number above 0 and at most 1"),
        ("top_p", math.nan, "a number above 0 and at most 1"),
        ("top_p", math.inf, "a number above 0 and at most 1"),
        ("min_p", -0.1, "a number from 0 to 1"),
        ("min_p", 1.1, "a number from 0 to 1"),
        ("min_p", math.nan, "a number from 0 to 1"),
        ("repetition_penalty", 0.0, "a finite number above 0"),
        ("repetition_penalty", -1.0, "a finite number above 0"),
        ("repetition_penalty", math.inf, "a finite number above 0"),
        ("repetition_penalty", math.nan, "a finite number above 0"),
        ("presence_penalty", 2.1, "a number from -2 to 2"),
        ("presence_penalty", math.nan, "a number from -2 to 2"),
        ("frequency_penalty", -2.1, "a number from -2 to 2"),
        ("frequency_penalty", math.inf, "a number from -2 to 2"),
        ("logit_bias", {4: 100.5}, "numbers from -100 to 100"),
        ("logit_bias", {4: math.nan}, "numbers from -100 to 100"),
        ("logprobs", -1, "0 to 20"),
        ("logprobs", 21, "0 to 20"),
        ("seed", -1, "an integer from 0 to 2**64 - 1"),
        ("seed", 2**64, "an integer from 0 to 2**64 - 1"),
    ],
)
def test_sampling_refuses(field: str, value: object, expected: str) -> None:
    parameters: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequestError) as caught:
        Sampling(**parameters)
    assert caught.value.field == f"sampling.{field}"
    assert str(caught.value) == f"sampling.{field} is {value!r}, expected {expected}"


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.0},
        {"temperature": 5e-324},
        {"top_k": 2**32 - 1},
        {"top_p": 5e-324},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"repetition_penalty": 5e-324},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0},
        {"logit_bias": {0: -100.0, 2**32 - 1: 100.0}},
        {"allowed_token_ids": frozenset({0, 5}), "banned_token_ids": frozenset({2**32 - 1})},
        {"logprobs": 0},
        {"logprobs": 20},
        {"seed": 0},
        {"seed": 2**64 - 1},
    ],
)
def test_sampling_takes_the_ends_of_each_range_over_the_wire(parameters: dict[str, Any]) -> None:
    sampling = Sampling(**parameters)
    assert Sampling.from_proto(sampling.to_proto()) == sampling
    sent = sampling.to_proto().SerializeToString()
    assert Sampling.from_proto(common_pb2.SamplingParams.FromString(sent)) == sampling


def test_sampling_defaults_are_those_of_an_empty_message() -> None:
    assert Sampling.from_proto(common_pb2.SamplingParams()) == Sampling()
    assert Sampling() == Sampling(temperature=1.0, top_k=0, top_p=1.0, seed=None)


def test_an_explicit_zero_is_not_the_default() -> None:
    assert Sampling.from_proto(common_pb2.SamplingParams(temperature=0)).greedy
    assert Sampling.from_proto(common_pb2.SamplingParams(seed=0)).seed == 0
    with pytest.raises(InvalidRequestError):
        Sampling.from_proto(common_pb2.SamplingParams(top_p=0))


def test_drawing_over_the_wire() -> None:
    drawing = Drawing(Sampling(seed=3, min_p=0.1), Rule.BLOCK, Output(7, 2, frozenset({5, 1})))
    message = common_pb2.Open(
        sampling=drawing.sampling.to_proto(), rule=drawing.rule.value, output=drawing.output.to_proto()
    )
    assert Drawing.from_proto(message) == drawing


@pytest.mark.parametrize("rule", [0, 5, 6, 99])
def test_a_rule_that_is_none_of_requests_is_refused(rule: int) -> None:
    message = common_pb2.Open(sampling=Sampling(seed=1).to_proto())
    message.rule = rule  # type: ignore[assignment]  # as a peer may send it
    with pytest.raises(InvalidRequestError) as caught:
        Drawing.from_proto(message)
    assert caught.value.field == "open.rule"


@pytest.mark.parametrize(
    ("temperature", "rule"),
    [(0.0, Rule.TOKEN), (0.0, Rule.BLOCK), (0.0, Rule.SHARED_NOISE), (1e-9, Rule.GREEDY)],
)
def test_greedy_is_the_rule_of_temperature_0_alone(temperature: float, rule: Rule) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Drawing(Sampling(temperature=temperature, seed=1), rule, Output(1))
    assert caught.value.field == "open.rule"


def test_drawing_needs_a_seed() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Drawing(Sampling(), Rule.BLOCK, Output(1))
    assert caught.value.field == "open.sampling.seed"


@pytest.mark.parametrize(
    ("parameters", "output", "field"),
    [
        ({"logit_bias": {10: 1.0}}, Output(1), "logit_bias"),
        ({"allowed_token_ids": frozenset({1, 11})}, Output(1), "allowed_token_ids"),
        ({"banned_token_ids": frozenset({2**31})}, Output(1), "banned_token_ids"),
        ({"allowed_token_ids": frozenset({1}), "banned_token_ids": frozenset({1})}, Output(1), None),
        ({"banned_token_ids": frozenset(range(10))}, Output(1), None),
        ({"banned_token_ids": frozenset(range(9))}, Output(1, 1, frozenset({9})), None),
        ({"allowed_token_ids": frozenset({9})}, Output(1, 1, frozenset({9})), None),
    ],
)
def test_ids_outside_the_vocabulary_and_sets_that_leave_none_are_refused(
    parameters: dict[str, Any], output: Output, field: str | None
) -> None:
    drawing = Drawing(Sampling(seed=1, **parameters), Rule.BLOCK, output)
    with pytest.raises(InvalidRequestError) as caught:
        drawing.check_vocabulary(10)
    assert caught.value.field == f"sampling.{field or 'allowed_token_ids'}"


@pytest.mark.parametrize(
    ("parameters", "output"),
    [
        ({"logit_bias": {9: 1.0}, "banned_token_ids": frozenset(range(9))}, Output(1)),
        ({"allowed_token_ids": frozenset({9})}, Output(1, 0, frozenset({9}))),
        ({}, Output(1, 5, frozenset({9, 8}))),
    ],
)
def test_sets_that_leave_a_token_are_taken(parameters: dict[str, Any], output: Output) -> None:
    Drawing(Sampling(seed=1, **parameters), Rule.BLOCK, output).check_vocabulary(10)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", -3, "at least 1"),
        ("stop_strings", ("end", ""), "no empty string"),
    ],
)
def test_stop_refuses(field: str, value: object, expected: str) -> None:
    parameters: dict[str, Any] = {field: value}
    with pytest.raises(InvalidRequestError) as caught:
        Stop(**parameters)
    shown = list(value) if isinstance(value, tuple) else value
    assert caught.value.field == f"stop.{field}"
    assert str(caught.value) == f"stop.{field} is {shown!r}, expected {expected}"


def test_stop_from_its_message() -> None:
    assert Stop.from_proto(coordinator_pb2.StopConditions()) == Stop()
    message = coordinator_pb2.StopConditions(
        max_tokens=5, stop_token_ids=[7, 7, 2], stop_strings=["a", "b"], ignore_eos=True, min_tokens=5
    )
    assert Stop.from_proto(message) == Stop(5, frozenset({2, 7}), ("a", "b"), True, 5)
    message.min_tokens = 6
    with pytest.raises(InvalidRequestError, match=r"stop\.min_tokens is 6, expected 0 to 5"):
        Stop.from_proto(message)
    with pytest.raises(InvalidRequestError):
        Stop.from_proto(coordinator_pb2.StopConditions(max_tokens=0))


@pytest.mark.parametrize(
    ("values", "wire"),
    [
        (Rule, common_pb2.VerificationRule),
        (Origin, common_pb2.TokenOrigin),
        (FinishReason, coordinator_pb2.FinishReason),
    ],
)
def test_enums_name_every_value_of_the_wire_but_unspecified(values: Any, wire: Any) -> None:
    named = {item.name: item.value for item in values}
    prefix = wire.Name(0).removesuffix("UNSPECIFIED")
    assert named == {name.removeprefix(prefix): value for name, value in wire.items() if value}
