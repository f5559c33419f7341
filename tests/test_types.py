"""Values refuse what is wrong, and say which field, what it was and what was expected."""

from __future__ import annotations

import math
from typing import Any

import pytest

from protos.v1 import common_pb2, coordinator_pb2
from splitspec.errors import InvalidRequestError
from splitspec.types import FinishReason, Origin, Rule, Sampling, Stop


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
        ("seed", -1, "an integer from 0 to 2**64 - 1"),
        ("seed", 2**64, "an integer from 0 to 2**64 - 1"),
    ],
)
def test_sampling_refuses(field: str, value: float, expected: str) -> None:
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


def test_rule_follows_from_the_temperature() -> None:
    assert Sampling(temperature=0, seed=1).rule is Rule.GREEDY
    assert Sampling(temperature=5e-324).rule is Rule.TOKEN


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
        max_tokens=5, stop_token_ids=[7, 7, 2], stop_strings=["a", "b"], ignore_eos=True
    )
    assert Stop.from_proto(message) == Stop(5, frozenset({2, 7}), ("a", "b"), True)
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
