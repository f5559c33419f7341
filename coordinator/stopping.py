"""The one cut: where a generation ends, for ids, text, usage and journal alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from coordinator.matching import Scanner, StopStrings
from splitspec.types import FinishReason, Stop


class Detokenizing(Protocol):
    """Text of ids as they come: `coordinator.text.Detokenizer`."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that is kept. text_end: characters of the output's text that are released after it."""

    token_id: int
    text_end: int


@dataclass(frozen=True, slots=True)
class Emission:
    """What of a block of tokens is kept, and the text that it releases.

    finish: why the generation ended, None while it goes on. stop_string: the one that matched, if any.
    """

    tokens: tuple[Emitted, ...]
    text: str
    finish: FinishReason | None = None
    stop_string: str = ""

    @property
    def text_end(self) -> int:
        """Characters of the output's text that are released after this block."""
        return self.tokens[-1].text_end if self.tokens else 0


class Stopper:
    """Finds the end of one generation in position order, however its tokens are cut into blocks.

    At one position the order is that of FinishReason. The id that ends a generation is kept; an EOS or stop
    id has no text, and of a stop string and what follows it nothing is released. Text that may be the
    beginning of a stop string is held back until that is decided.
    """

    def __init__(
        self,
        stop: Stop,
        detokenizer: Detokenizing,
        *,
        eos_token_ids: frozenset[int],
        max_tokens: int,
        room: int,
        special_stops: Mapping[int, str] | None = None,
    ) -> None:
        """max_tokens: the limit that was resolved from stop.max_tokens, room: tokens until the context is
        full; both at least 1. special_stops: the stop strings that are special tokens, by id."""
        if max_tokens < 1 or room < 1:
            raise ValueError(f"max_tokens is {max_tokens} and room {room}, expected at least 1")
        self._eos_token_ids = frozenset() if stop.ignore_eos else eos_token_ids
        self._stop_token_ids = stop.stop_token_ids
        self._special_stops = special_stops or {}
        self._scanner = Scanner(StopStrings(stop.stop_strings))
        self._detokenizer = detokenizer
        self._max_tokens = max_tokens
        self._room = room
        self._min_tokens = stop.min_tokens
        self._num_tokens = 0
        self._text_end = 0
        self._finish: FinishReason | None = None
        self._stop_string = ""

    @property
    def num_tokens(self) -> int:
        """Tokens that were kept so far."""
        return self._num_tokens

    @property
    def remaining(self) -> int:
        """Most tokens that may still be kept."""
        return min(self._max_tokens, self._room) - self._num_tokens

    def push(self, token_ids: Sequence[int]) -> Emission:
        """Take the next tokens of the generation. Raises ValueError once it has ended."""
        if self._finish is not None:
            raise ValueError(f"the generation has ended ({self._finish.name})")
        tokens: list[Emitted] = []
        texts: list[str] = []
        for token_id in token_ids:
            texts.append(self._take(token_id))
            self._text_end += len(texts[-1])
            tokens.append(Emitted(token_id, self._text_end))
            if self._finish is not None:
                break
        return Emission(tuple(tokens), "".join(texts), self._finish, self._stop_string)

    def _take(self, token_id: int) -> str:
        """Take one token: the text that it releases. Sets _finish and _stop_string."""
        self._num_tokens += 1
        self._finish = self._ended_by_id(token_id)
        text = ""
        if self._finish is None:
            text, self._stop_string = self._scan(self._detokenizer.push(token_id))
            self._finish = self._ended_by_length()
        if self._finish is not None and not self._stop_string:
            # No token follows, so that the rest is decided; it belongs to positions before an EOS or stop id.
            rest, self._stop_string = self._scan(self._detokenizer.flush())
            text += rest + self._scanner.flush()
        if self._finish is FinishReason.STOP_STRING:
            self._stop_string = self._stop_string or self._special_stops[token_id]
        elif self._stop_string:
            self._finish = FinishReason.STOP_STRING
        return text

    def _scan(self, text: str) -> tuple[str, str]:
        """A stop string that is complete before there are min_tokens tokens doesn't count."""
        return self._scanner.push(text, matching=self._num_tokens >= self._min_tokens)

    def _ended_by_id(self, token_id: int) -> FinishReason | None:
        if token_id in self._eos_token_ids:
            return FinishReason.EOS
        if token_id in self._stop_token_ids:
            return FinishReason.STOP_TOKEN
        special = token_id in self._special_stops and self._num_tokens >= self._min_tokens
        return FinishReason.STOP_STRING if special else None

    def _ended_by_length(self) -> FinishReason | None:
        if self._num_tokens == self._max_tokens:
            return FinishReason.MAX_TOKENS
        return FinishReason.CONTEXT_LIMIT if self._num_tokens == self._room else None
