"""A model's chat template."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

import jinja2
import structlog
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from splitspec.errors import ConfigError, InvalidRequestError
from splitspec.special_tokens import read_json

log = structlog.get_logger()

_INSTEAD = "a prompt as text or token_ids needs no template"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatMessage(Protocol):
    """One message of a conversation."""

    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


@dataclass(frozen=True)
class Message:
    """A message of one's own."""

    role: str
    content: str

    @classmethod
    def of(cls, message: ChatMessage) -> Message:
        return cls(message.role, message.content)


class ChatTemplate:
    """A model's chat template, rendered as the transformers library renders it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], unknown: Collection[str] = ()) -> None:
        """special_tokens: by the names of the template's variables; those in `unknown` have no id.

        Raises jinja2.TemplateSyntaxError.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._template = environment.from_string(source)
        used = find_undeclared_variables(environment.parse(source))
        #: Those of the usual special tokens that the template uses, but the model's files don't define.
        self.undefined = sorted(used & {*_SPECIAL_TOKENS} - special_tokens.keys())
        self._tokens: dict[str, object] = {**special_tokens}
        self._tokens |= {name: _undefined(name) for name in self.undefined}
        self._tokens |= {name: _without_id(name, special_tokens[name]) for name in unknown}

    @classmethod
    def load(
        cls, directory: Path, special_tokens: Mapping[str, str], unknown: Collection[str] = ()
    ) -> ChatTemplate | None:
        """The template of a model directory, None without one. Raises ConfigError when it can't be read."""
        source: Any
        path = directory / "chat_template.jinja"
        if path.exists():
            source = path.read_text(encoding="utf-8")
        else:
            source = read_json(directory / "tokenizer_config.json").get("chat_template")
        if isinstance(source, list):
            source = next((named["template"] for named in source if named["name"] == "default"), None)
        if source is None:
            return None
        try:
            template = cls(source, special_tokens, unknown)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template in {directory} can't be read: {error.message} in line {error.lineno}, "
                f"expected a Jinja template"
            ) from error
        if template.undefined:
            log.warning(
                "the chat template uses special tokens that none of the model's files defines: they are "
                "rendered as nothing, as the transformers library does it",
                tokens=template.undefined,
                directory=str(directory),
            )
        return template

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, with the beginning of the assistant's answer.

        Raises InvalidRequestError when the template refuses the messages, ConfigError when it can't do
        without a special token that the model's files don't define.
        """
        roles = [message.role for message in messages]
        if not messages:
            raise InvalidRequestError.of("chat.messages", roles, "at least one message")
        try:
            return self._template.render(
                self._tokens,
                messages=[{"role": message.role, "content": message.content} for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
            )
        except _TokenError as error:
            raise ConfigError(str(error), field="chat") from error
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            raise InvalidRequestError.of(
                "chat.messages", roles, f"messages that the model's chat template accepts ({error})"
            ) from error


class _TokenError(jinja2.UndefinedError):
    """A template uses a special token that the model's files don't define, or only in part."""


def _undefined(name: str) -> jinja2.Undefined:
    """Nothing where it is printed, as in the library, and an error elsewhere that tells whose fault it is."""
    reason = (
        f"the model's chat template uses {name}, which none of the model's files defines, expected it in "
        f"special_tokens_map.json or tokenizer_config.json; {_INSTEAD}"
    )
    return jinja2.Undefined(hint=reason, name=name, exc=_TokenError)


def _without_id(name: str, token: str) -> jinja2.Undefined:
    """An error wherever it is used: it would be read as ordinary text."""
    reason = (
        f"the model's chat template uses {name}, which is {token!r} in the model's files, expected a token "
        f"that tokenizer.json has an id for; {_INSTEAD}"
    )
    return jinja2.StrictUndefined(hint=reason, name=name, exc=_TokenError)


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
