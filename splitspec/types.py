"""The values that every process shares; each checks itself when it is made."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from protos.v1 import common_pb2, coordinator_pb2
from splitspec.errors import InvalidRequestError
from splitspec.limits import (
    MAX_ENDING_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_RESTRICTED_TOKEN_IDS,
    MAX_STOP_STRING_BYTES,
    MAX_STOP_STRINGS,
    MAX_STOP_STRINGS_BYTES,
    MAX_STOP_TOKEN_IDS,
    check_bytes,
    check_count,
)

#: Raised with any change of the protocol that an older peer can't follow.
PROTOCOL_VERSION = 1
#: Largest proposal length that any process accepts.
MAX_NUM_DRAFT_TOKENS = 16
#: Most proposals that a session's draft worker may be ahead, or verdicts that it may prepare for.
MAX_NUM_AHEAD = 64
#: Most log-probabilities of other tokens that a request may ask for.
MAX_LOGPROBS = 20
#: Entries of a draft distribution that go over the wire.
DRAFT_SUPPORT = 64
#: Largest gRPC message, both ways. A proposal of 16 rows is about 7 kB; this bound is for prompts:
#: a context of 500,000 ids at 5 bytes each, and text.
MAX_MESSAGE_BYTES = 4 * 1024 * 1024


class Rule(enum.Enum):
    """Verification rules, with their value on the wire."""

    GREEDY = common_pb2.VERIFICATION_RULE_GREEDY
    TOKEN = common_pb2.VERIFICATION_RULE_TOKEN
    BLOCK = common_pb2.VERIFICATION_RULE_BLOCK
    SHARED_NOISE = common_pb2.VERIFICATION_RULE_SHARED_NOISE
    TREE_TOP_M = common_pb2.VERIFICATION_RULE_TREE_TOP_M
    TREE_RECURSIVE = common_pb2.VERIFICATION_RULE_TREE_RECURSIVE

    @property
    def for_requests(self) -> bool:
        """Whether a request is verified by it; the others come with the proposal."""
        return self not in (Rule.TREE_TOP_M, Rule.TREE_RECURSIVE)


class Mode(enum.Enum):
    """What the draft worker does while the target verifies, with its value on the wire (docs/overlap.md)."""

    PLAIN = common_pb2.OVERLAP_MODE_PLAIN
    SEQUENTIAL = common_pb2.OVERLAP_MODE_SEQUENTIAL
    PIPELINED = common_pb2.OVERLAP_MODE_PIPELINED
    PREFETCH_PULL = common_pb2.OVERLAP_MODE_PREFETCH_PULL
    PREFETCH_PUSH = common_pb2.OVERLAP_MODE_PREFETCH_PUSH

    @classmethod
    def named(cls, value: int, field: str) -> Mode | None:
        """The mode of a value on the wire, None for unspecified. Raises InvalidRequestError for another."""
        if not value:
            return None
        try:
            return cls(value)
        except ValueError:
            known = ", ".join(mode.name.lower() for mode in cls)
            raise InvalidRequestError.of(field, value, f"one of {known}") from None


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
    """Parameters of the distribution that tokens are drawn from; they act at every position.

    temperature: at least 0; 0 is greedy. top_k: 0 keeps all. top_p: in (0, 1]. min_p: in [0, 1].
    repetition_penalty: above 0, for tokens that the session holds. presence_penalty, frequency_penalty:
    in [-2, 2], for tokens that the output holds. logit_bias: id to what is added, in [-100, 100].
    allowed_token_ids: empty allows all. logprobs: how many of the most probable tokens are told, None for
    no log-probabilities at all. seed: below 2**64; None is only allowed before the coordinator has drawn one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_token_ids: frozenset[int] = frozenset()
    banned_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _check(
            "temperature", self.temperature, 0 <= self.temperature < math.inf, "a finite number, at least 0"
        )
        _check("top_k", self.top_k, 0 <= self.top_k < 2**32, "an integer from 0 (keeps all) to 2**32 - 1")
        _check("top_p", self.top_p, 0 < self.top_p <= 1, "a number above 0 and at most 1")
        _check("min_p", self.min_p, 0 <= self.min_p <= 1, "a number from 0 to 1")
        penalty = self.repetition_penalty
        _check("repetition_penalty", penalty, 0 < penalty < math.inf, "a finite number above 0")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, -2 <= value <= 2, "a number from -2 to 2")
        for token, bias in self.logit_bias.items():
            _check("logit_bias", {token: bias}, -100 <= bias <= 100, "numbers from -100 to 100")
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}")
        if self.seed is not None:
            _check("seed", self.seed, 0 <= self.seed < 2**64, "an integer from 0 to 2**64 - 1")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @classmethod
    def from_proto(cls, message: common_pb2.SamplingParams) -> Sampling:
        """Raises InvalidRequestError for the first field that is wrong."""
        # Before anything is made of them.
        check_count("sampling.logit_bias", message.logit_bias, MAX_LOGIT_BIAS)
        check_count("sampling.allowed_token_ids", message.allowed_token_ids, MAX_RESTRICTED_TOKEN_IDS)
        check_count("sampling.banned_token_ids", message.banned_token_ids, MAX_RESTRICTED_TOKEN_IDS)

        def given(name: str, default: Any) -> Any:
            return getattr(message, name) if message.HasField(name) else default  # type: ignore[arg-type]

        return cls(
            temperature=given("temperature", 1.0),
            top_k=message.top_k,
            top_p=given("top_p", 1.0),
            min_p=message.min_p,
            repetition_penalty=given("repetition_penalty", 1.0),
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            logit_bias=dict(message.logit_bias),
            allowed_token_ids=frozenset(message.allowed_token_ids),
            banned_token_ids=frozenset(message.banned_token_ids),
            logprobs=given("logprobs", None),
            seed=given("seed", None),
        )

    def to_proto(self) -> common_pb2.SamplingParams:
        return common_pb2.SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=sorted(self.allowed_token_ids),
            banned_token_ids=sorted(self.banned_token_ids),
            logprobs=self.logprobs,
            seed=self.seed,
        )


