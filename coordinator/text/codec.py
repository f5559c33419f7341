"""Text to ids and back: prompts, chat templates, and output that grows token by token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from coordinator.text.continuing import continuing
from coordinator.text.detokenizer import Detokenizer
from coordinator.text.template import ChatMessage, ChatTemplate
from coordinator.text.turns import Conversation, Prompt, Turns
from splitspec.errors import InvalidRequestError
from splitspec.special_tokens import SpecialTokens
from splitspec.vocabulary import Vocabulary

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TextCodec:
    """A model's tokenizer with its chat template."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate | None) -> None:
        self.vocabulary = vocabulary
        self._template = template
        self._tokenizer = vocabulary.tokenizer
        self._turns = Turns(self, self._render)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: index for index, token in added.items() if token.special}
        self._without_text = frozenset(self._special_ids.values())
        decoder = self._tokenizer.decoder
        self._byte_fallback = decoder is not None and decoder.decode(["<0x41>"]) == "A"

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """The codec of a model directory. Raises ConfigError when one of its files can't be read."""
        vocabulary = Vocabulary.load(directory)
        tokens = SpecialTokens.load(directory)
        tokens.teach(vocabulary.tokenizer)
        unknown = tokens.unknown_to(vocabulary.tokenizer)
        return cls(vocabulary, ChatTemplate.load(directory, tokens.named, unknown))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the model's tokenizer puts around it."""
        return _encoded(self._tokenizer, text, add_special_tokens=True).ids

    def encode_more(self, text: str) -> list[int]:
        """The ids of a text that follows other text: nothing is put before it."""
        return _encoded(self._continuing, text).ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of a conversation up to where the assistant's answer begins.

        Raises InvalidRequestError when the model has no chat template or its template refuses the messages.
        """
        return self.encoding(self._render(messages)).ids

    def encode_turn(self, messages: Sequence[ChatMessage], before: Sequence[int]) -> list[int]:
        """The ids that continue a text with an assistant's answer at its end, behind its ids `before`.

        What the template puts between an answer and the next message is taken from a conversation with a
        known answer. The answer's end is left out when `before` already ends with it.
        Raises InvalidRequestError as `encode_chat`, and when the template doesn't keep answers.
        """
        end = before[-1] if before and before[-1] in self._without_text else None
        return self._turns.after_text(messages, end)

    def next_turn(
        self,
        messages: Sequence[ChatMessage],
        before: Sequence[int],
        conversation: Conversation,
        ends: frozenset[int],
    ) -> Prompt:
        """The next turn of a conversation that the session's ids `before` hold. ends: ids that end an answer.

        Raises InvalidRequestError as `encode_chat`.
        """
        return self._turns.after(conversation, messages, before, ends | self._without_text)

    def encoding(self, text: str) -> Encoding:
        """Text with its special tokens written out, as ids that know their place in it."""
        return _encoded(self._tokenizer, text)

    def _render(self, messages: Sequence[ChatMessage]) -> str:
        if self._template is None:
            roles = [message.role for message in messages]
            raise InvalidRequestError.of(
                "chat.messages", roles, "a prompt as text or token_ids: the model has no chat template"
            )
        return self._template.render(messages)

    def special_stops(self, stop_strings: Sequence[str]) -> dict[int, str]:
        """Those that are special tokens, by id: they have no text that could match.

        Raises InvalidRequestError for one that has a special token and more, which never comes as text.
        """
        for stop in stop_strings:
            inside = self._special.search(stop)
            if inside is not None and stop not in self._special_ids:
                expected = f"a special token alone ({inside[0]!r}), or text without one: it has no text"
                raise InvalidRequestError.of("stop.stop_strings", stop, expected)
        return {self._special_ids[stop]: stop for stop in stop_strings if stop in self._special_ids}

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Special tokens, and ids that have no token, are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def special_text(self, token_id: int) -> str:
        """The text of one id, of a special token too."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """What reads the ids behind a prompt."""
        return Detokenizer(self, prompt)

    def leaves_out(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out."""
        return token_id in self._without_text or self._tokenizer.id_to_token(token_id) is None

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether the id is a byte by itself, such as `<0xE2>`, that is read together with its neighbours."""
        token = self._tokenizer.id_to_token(token_id) if self._byte_fallback else None
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    @cached_property
    def _continuing(self) -> Tokenizer:
        return continuing(self._tokenizer)

    @cached_property
    def _special(self) -> re.Pattern[str]:
        """Finds a special token in text; those of white space alone don't count."""
        tokens = [re.escape(token) for token in self._special_ids if token.strip()]
        return re.compile("|".join(sorted(tokens, reverse=True)) or r"(?!)")


def _encoded(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
    """A text's ids. In a batch of its own: for a single text the library keeps Python's lock, so that
    everything else in the process stands still, for a megabyte two seconds and more.
    """
    (encoding,) = tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
    return encoding
