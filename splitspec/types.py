"""The values that every process shares; each checks itself when it is made."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field

from protos.v1 import common_pb2, coordinator_pb2
from splitspec.errors import InvalidRequestError

#: Raised with any change of the protocol that an older peer can't follow.
PROTOCOL_VERSION = 1
#: Largest proposal length that any process accepts.
MAX_NUM_DRAFT_TOKENS = 16
#: Entries of a draft distribution that go over the wire.
DRAFT_SUPPORT = 64
#: Largest gRPC message, both ways. A proposal of 16 rows is about 7 kB; this bound is for prompts:
#: a context of 500,000 ids at 5 bytes each, and text.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class Rule(enum.Enum):
    """Verification rules, with their value on the wire."""

    GREEDY = common_pb2.VERIFICATION_RULE_GREEDY
    TOKEN = common_pb2.VERIFICATION_RULE_TOKEN


class Origin(enum.Enum):
    """How a token came to be, with its value on the wire."""

    ACCEPTED = common_pb2.TOKEN_ORIGIN_ACCEPTED
    CORRECTION = common_pb2.TOKEN_ORIGIN_CORRECTION
    BONUS = common_pb2.TOKEN_ORIGIN_BONUS
    PLAIN = common_pb2.TOKEN_ORIGIN_PLAIN
    REPEATED = common_pb2.TOKEN_ORIGIN_REPEATED


class FinishReason(enum.Enum):
    """Why a generation ended, with its value on the wire; in order of precedence at one position."""

    EOS = coordinator_pb2.FINISH_REASON_EOS
    STOP_TOKEN = coordinator_pb2.FINISH_REASON_STOP_TOKEN
    STOP_STRING = coordinator_pb2.FINISH_REASON_STOP_STRING
    MAX_TOKENS = coordinator_pb2.FINISH_REASON_MAX_TOKENS
    CONTEXT_LIMIT = coordinator_pb2.FINISH_REASON_CONTEXT_LIMIT


@dataclass(frozen=True, slots=True)
class Sampling:
    """Parameters of the distribution that tokens are drawn from.

    temperature: at least 0; 0 is greedy. top_k: 0 keeps all. top_p: in (0, 1].
    seed: below 2**64; None is only allowed before the coordinator has drawn one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidRequestError.of(
                "sampling.temperature", self.temperature, "a finite number, at least 0"
            )
        if not 0 <= self.top_k < 2**32:
            raise InvalidRequestError.of(
                "sampling.top_k", self.top_k, "an integer from 0 (keeps all) to 2**32 - 1"
            )
        if not 0 < self.top_p <= 1:
            raise InvalidRequestError.of("sampling.top_p", self.top_p, "a number above 0 and at most 1")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise InvalidRequestError.of("sampling.seed", self.seed, "an integer from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def rule(self) -> Rule:
        """The rule of `auto`: greedy at temperature 0, else the token rule."""
        return Rule.GREEDY if self.greedy else Rule.TOKEN

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> Sampling:
        return cls(
            temperature=message.temperature if message.HasField("temperature") else 1.0,
            top_k=message.top_k,
            top_p=message.top_p if message.HasField("top_p") else 1.0,
            seed=message.seed if message.HasField("seed") else None,
        )

    def to_proto(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            temperature=self.temperature, top_k=self.top_k, top_p=self.top_p, seed=self.seed
        )


@dataclass(frozen=True, slots=True)
class Stop:
    """When a generation ends. `max_tokens` None: what the context leaves."""

    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError.of("stop.max_tokens", self.max_tokens, "at least 1")
        if "" in self.stop_strings:
            raise InvalidRequestError.of("stop.stop_strings", list(self.stop_strings), "no empty string")

    @classmethod
    def from_proto(cls, message: coordinator_pb2.StopConditions) -> Stop:
        return cls(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            stop_token_ids=frozenset(message.stop_token_ids),
            stop_strings=tuple(message.stop_strings),
            ignore_eos=message.ignore_eos,
        )
