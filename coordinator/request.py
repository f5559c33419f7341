"""A GenerateRequest whose fields were checked and whose defaults were filled in."""

from __future__ import annotations

import secrets
import uuid
from dataclasses import dataclass, replace

from coordinator.claims import Claim
from coordinator.retry import Note, digest_of
from coordinator.text import Message, Prompt, TextCodec
from protos.v1 import coordinator_pb2
from splitspec.config import CoordinatorSettings
from splitspec.errors import InvalidRequestError
from splitspec.limits import (
    MAX_MESSAGES,
    MAX_NAME_BYTES,
    MAX_PROMPT_BYTES,
    check_bytes,
    check_count,
    check_names,
)
from splitspec.types import MAX_NUM_DRAFT_TOKENS, Mode, Rule, Sampling, Stop

#: Begins the ids of sessions that belong to one request.
_OF_REQUEST = "request/"


@dataclass(frozen=True)
class Request:
    """What one call of Generate asks for.

    keep_kv: the session is the client's and outlives the request, on the workers too. keep_record_s: how
    long its record stays, for the next request or for a retry. digest: of the content, for a retry.
    session_length: tokens of the session that the client has seen; 0 when it doesn't say.
    sampling.seed is set. rule: what it is verified by, requested_rule: the one that it named.
    num_draft_tokens: 0 decodes plainly, None is chosen anew for each round. drafter: empty for the default
    one. mode: None is chosen anew for each round. named_mode: the one that the request names.
    prompt_kind: which of text, token_ids and messages ("chat") is the prompt.
    """

    request_id: str
    tenant: str
    session_id: str
    keep_kv: bool
    keep_record_s: float
    digest: str
    resume_offset: int
    session_length: int
    sampling: Sampling
    stop: Stop
    rule: Rule
    requested_rule: Rule | None
    num_draft_tokens: int | None
    drafter: str
    named_mode: Mode | None
    mode: Mode | None
    one_token_per_chunk: bool
    prompt_kind: str
    text: str
    token_ids: tuple[int, ...]
    messages: tuple[coordinator_pb2.ChatMessage, ...]

    def prompt(self, codec: TextCodec, before: list[int], last: Note | None) -> Prompt:
        """What it puts behind the session's tokens `before`, of which it may keep fewer than all.

        last: the note of the session's last request. Raises InvalidRequestError for a prompt without tokens
        and for messages that the model's chat template refuses, ConfigError when that can't be used.
        """
        length = len(before)
        if self.prompt_kind == "token_ids":
            return Prompt(length, list(self.token_ids))
        if self.prompt_kind == "text":
            prompt = Prompt(length, codec.encode_more(self.text) if before else codec.encode(self.text))
        elif not before:
            said = tuple(map(Message.of, self.messages))
            prompt = Prompt(0, codec.encode_chat(said), said)
        elif last is not None and last.conversation is not None:
            ends = frozenset(last.eos_token_ids)
            prompt = codec.next_turn(self.messages, before, last.conversation, ends)
        else:
            prompt = Prompt(length, codec.encode_turn(self.messages, before))
        _at_least_one(self.prompt_kind, prompt.token_ids)
        return prompt

    def check_embedded(self, prompt: Prompt, size: int) -> None:
        """Raise InvalidRequestError for an id without an embedding: the model has `size` of them."""
        wrong = next((token for token in prompt.token_ids if token >= size), None)
        if wrong is not None:
            expected = f"ids below {size}: the tokenizer's table is longer than the model's embeddings"
            named = self.prompt_kind if self.prompt_kind == "token_ids" else f"{self.prompt_kind} (as ids)"
            raise InvalidRequestError(
                f"{named} has the id {wrong}, expected {expected}", field=self.prompt_kind
            )

    @property
    def claim(self) -> Claim | None:
        """What it takes for granted of its session; None for one of its own, which is made anew when lost."""
        if not self.keep_kv:
            return None
        return Claim(self.session_length, self.request_id, self.digest, self.resume_offset)

    def reason(self, used: Rule) -> str:
        """Why a rule was used that isn't the one that was named; empty when it is, or none was named."""
        if self.requested_rule in (None, used):
            return ""
        if used is Rule.GREEDY:
            return "at temperature 0 every rule accepts what equals the argmax"
        return "the drafter proposed trees, which bring their own rule"

    @classmethod
    def from_proto(
        cls, message: coordinator_pb2.GenerateRequest, settings: CoordinatorSettings, codec: TextCodec
    ) -> Request:
        """Raises InvalidRequestError for the first field that is wrong."""
        _check_sizes(message)
        sampling = Sampling.from_proto(message.sampling)
        requested = _requested_rule(message.speculation.rule, sampling)
        rule = _rule(requested, sampling)
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(64))
        stop = Stop.from_proto(message.stop)
        if stop.max_tokens is not None and stop.max_tokens > settings.max_tokens:
            raise InvalidRequestError.of("stop.max_tokens", stop.max_tokens, f"1 to {settings.max_tokens}")
        if stop.min_tokens > settings.max_tokens:
            raise InvalidRequestError.of("stop.min_tokens", stop.min_tokens, f"0 to {settings.max_tokens}")
        beyond = [token for token in stop.stop_token_ids if token >= codec.vocabulary.size]
        if beyond:
            raise InvalidRequestError.of(
                "stop.stop_token_ids", min(beyond), f"ids below {codec.vocabulary.size}"
            )
        codec.special_stops(stop.stop_strings)
        speculation = message.speculation
        mode = Mode.named(speculation.mode, "speculation.mode")
        num_draft_tokens = settings.num_draft_tokens
        if speculation.HasField("num_draft_tokens"):
            num_draft_tokens = speculation.num_draft_tokens
        if num_draft_tokens is not None and num_draft_tokens > MAX_NUM_DRAFT_TOKENS:
            raise InvalidRequestError.of(
                "speculation.num_draft_tokens", num_draft_tokens, f"0 to {MAX_NUM_DRAFT_TOKENS}"
            )
        return cls(
            request_id=message.request_id or uuid.uuid4().hex,
            tenant=message.tenant,
            session_id=_session_id(message),
            keep_kv=bool(message.session_id),
            keep_record_s=settings.session_keep_s if message.session_id or message.request_id else 0,
            digest=digest_of(message),
            resume_offset=message.resume_offset,
            session_length=message.session_length,
            sampling=sampling,
            stop=stop,
            rule=rule,
            requested_rule=requested,
            num_draft_tokens=0 if speculation.disabled or mode is Mode.PLAIN else num_draft_tokens,
            drafter=speculation.drafter,
            named_mode=mode,
            mode=mode or settings.overlap_mode,
            one_token_per_chunk=message.one_token_per_chunk,
            prompt_kind=_prompt_kind(message, codec),
            text=message.text,
            token_ids=tuple(message.token_ids.ids),
            messages=tuple(message.chat.messages),
        )


