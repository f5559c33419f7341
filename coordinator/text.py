"""Text to ids and back: prompts, chat templates, and output that grows token by token."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitspec.errors import ConfigError, InvalidRequestError
from splitspec.vocabulary import Vocabulary

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"
_KNOWN_ANSWER = "this is the answer"


class ChatMessage(Protocol):
    """One message of a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


@dataclass(frozen=True)
class _Turn:
    role: str
    content: str


class TextCodec:
    """A model's tokenizer with its chat template."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate | None) -> None:
        self.vocabulary = vocabulary
        self._template = template
        self._tokenizer = vocabulary.tokenizer
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        decoder = self._tokenizer.decoder
        self._byte_fallback = decoder is not None and decoder.decode(["<0x41>"]) == "A"

    @classmethod
    def load(cls, directory: Path) -> TextCodec:
        """The codec of a model directory. Raises ConfigError when one of its files can't be read."""
        vocabulary = Vocabulary.load(directory)
        return cls(vocabulary, ChatTemplate.load(directory))

    def encode(self, text: str) -> list[int]:
        """The ids of a prompt, with the special tokens that the model's tokenizer puts around it."""
        return self._tokenizer.encode(text).ids

    def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The ids of a conversation up to where the assistant's answer begins.

        Raises InvalidRequestError when the model has no chat template or its template refuses the messages.
        """
        if self._template is None:
            roles = [message.role for message in messages]
            raise InvalidRequestError.of(
                "chat.messages", roles, "a prompt as text or token_ids: the model has no chat template"
            )
        return self._tokenizer.encode(self._template.render(messages), add_special_tokens=False).ids

    def encode_turn(self, messages: Sequence[ChatMessage], before: Sequence[int]) -> list[int]:
        """The ids that continue a conversation, behind the session's ids `before`.

        What the template puts between an assistant's answer and the next message is taken from a
        conversation with a known answer. The answer's end is left out when `before` already ends with it.
        Raises InvalidRequestError as `encode_chat`, and when the template changes earlier messages.
        """
        if self._template is None:
            return self.encode_chat(messages)
        known = [_Turn("user", "question"), _Turn("assistant", _KNOWN_ANSWER)]
        earlier = self._template.render(known, add_generation_prompt=False)
        whole = self._template.render([*known, *messages])
        end = earlier.rfind(_KNOWN_ANSWER) + len(_KNOWN_ANSWER)
        if end < len(_KNOWN_ANSWER) or whole[:end] != earlier[:end]:
            raise InvalidRequestError.of(
                "chat.messages", "a turn", "a new session: the model's chat template can't be continued"
            )
        ids: list[int] = self._tokenizer.encode(whole[end:], add_special_tokens=False).ids
        return ids[1:] if ids[:1] == list(before[-1:]) else ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of ids. Special tokens, and ids that have no token, are left out."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

    def leaves_out(self, token_id: int) -> bool:
        """Whether `decode` leaves the id out."""
        return token_id in self._special_ids or self._tokenizer.id_to_token(token_id) is None

    def is_fallback_byte(self, token_id: int) -> bool:
        """Whether the id is a byte by itself, such as `<0xE2>`, that is read together with its neighbours."""
        token = self._tokenizer.id_to_token(token_id) if self._byte_fallback else None
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None


class Detokenizer:
    """Decodes ids as they come; what it returns adds up to `codec.decode` of all of them, exactly.

    Only the last few ids are decoded again at each step, so that time grows linearly:

    - A character has at most 4 bytes and a token at least one, so that 4 ids hold the last character, and the
      one before a token tells its leading space.
    - Only the last character may still change, and only while it is U+FFFD: then it is held back.
    - Byte fallback reads a run of byte tokens as a whole (one bad byte spoils all of it): a run is held
      back until it ends.

    The tokenizers library's DecodeStream has no flush, so that incomplete bytes at the end are lost; it fails
    on a run of byte tokens that turns bad, and takes quadratic time while bytes stay invalid.
    """

    _WINDOW = 4

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._returned = 0  # characters of the window's text

    def push(self, token_id: int) -> str:
        """The text that became complete with this id."""
        if self._codec.leaves_out(token_id):
            return ""
        self._window.append(token_id)
        if self._codec.is_fallback_byte(token_id):
            return ""
        text = self._codec.decode(self._window)
        complete = text[self._returned : _complete(text)]
        del self._window[: -self._WINDOW]
        self._returned = _complete(self._codec.decode(self._window))
        return complete

    def flush(self) -> str:
        """The rest of the text; call it once, after the last id."""
        return self._codec.decode(self._window)[self._returned :]


class ChatTemplate:
    """A model's chat template, rendered as the transformers library renders it."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path) -> ChatTemplate | None:
        """The template of a model directory, None without one. Raises ConfigError when it can't be read."""
        config = _read_config(directory / "tokenizer_config.json")
        path = directory / "chat_template.jinja"
        source = path.read_text(encoding="utf-8") if path.exists() else config.get("chat_template")
        if isinstance(source, list):
            source = next((named["template"] for named in source if named["name"] == "default"), None)
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(config))
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template in {directory} can't be read: {error.message} in line {error.lineno}, "
                f"expected a Jinja template"
            ) from error

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text, with the beginning of the assistant's answer unless told otherwise.

        Raises InvalidRequestError when the template refuses the messages.
        """
        roles = [message.role for message in messages]
        if not messages:
            raise InvalidRequestError.of("chat.messages", roles, "at least one message")
        try:
            return self._template.render(
                self._special_tokens,
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            raise InvalidRequestError.of(
                "chat.messages", roles, f"messages that the model's chat template accepts ({error})"
            ) from error


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training; its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _complete(text: str) -> int:
    """Number of characters that can't change any more: a last U+FFFD may yet become another character."""
    return len(text) - text.endswith(_REPLACEMENT)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which no model has seen."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _read_config(path: Path) -> dict[str, Any]:
    """The content of tokenizer_config.json; empty when there is none."""
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} can't be read ({error}), expected a JSON object") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds a {type(config).__name__}, expected a JSON object")
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The named special tokens: each is a string, or an object with its properties."""
    named = {name: config.get(name) for name in _SPECIAL_TOKENS}
    return {
        name: token["content"] if isinstance(token, dict) else token for name, token in named.items() if token
    }
