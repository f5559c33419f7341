"""What a request asks for: the rule that it is verified by, and fields that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.request import Request
from coordinator.text import TextCodec
from protos.v1 import common_pb2, coordinator_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError
from splitspec.types import Rule

SETTINGS = CoordinatorSettings(model="m", max_tokens=50)


def request(
    codec: TextCodec,
    *,
    sampling: common_pb2.SamplingParams | None = None,
    rule: Rule | None = None,
    stop: coordinator_pb2.StopConditions | None = None,
) -> Request:
    message = coordinator_pb2.GenerateRequest(text="Hello world", sampling=sampling, stop=stop)
    if rule is not None:
        message.speculation.rule = rule.value
    return Request.from_proto(message, SETTINGS, codec)


@pytest.fixture(scope="module")
def codec(codecs: dict[str, TextCodec]) -> TextCodec:
    return codecs["byte level"]


Params = common_pb2.SamplingParams


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        (Params(temperature=0), Rule.GREEDY),
        (Params(temperature=0, seed=3), Rule.GREEDY),
        (Params(), Rule.BLOCK),
        (Params(temperature=0.5), Rule.BLOCK),
        (Params(seed=0), Rule.SHARED_NOISE),
        (Params(temperature=0.5, seed=3), Rule.SHARED_NOISE),
    ],
)
def test_the_rule_follows_from_temperature_and_seed(codec: TextCodec, sampling: Params, rule: Rule) -> None:
    read = request(codec, sampling=sampling)
    assert (read.rule, read.requested_rule, read.reason(rule)) == (rule, None, "")
    assert read.sampling.seed is not None


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE])
@pytest.mark.parametrize("sampling", [Params(), Params(seed=1)])
def test_a_rule_that_is_named_is_used(codec: TextCodec, sampling: Params, rule: Rule) -> None:
    read = request(codec, sampling=sampling, rule=rule)
    assert (read.rule, read.requested_rule, read.reason(rule)) == (rule, rule, "")
    assert "trees" in read.reason(Rule.TREE_TOP_M)


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK, Rule.SHARED_NOISE])
def test_at_temperature_0_every_rule_is_greedy_and_says_so(codec: TextCodec, rule: Rule) -> None:
    read = request(codec, sampling=Params(temperature=0), rule=rule)
    assert (read.rule, read.requested_rule) == (Rule.GREEDY, rule)
    assert "temperature 0" in read.reason(Rule.GREEDY)


@pytest.mark.parametrize("rule", [Rule.GREEDY, Rule.TREE_TOP_M, Rule.TREE_RECURSIVE])
def test_a_rule_that_would_change_the_distribution_or_comes_with_a_tree_is_refused(
    codec: TextCodec, rule: Rule
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        request(codec, rule=rule)
    assert caught.value.field == "speculation.rule"


def test_min_tokens_beyond_the_server_s_most_is_refused(codec: TextCodec) -> None:
    with pytest.raises(InvalidRequestError, match=r"stop\.min_tokens is 51, expected 0 to 50"):
        request(codec, stop=coordinator_pb2.StopConditions(min_tokens=51))


def test_a_stop_id_that_can_t_come_is_refused(codec: TextCodec) -> None:
    size = codec.vocabulary.size
    with pytest.raises(InvalidRequestError, match=rf"stop\.stop_token_ids is {size}, expected ids below"):
        request(codec, stop=coordinator_pb2.StopConditions(stop_token_ids=[1, size + 1, size]))


@pytest.mark.parametrize(
    ("prompt", "named"),
    [({"token_ids": {"ids": [1, 9]}}, "token_ids has"), ({"text": "b"}, r"text \(as ids\) has")],
)
def test_an_id_without_an_embedding_is_refused_under_the_name_of_the_prompt(
    codec: TextCodec, prompt: dict[str, Any], named: str
) -> None:
    asked = Request.from_proto(coordinator_pb2.GenerateRequest(**prompt), SETTINGS, codec)
    ids = asked.prompt(codec, [], None)
    largest = max(ids.token_ids)
    asked.check_embedded(ids, largest + 1)
    with pytest.raises(InvalidRequestError, match=rf"{named} the id {largest}, expected ids below"):
        asked.check_embedded(ids, largest)
