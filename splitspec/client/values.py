"""What the service tells a client, as frozen values: the fields of protos/v1/coordinator.proto by name."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtoMessage

from splitspec.errors import HandshakeError
from splitspec.types import FinishReason, Origin, Rule


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. role: "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's natural log-probability."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural log-probabilities at one position.

    raw: under the model's own distribution. processed: under the one that the token was drawn from, after
    all parameters. top_raw, top_processed: the most probable tokens of each, in falling order.
    """

    raw: float
    processed: float
    top_raw: tuple[TokenLogprob, ...]
    top_processed: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token. text_end: characters of the output text that were complete after it.

    logprobs: when they were asked for; a token that is sent again has none.
    """

    id: int
    origin: Origin
    text_end: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens, usually several.

    offset: index of the first token within the output. text: what became complete, never half a
    character. durable: the tokens are in the session's journal.
    """

    offset: int
    tokens: tuple[Token, ...]
    text: str
    durable: bool

    @property
    def pieces(self) -> list[tuple[Token, str]]:
        """Each token with its share of the text; empty while it has only a part of a character."""
        begin = self.tokens[-1].text_end - len(self.text) if self.tokens else 0
        ends = [max(0, token.text_end - begin) for token in self.tokens]
        starts = [0, *ends]
        return [(token, self.text[i:j]) for token, i, j in zip(self.tokens, starts, ends, strict=False)]


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt is accepted. cached_tokens: those of prompt_tokens that the target already held."""

    request_id: str
    session_id: str
    seed: int
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class AcceptanceStats:
    """How speculation went, in the shape that vLLM reports.

    mean_acceptance_length: (accepted + next tokens) / rounds with a proposal; 1 without any.
    acceptance_histogram: entry i counts the rounds in which exactly i draft tokens were accepted.
    """

    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    num_plain_steps: int
    num_one_hot_tokens: int
    num_draft_missed_steps: int
    num_seal_mismatches: int
    num_ahead_steps: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where the time went, in microseconds. The wire is waiting less the worker's own time."""

    time_to_first_token_us: int
    total_us: int
    open_us: int
    draft_us: int
    target_us: int
    draft_wire_us: int
    target_wire_us: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The generation ended. drafter: empty for plain decoding.

    durable: all tokens are in the session's journal; else they are written as soon as Redis takes them, and
    until then the session's next request is refused.
    rule: that was used. requested_rule: the one that was named, if any; rule_reason: why it isn't `rule`.
    """

    reason: FinishReason
    stop_string: str
    usage: Usage
    acceptance: AcceptanceStats
    timings: Timings
    rule: Rule
    drafter: str
    requested_rule: Rule | None
    rule_reason: str
    durable: bool


@dataclass(frozen=True, slots=True)
class Result:
    """A whole generation."""

    started: Started
    tokens: tuple[Token, ...]
    text: str
    finished: Finished

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A target model. fingerprint: hash of weights, element type and device class.

    deterministic: a position's logits have the same bits whatever else is in the pass.
    """

    name: str
    fingerprint: str
    dtype: str
    device: str
    vocabulary_hash: str
    vocabulary_size: int
    max_context: int
    eos_token_ids: tuple[int, ...]
    deterministic: bool


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of requests, in tokens, bytes of UTF-8, and entries.

    max_name_bytes: of request_id, session_id, tenant, drafter, role. max_prompt_bytes: of a text, or of the
    contents of all messages. max_restricted_token_ids: of allowed and of banned ones.
    """

    max_context: int
    max_num_draft_tokens: int
    max_message_bytes: int
    max_tokens: int
    max_name_bytes: int
    max_prompt_bytes: int
    max_messages: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_stop_strings_bytes: int
    max_stop_token_ids: int
    max_logit_bias: int
    max_restricted_token_ids: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class Description:
    """What the service offers. default_drafter: empty for plain decoding."""

    protocol_version: int
    models: tuple[ModelInfo, ...]
    drafters: tuple[str, ...]
    rules: tuple[Rule, ...]
    limits: RequestLimits
    default_drafter: str
    default_num_draft_tokens: int


V = TypeVar("V")


def from_proto(cls: type[V], message: ProtoMessage) -> V:
    """The value of a message: each field of the dataclass is read from the message's field of that name.

    Raises HandshakeError for an enumeration's value that this client doesn't know.
    """
    hints = _hints(cls)  # type: ignore[arg-type]  # a type is hashable
    return cls(**{name: _field(message, name, kind) for name, kind in hints.items()})


def to_json(value: Any) -> Any:
    """A value as JSON types; members of enumerations by their lower-case name."""
    if dataclasses.is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [to_json(item) for item in value]
    return value.name.lower() if isinstance(value, enum.Enum) else value


@cache
def _hints(cls: type[Any]) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _field(message: ProtoMessage, name: str, kind: Any) -> Any:
    """A field's value; None for an optional one that is absent, or unspecified."""
    value = getattr(message, name)
    if typing.get_origin(kind) is types.UnionType:
        (kind,) = (option for option in typing.get_args(kind) if option is not types.NoneType)
        is_message = isinstance(value, ProtoMessage)
        if not (message.HasField(name) if is_message else value):
            return None
    return _convert(name, kind, value)


def _convert(name: str, kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is tuple:
        return tuple(_convert(name, typing.get_args(kind)[0], item) for item in value)
    if dataclasses.is_dataclass(kind):
        return from_proto(kind, value)  # type: ignore[arg-type]
    if issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(str(member.value) for member in kind)
            raise HandshakeError(
                f"the coordinator says {name} = {value}, expected one of {known}: it is newer than the client"
            ) from None
    return value
