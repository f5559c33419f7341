"""A call's arguments to a GenerateRequest."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from typing import Any, SupportsFloat, TypeAlias, TypedDict

from protos.v1 import common_pb2, coordinator_pb2
from splitspec.client import arguments
from splitspec.client.values import Message
from splitspec.errors import InvalidRequestError
from splitspec.types import MAX_MESSAGE_BYTES, Mode, Rule, Sampling, Stop

#: Text, chat messages, or token ids.
Prompt: TypeAlias = str | Sequence[Message] | Sequence[Mapping[str, str]] | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`; what is left out, or None, has its default.

    Integers, numbers and lists may come from numpy or torch; a bool is no integer, nor is 1.0.

    temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias
    (id to number), allowed_token_ids, banned_token_ids: the distribution; temperature 0 is greedy, and the
    default is 1. seed: makes the output repeatable, however it is speculated.
    logprobs: log-probabilities of each token and of so many of the most probable ones.
    max_tokens, min_tokens, stop (strings), stop_token_ids, ignore_eos: when to end.
    speculate, num_draft_tokens, drafter, rule, mode: how to speculate; the distribution stays the same.
    session_id: conversation to continue or begin; without it the session ends with the request.
    session_length: tokens of the session that the caller has seen; one that holds fewer is refused. By
    default what this client has seen of it; 0 takes the session as it is.
    request_id: makes a retried call idempotent. resume_offset: its tokens that the caller already has.
    tenant: nothing is shared across tenants.
    one_token_per_chunk: for readers that assume it.
    timeout: deadline of the whole call in seconds, 600 by default.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Collection[int] | None
    banned_token_ids: Collection[int] | None
    logprobs: int | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: Collection[str] | None
    stop_token_ids: Collection[int] | None
    ignore_eos: bool | None
    speculate: bool | None
    num_draft_tokens: int | None
    drafter: str | None
    rule: Rule | None
    mode: Mode | None
    session_id: str | None
    session_length: int | None
    request_id: str | None
    resume_offset: int | None
    tenant: str | None
    one_token_per_chunk: bool | None
    timeout: float | None


class UnknownOptionError(InvalidRequestError, TypeError):
    """`generate` has no such option; a TypeError as well, which Python raises for a wrong keyword."""


def generate_request(prompt: Prompt, options: GenerateOptions) -> coordinator_pb2.GenerateRequest:
    """Raises InvalidRequestError for what is wrong by itself; the server knows the rest."""
    given = _checked(options)
    rule, mode = given.get("rule"), given.get("mode")
    request = coordinator_pb2.GenerateRequest(
        request_id=given.get("request_id", ""),
        session_id=given.get("session_id", ""),
        session_length=given.get("session_length", 0),
        tenant=given.get("tenant", ""),
        sampling=_sampling(given).to_proto(),
        stop=_stop(given),
        speculation=coordinator_pb2.SpeculationOptions(
            disabled=not given.get("speculate", True),
            num_draft_tokens=given.get("num_draft_tokens"),
            drafter=given.get("drafter", ""),
            rule=rule.value if rule else common_pb2.VERIFICATION_RULE_UNSPECIFIED,
            mode=mode.value if mode else common_pb2.OVERLAP_MODE_UNSPECIFIED,
        ),
        resume_offset=given.get("resume_offset", 0),
        one_token_per_chunk=given.get("one_token_per_chunk", False),
        **_prompt(prompt),
    )
    size = request.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequestError.of("prompt", f"{size} bytes", f"a request of at most {MAX_MESSAGE_BYTES}")
    return request


#: The check of an option, by its type in GenerateOptions.
_CHECKS: dict[Any, Callable[[str, object], Any]] = {
    int: arguments.integer,
    float: arguments.number,
    bool: arguments.flag,
    str: arguments.text,
    Rule: partial(arguments.member, Rule),
    Mode: partial(arguments.member, Mode),
    Collection[int]: arguments.integers,
    Collection[str]: arguments.texts,
    Mapping[int, float]: arguments.numbers_by_id,
}
_EXCEPTIONS: dict[str, Callable[[str, object], Any]] = {
    "seed": partial(arguments.integer, limit=2**64),
    "timeout": arguments.seconds,
}


@cache
def _option_checks() -> dict[str, Callable[[str, object], Any]]:
    checks = {}
    for name, hint in typing.get_type_hints(GenerateOptions).items():
        (kind,) = (kind for kind in typing.get_args(hint) if kind is not types.NoneType)
        checks[name] = _EXCEPTIONS.get(name) or _CHECKS[kind]
    return checks


def _checked(options: GenerateOptions) -> dict[str, Any]:
    """The options that are given, each of its type."""
    checks = _option_checks()
    for name, value in options.items():
        if name not in checks:
            near = difflib.get_close_matches(name, checks, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of: {', '.join(checks)}"
            raise UnknownOptionError(f"generate has no option {name} ({value!r:.80}); {hint}", field=name)
    return {name: checks[name](name, value) for name, value in options.items() if value is not None}


_PROMPTS = "text, a list of messages, or a list of token ids"


def _prompt(prompt: object) -> dict[str, Any]:
    """The prompt's field and value."""
    if isinstance(prompt, str):
        return {"text": arguments.text("prompt", prompt)}
    items = arguments.ordered("prompt", prompt, _PROMPTS)
    if not items:
        raise InvalidRequestError.of("prompt", prompt, "at least one token id or message")
    if isinstance(items[0], Message | Mapping):
        messages = arguments.checked_items(_message, "prompt", items)
        return {"chat": coordinator_pb2.ChatPrompt(messages=messages)}
    if not isinstance(items[0], SupportsFloat):
        raise InvalidRequestError.of("prompt[0]", items[0], "a Message, or the integer of a token")
    return {"token_ids": coordinator_pb2.TokenPrompt(ids=arguments.integers("prompt", items))}


def _message(name: str, value: object) -> coordinator_pb2.ChatMessage:
    message = value
    if isinstance(value, Mapping) and value.keys() == {"role", "content"}:
        message = Message(**value)
    if not isinstance(message, Message):
        raise InvalidRequestError.of(name, value, "a Message, or a dict with role and content alone")
    return coordinator_pb2.ChatMessage(
        role=arguments.text(f"{name}.role", message.role),
        content=arguments.text(f"{name}.content", message.content),
    )


def _sampling(given: Mapping[str, Any]) -> Sampling:
    names = {field.name for field in dataclasses.fields(Sampling)}
    values = {name: value for name, value in given.items() if name in names}
    for name in ("allowed_token_ids", "banned_token_ids"):
        values[name] = frozenset(values.get(name, ()))
    return Sampling(**values)


def _stop(given: Mapping[str, Any]) -> coordinator_pb2.StopConditions:
    stop = Stop(
        given.get("max_tokens"),
        frozenset(given.get("stop_token_ids", ())),
        tuple(given.get("stop", ())),
        given.get("ignore_eos", False),
        given.get("min_tokens", 0),
    )
    return coordinator_pb2.StopConditions(
        max_tokens=stop.max_tokens,
        stop_token_ids=sorted(stop.stop_token_ids),
        stop_strings=stop.stop_strings,
        ignore_eos=stop.ignore_eos,
        min_tokens=stop.min_tokens,
    )
