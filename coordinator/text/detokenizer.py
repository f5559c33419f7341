"""Output as text, token by token, behind the text that it continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from splitspec.tokens import common_prefix

_REPLACEMENT = "\ufffd"
#: A character has at most 4 bytes and a token at least one: so many ids hold the last character.
_WINDOW = 4


class Decoding(Protocol):
    """What a detokenizer asks of `TextCodec`."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def leaves_out(self, token_id: int) -> bool: ...

    def is_fallback_byte(self, token_id: int) -> bool: ...


class Detokenizer:
    """Decodes ids as they come behind a prompt: what they add to the prompt's text, exactly.

    The sum of what it returns is `decode(prompt + ids)` without what that has in common with
    `decode(prompt)`. So the first word keeps its space, and a character whose first bytes ended the prompt
    comes whole.

    Only the last few ids are decoded again at each step, so that time grows linearly:

    - The last 4 ids hold the last character, and the one before a token tells its leading space.
    - Only the last character may still change, and only while it is U+FFFD: then it is held back.
    - Byte fallback reads a run of byte tokens as a whole (one bad byte spoils all of it): a run is held
      back until it ends.

    The tokenizers library's DecodeStream has no flush, so that incomplete bytes at the end are lost; it fails
    on a run of byte tokens that turns bad, and takes quadratic time while bytes stay invalid.
    """

    def __init__(self, codec: Decoding, prompt: Sequence[int] = ()) -> None:
        self._codec = codec
        self._window = self._end_of(prompt)
        self._returned = self._num_decided()  # characters of the window's text
        #: The prompt's text behind them, as long as the output has the same.
        self._prompt_text = codec.decode(self._window)[self._returned :]

    def push(self, token_id: int) -> str:
        """The text that became complete with this id."""
        if self._codec.leaves_out(token_id):
            return ""
        self._window.append(token_id)
        if self._codec.is_fallback_byte(token_id):
            return ""
        text = self._codec.decode(self._window)
        complete = text[self._returned : _complete(text)]
        del self._window[:-_WINDOW]
        self._returned = _complete(self._codec.decode(self._window))
        return self._added(complete)

    def flush(self) -> str:
        """The rest of the text; call it once, after the last id."""
        return self._added(self._codec.decode(self._window)[self._returned :])

    def _end_of(self, prompt: Sequence[int]) -> list[int]:
        """The prompt's last ids with text, and all of a run of byte tokens that is among them."""
        last: list[int] = []
        for token_id in reversed(prompt):
            if not self._codec.leaves_out(token_id):
                last.append(token_id)
                if len(last) >= _WINDOW and not self._codec.is_fallback_byte(token_id):
                    break
        return last[::-1]

    def _num_decided(self) -> int:
        """Characters of the window's text that no further id can change."""
        end = len(self._window)
        while end and self._codec.is_fallback_byte(self._window[end - 1]):
            end -= 1
        return _complete(self._codec.decode(self._window[:end]))

    def _added(self, text: str) -> str:
        """Text without what the prompt's had in its place."""
        same = common_prefix(text, self._prompt_text)
        self._prompt_text = self._prompt_text[same:] if same == len(text) else ""
        return text[same:]


def _complete(text: str) -> int:
    """Number of characters that can't change any more: a last U+FFFD may yet become another character."""
    return len(text) - text.endswith(_REPLACEMENT)