def _check(field: str, value: object, right: bool, expected: str) -> None:
    if not right:
        raise InvalidRequestError.of(f"sampling.{field}", value, expected)


@dataclass(frozen=True, slots=True)
class Output:
    """Where a request's output begins: behind `start` committed tokens.

    None of ending_token_ids may come before it has min_tokens tokens.
    """

    start: int
    min_tokens: int = 0
    ending_token_ids: frozenset[int] = frozenset()

    @classmethod
    def from_proto(cls, message: common_pb2.Output) -> Output:
        check_count("output.ending_token_ids", message.ending_token_ids, MAX_ENDING_TOKEN_IDS)
        return cls(message.start, message.min_tokens, frozenset(message.ending_token_ids))

    def to_proto(self) -> common_pb2.Output:
        return common_pb2.Output(
            start=self.start, min_tokens=self.min_tokens, ending_token_ids=sorted(self.ending_token_ids)
        )


@dataclass(frozen=True, slots=True)
class Drawing:
    """All that a request's tokens are drawn by, on both workers. The seed of `sampling` is set."""

    sampling: Sampling
    rule: Rule
    output: Output

    def __post_init__(self) -> None:
        if self.sampling.seed is None:
            raise InvalidRequestError.of("open.sampling.seed", None, "the request's seed")
        if not self.rule.for_requests or (self.rule is Rule.GREEDY) != self.sampling.greedy:
            expected = "greedy at temperature 0 and only there, else token, block or shared_noise"
            raise InvalidRequestError.of("open.rule", self.rule.name.lower(), expected)

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None
        return self.sampling.seed

    @classmethod
    def from_proto(cls, message: common_pb2.Open) -> Drawing:
        try:
            rule = Rule(message.rule)
        except ValueError:
            known = [rule.name.lower() for rule in Rule if rule.for_requests]
            raise InvalidRequestError.of("open.rule", message.rule, f"one of {known}") from None
        return cls(Sampling.from_proto(message.sampling), rule, Output.from_proto(message.output))

    def check_vocabulary(self, size: int) -> None:
        """Raise InvalidRequestError for ids outside of a vocabulary of `size`, or when none may come."""
        sampling = self.sampling
        for name in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
            wrong = [token for token in getattr(sampling, name) if token >= size]
            if wrong:
                raise InvalidRequestError.of(f"sampling.{name}", min(wrong), f"ids below {size}")
        early = self.output.ending_token_ids if self.output.min_tokens else frozenset()
        banned = sampling.banned_token_ids | early
        allowed = sampling.allowed_token_ids
        if allowed <= banned if allowed else sum(token < size for token in banned) == size:
            raise InvalidRequestError.of(
                "sampling.allowed_token_ids",
                sorted(sampling.allowed_token_ids),
                "at least one id that isn't banned, nor ends the output before stop.min_tokens",
            )


@dataclass(frozen=True, slots=True)
class Stop:
    """When a generation ends. max_tokens None: what the context leaves. min_tokens: fewest tokens."""

    max_tokens: int | None = None
    stop_token_ids: frozenset[int] = field(default_factory=frozenset)
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise InvalidRequestError.of("stop.max_tokens", self.max_tokens, "at least 1")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            expected = f"0 to {self.max_tokens}, which is stop.max_tokens"
            raise InvalidRequestError.of("stop.min_tokens", self.min_tokens, expected)
        if "" in self.stop_strings:
            raise InvalidRequestError.of("stop.stop_strings", list(self.stop_strings), "no empty string")

    @classmethod
    def from_proto(cls, message: coordinator_pb2.StopConditions) -> Stop:
        """Raises InvalidRequestError for the first field that is wrong."""
        check_count("stop.stop_token_ids", message.stop_token_ids, MAX_STOP_TOKEN_IDS)
        check_count("stop.stop_strings", message.stop_strings, MAX_STOP_STRINGS)
        for index, stop_string in enumerate(message.stop_strings):
            check_bytes(f"stop.stop_strings[{index}]", stop_string, MAX_STOP_STRING_BYTES)
        check_bytes("stop.stop_strings", message.stop_strings, MAX_STOP_STRINGS_BYTES)
        return cls(
            max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
            stop_token_ids=frozenset(message.stop_token_ids),
            stop_strings=tuple(message.stop_strings),
            ignore_eos=message.ignore_eos,
            min_tokens=message.min_tokens,
        )
