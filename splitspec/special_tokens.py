"""A model's special tokens, from all files that may name them, as the transformers library merges them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from splitspec.errors import ConfigError
from splitspec.tokenizer_classes import class_defaults


@dataclass(frozen=True)
class SpecialTokens:
    """named: by the name that chat templates know them by, such as "bos_token". others: without a name.

    added: those that tokenizer_config.json describes for the tokenizer, ordinary ones too.
    """

    named: Mapping[str, str]
    others: tuple[str, ...] = ()
    added: tuple[AddedToken, ...] = ()

    @classmethod
    def load(cls, directory: Path) -> SpecialTokens:
        """Those of a model directory. Raises ConfigError when one of its files can't be read.

        Of two files that name the same token special_tokens_map.json counts, but tokenizer_config.json alone
        where that describes the added tokens; then come the defaults of the tokenizer's class.
        """
        config = read_json(directory / "tokenizer_config.json")
        entries = _under_new_name(config)
        if "added_tokens_decoder" not in config:
            mapped = read_json(directory / "special_tokens_map.json")
            both = [*_listed(entries), *_listed(mapped)]
            entries = _under_new_name(entries | mapped | ({"extra_special_tokens": both} if both else {}))
        extra = entries.get("extra_special_tokens")
        named = _defaults(directory, config)
        named |= {key: value for key, value in entries.items() if key.endswith("_token")}
        if isinstance(extra, dict):
            named |= extra
        texts = {name: text for name, token in named.items() if (text := _text(token))}
        others = tuple(text for token in _listed(entries) if (text := _text(token)))
        return cls(texts, others, _described(config))

    def teach(self, tokenizer: Tokenizer) -> None:
        """Let the tokenizer know each as one token; those that aren't in its table stay unknown."""
        known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        new = [AddedToken(text, special=True) for text in (*self.named.values(), *self.others)]
        tokens = [*self.added, *(token for token in new if token.content not in known)]
        tokenizer.add_tokens([token for token in tokens if tokenizer.token_to_id(token.content) is not None])

    def unknown_to(self, tokenizer: Tokenizer) -> frozenset[str]:
        """Names of those that the tokenizer has no id for."""
        return frozenset(name for name, text in self.named.items() if tokenizer.token_to_id(text) is None)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty when there is no file. Raises ConfigError when it can't be read."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} can't be read ({error}), expected a JSON object") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, expected a JSON object")
    return content


def _under_new_name(entries: Mapping[str, Any]) -> dict[str, Any]:
    """extra_special_tokens also where they have their old name; the new one counts where both are there."""
    renamed = {**entries}
    old = renamed.pop("additional_special_tokens", None)
    if old and not renamed.get("extra_special_tokens"):
        renamed["extra_special_tokens"] = old
    return renamed


def _listed(entries: Mapping[str, Any]) -> list[Any]:
    extra = entries.get("extra_special_tokens")
    return extra if isinstance(extra, list) else []


def _text(token: object) -> str:
    """A token is a string, or an object with its properties; anything else is none."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _described(config: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    properties = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return tuple(
        AddedToken(token["content"], **{name: token[name] for name in properties if name in token})
        for token in (config.get("added_tokens_decoder") or {}).values()
    )


def _defaults(directory: Path, config: Mapping[str, Any]) -> dict[str, object]:
    """What the tokenizer's class names, and the token that tokenizer.json pads with."""
    model = read_json(directory / "config.json")
    name = config.get("tokenizer_class") or model.get("tokenizer_class")
    path = directory / "tokenizer.json"
    content = path.read_text(encoding="utf-8") if path.exists() else "{}"
    padding = json.loads(content).get("padding") or {}
    tokens = class_defaults(name, model.get("model_type", ""), byte_level='"ByteLevel"' in content)
    return {"pad_token": padding.get("pad_token"), **tokens}
