"""A call's arguments to a GenerateRequest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias, TypedDict

from protos.v1 import common_pb2, coordinator_pb2
from splitspec.client.values import Message
from splitspec.errors import InvalidRequestError
from splitspec.types import MAX_MESSAGE_BYTES, Mode, Rule, Sampling, Stop

#: Text, chat messages, or token ids.
Prompt: TypeAlias = str | Sequence[Message] | Sequence[Mapping[str, str]] | Sequence[int]


class GenerateOptions(TypedDict, total=False):
    """Keyword arguments of `generate`; what is left out has the server's default.

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

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    banned_token_ids: Sequence[int]
    logprobs: int | None
    seed: int | None
    max_tokens: int | None
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    speculate: bool
    num_draft_tokens: int | None
    drafter: str
    rule: Rule | None
    mode: Mode | None
    session_id: str
    session_length: int
    request_id: str
    resume_offset: int
    tenant: str
    one_token_per_chunk: bool
    timeout: float


def generate_request(prompt: Prompt, options: GenerateOptions) -> coordinator_pb2.GenerateRequest:
    """Raises InvalidRequestError for what is wrong by itself; the server knows the rest."""
    rule, mode = options.get("rule"), options.get("mode")
    request = coordinator_pb2.GenerateRequest(
        request_id=options.get("request_id", ""),
        session_id=options.get("session_id", ""),
        session_length=_uint32s("session_length", [options.get("session_length", 0)])[0],
        tenant=options.get("tenant", ""),
        sampling=_sampling(options).to_proto(),
        stop=_stop(options),
        speculation=coordinator_pb2.SpeculationOptions(
            disabled=not options.get("speculate", True),
            num_draft_tokens=_optional_uint32("num_draft_tokens", options.get("num_draft_tokens")),
            drafter=options.get("drafter", ""),
            rule=rule.value if rule else common_pb2.VERIFICATION_RULE_UNSPECIFIED,
            mode=mode.value if mode else common_pb2.OVERLAP_MODE_UNSPECIFIED,
        ),
        resume_offset=_uint32s("resume_offset", [options.get("resume_offset", 0)])[0],
        one_token_per_chunk=options.get("one_token_per_chunk", False),
        **_prompt(prompt),
    )
    size = request.ByteSize()
    if size > MAX_MESSAGE_BYTES:
        raise InvalidRequestError.of("prompt", f"{size} bytes", f"a request of at most {MAX_MESSAGE_BYTES}")
    return request


def _prompt(prompt: Prompt) -> dict[str, Any]:
    """The prompt's field and value."""
    if isinstance(prompt, str):
        return {"text": prompt}
    items: list[Any] = list(prompt)
    if not items:
        raise InvalidRequestError.of("prompt", items, "at least one token id or message")
    if all(isinstance(item, SupportsIndex) for item in items):
        return {"token_ids": coordinator_pb2.TokenPrompt(ids=_uint32s("token_ids", items))}
    return {"chat": coordinator_pb2.ChatPrompt(messages=[_message(item) for item in items])}


def _message(item: Any) -> coordinator_pb2.ChatMessage:
    message = item
    if isinstance(item, Mapping) and item.keys() == {"role", "content"}:
        message = Message(**item)
    if not isinstance(message, Message):
        raise InvalidRequestError.of("prompt", item, "a Message, a dict with role and content, or a token id")
    return coordinator_pb2.ChatMessage(role=message.role, content=message.content)


def _sampling(options: GenerateOptions) -> Sampling:
    bias = options.get("logit_bias", {})
    return Sampling(
        temperature=options.get("temperature", 1.0),
        top_k=options.get("top_k", 0),
        top_p=options.get("top_p", 1.0),
        min_p=options.get("min_p", 0.0),
        repetition_penalty=options.get("repetition_penalty", 1.0),
        presence_penalty=options.get("presence_penalty", 0.0),
        frequency_penalty=options.get("frequency_penalty", 0.0),
        logit_bias=dict(zip(_uint32s("logit_bias", bias), bias.values(), strict=True)),
        allowed_token_ids=frozenset(_uint32s("allowed_token_ids", options.get("allowed_token_ids", ()))),
        banned_token_ids=frozenset(_uint32s("banned_token_ids", options.get("banned_token_ids", ()))),
        logprobs=options.get("logprobs"),
        seed=options.get("seed"),
    )


def _stop(options: GenerateOptions) -> coordinator_pb2.StopConditions:
    strings = options.get("stop", ())
    if isinstance(strings, str):
        raise InvalidRequestError.of("stop", strings, "a sequence of strings")
    stop = Stop(
        options.get("max_tokens"),
        frozenset(_uint32s("stop_token_ids", options.get("stop_token_ids", ()))),
        tuple(strings),
        options.get("ignore_eos", False),
        _uint32s("min_tokens", [options.get("min_tokens", 0)])[0],
    )
    return coordinator_pb2.StopConditions(
        max_tokens=_optional_uint32("max_tokens", stop.max_tokens),
        stop_token_ids=sorted(stop.stop_token_ids),
        stop_strings=stop.stop_strings,
        ignore_eos=stop.ignore_eos,
        min_tokens=stop.min_tokens,
    )


def _optional_uint32(field: str, value: int | None) -> int | None:
    return None if value is None else _uint32s(field, [value])[0]


def _uint32s(field: str, values: Iterable[SupportsIndex]) -> list[int]:
    integers = [value.__index__() for value in values]
    wrong = next((value for value in integers if not 0 <= value < 2**32), None)
    if wrong is not None:
        raise InvalidRequestError.of(field, wrong, "integers from 0 to 2**32 - 1")
    return integers
