"""Limits of every list and text of a request: what is one too many is refused by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from coordinator.matching import Scanner, StopStrings
from coordinator.request import Request
from coordinator.text import TextCodec
from protos.v1 import common_pb2, coordinator_pb2
from splitspec import limits
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError
from splitspec.types import MAX_LOGPROBS

SETTINGS = CoordinatorSettings(model="m", max_tokens=50)
FIELDS = [
    "request_id", "session_id", "tenant", "text", "chat.messages", "chat.messages[0].role",
    "stop.stop_strings", "stop.stop_strings[0]", "stop.stop_strings together", "stop.stop_token_ids",
    "sampling.logit_bias", "sampling.allowed_token_ids", "sampling.banned_token_ids", "sampling.logprobs",
    "speculation.drafter",
]  # fmt: skip


@pytest.fixture(scope="module")
def codec(codecs: dict[str, TextCodec]) -> TextCodec:
    return codecs["byte level"]


def message(field: str, extra: int) -> coordinator_pb2.GenerateRequest:
    """A request with `extra` more in a field than its limit allows."""
    made = coordinator_pb2.GenerateRequest(text="Hello")
    name = "é" * (limits.MAX_NAME_BYTES // 2) + "x" * extra
    restricted = [index % 300 for index in range(limits.MAX_RESTRICTED_TOKEN_IDS + extra)]
    match field:
        case "request_id" | "session_id" | "tenant":
            setattr(made, field, name)
        case "speculation.drafter":
            made.speculation.drafter = name
        case "text":
            made.text = "x" * (limits.MAX_PROMPT_BYTES + extra)
        case "chat.messages":
            made.chat.messages.extend(
                [coordinator_pb2.ChatMessage(role="user")] * (limits.MAX_MESSAGES + extra)
            )
        case "chat.messages[0].role":
            made.chat.messages.add(role=name)
        case "stop.stop_strings":
            made.stop.stop_strings.extend(["x"] * (limits.MAX_STOP_STRINGS + extra))
        case "stop.stop_strings[0]":
            made.stop.stop_strings.append("x" * (limits.MAX_STOP_STRING_BYTES + extra))
        case "stop.stop_strings together":
            made.stop.stop_strings.extend(["x" * (limits.MAX_STOP_STRINGS_BYTES // 16)] * 16 + ["x"] * extra)
        case "stop.stop_token_ids":
            made.stop.stop_token_ids.extend([1] * (limits.MAX_STOP_TOKEN_IDS + extra))
        case "sampling.logit_bias":
            made.sampling.logit_bias.update(dict.fromkeys(range(limits.MAX_LOGIT_BIAS + extra), 1.0))
        case "sampling.allowed_token_ids":
            made.sampling.allowed_token_ids.extend(restricted)
        case "sampling.banned_token_ids":
            made.sampling.banned_token_ids.extend(restricted)
        case "sampling.logprobs":
            made.sampling.logprobs = MAX_LOGPROBS + extra
    return made


@pytest.mark.parametrize("field", FIELDS)
def test_one_too_many_is_refused_by_name_and_the_limit_itself_is_not(codec: TextCodec, field: str) -> None:
    Request.from_proto(message(field, 0), SETTINGS, codec)
    with pytest.raises(InvalidRequestError) as caught:
        Request.from_proto(message(field, 1), SETTINGS, codec)
    assert caught.value.field == field.removesuffix(" together")
    assert "expected " in caught.value.message
    assert len(caught.value.message) < 150


def test_the_contents_of_all_messages_count_together(codec: TextCodec) -> None:
    chat = coordinator_pb2.ChatPrompt()
    for _ in range(3):
        chat.messages.add(role="user", content="é" * (limits.MAX_PROMPT_BYTES // 6))
    Request.from_proto(coordinator_pb2.GenerateRequest(chat=chat), SETTINGS, codec)
    chat.messages.add(role="user", content="x")
    with pytest.raises(InvalidRequestError, match=rf"^chat.messages has {limits.MAX_PROMPT_BYTES + 1} bytes"):
        Request.from_proto(coordinator_pb2.GenerateRequest(chat=chat), SETTINGS, codec)


def test_every_field_of_a_request_is_looked_at() -> None:
    """A new field with text or entries needs a limit: put it here once it has one."""
    names = {
        "request_id", "session_id", "tenant", "text", "chat", "token_ids", "sampling", "stop", "speculation",
    }  # fmt: skip
    descriptor = coordinator_pb2.GenerateRequest.DESCRIPTOR
    grows = {field.name for field in descriptor.fields if field.type in (9, 11, 12) or field.is_repeated}
    assert grows == names
    inner: dict[Any, set[str]] = {
        coordinator_pb2.StopConditions: {"stop_token_ids", "stop_strings"},
        coordinator_pb2.SpeculationOptions: {"drafter"},
        coordinator_pb2.ChatPrompt: {"messages"},
        coordinator_pb2.ChatMessage: {"role", "content"},
        coordinator_pb2.TokenPrompt: {"ids"},
        common_pb2.SamplingParams: {"logit_bias", "allowed_token_ids", "banned_token_ids"},
    }
    for kind, known in inner.items():
        found = {f.name for f in kind.DESCRIPTOR.fields if f.type in (9, 11, 12) or f.is_repeated}
        assert found == known, kind


def test_the_time_for_a_character_is_that_of_one_state(codec: TextCodec) -> None:
    """However many stop strings: a character makes one step, and a step back was made forward before."""
    strings = StopStrings(["a" * length + "b" for length in range(1, limits.MAX_STOP_STRINGS)])
    steps = 0

    class Counting(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            nonlocal steps
            steps += 1
            return dict.get(self, key, default)

    strings._next = Counting(strings._next)
    scanner, text = Scanner(strings), "aaaac" * 200
    for character in text:
        assert scanner.push(character, matching=True)[1] == ""
    assert steps <= 2 * len(text)


async def test_the_loop_goes_on_while_a_megabyte_is_tokenized(codec: TextCodec) -> None:
    """The library lets go of Python's lock: else the loop would come to its turn once or twice."""
    turns, text = 0, "Hello world, hello there! " * 40_000
    tokenizing = asyncio.create_task(asyncio.to_thread(codec.encode, text))
    while not tokenizing.done():
        await asyncio.sleep(0.001)
        turns += 1
    assert len(await tokenizing) > 100_000
    assert turns > 20
