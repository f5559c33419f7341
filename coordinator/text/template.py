"""A model's chat template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitspec.errors import ConfigError, InvalidRequestError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatMessage(Protocol):
    """One message of a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


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