def _check_sizes(message: coordinator_pb2.GenerateRequest) -> None:
    """Refuse what is too long before anything is made of it; Sampling and Stop do so for their own."""
    check_names(
        request_id=message.request_id,
        session_id=message.session_id,
        tenant=message.tenant,
        speculation__drafter=message.speculation.drafter,
    )
    check_bytes("text", message.text, MAX_PROMPT_BYTES)
    messages = message.chat.messages
    check_count("chat.messages", messages, MAX_MESSAGES)
    for index, each in enumerate(messages):
        check_bytes(f"chat.messages[{index}].role", each.role, MAX_NAME_BYTES)
    check_bytes("chat.messages", (each.content for each in messages), MAX_PROMPT_BYTES)


def _requested_rule(value: int, sampling: Sampling) -> Rule | None:
    """The rule that a request names, None when it names none."""
    if not value:
        return None
    named = [rule for rule in Rule if rule.for_requests]
    rule = next((rule for rule in named if rule.value == value), None)
    if rule is None:
        expected = f"one of {', '.join(rule.name.lower() for rule in named)}"
        raise InvalidRequestError.of("speculation.rule", value, expected)
    if rule is Rule.GREEDY and not sampling.greedy:
        raise InvalidRequestError.of(
            "speculation.rule", "greedy", f"another one at temperature {sampling.temperature:g}"
        )
    return rule


def _rule(requested: Rule | None, sampling: Sampling) -> Rule:
    """At temperature 0 always greedy; else the rule that was named, shared noise with a seed, or block."""
    if sampling.greedy:
        return Rule.GREEDY
    return requested or (Rule.BLOCK if sampling.seed is None else Rule.SHARED_NOISE)


def _session_id(message: coordinator_pb2.GenerateRequest) -> str:
    """The client's session, or one of the request's own, which a retry under the same id finds again."""
    if message.session_id.startswith(_OF_REQUEST):
        raise InvalidRequestError.of(
            "session_id", message.session_id, f"no id that begins with {_OF_REQUEST}"
        )
    return message.session_id or _OF_REQUEST + (message.request_id or uuid.uuid4().hex)


def _prompt_kind(message: coordinator_pb2.GenerateRequest, codec: TextCodec) -> str:
    """Which of the prompt's fields is set, once it can be looked at without a session."""
    kind = message.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequestError.of("prompt", None, "one of text, chat, token_ids")
    if kind == "token_ids":
        ids = _at_least_one(kind, list(message.token_ids.ids))
        wrong = next((token for token in ids if token >= codec.vocabulary.size), None)
        if wrong is not None:
            raise InvalidRequestError.of("token_ids", wrong, f"ids below {codec.vocabulary.size}")
    return kind


def _at_least_one(kind: str, ids: list[int]) -> list[int]:
    if not ids:
        raise InvalidRequestError.of(kind, "", "a prompt of at least one token")
    return ids
