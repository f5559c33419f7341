"""The registry of drafters. A new drafter is one file with a `KIND`, and one line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_worker.drafters.base import Drafter, Kind, Loading
from splitspec.errors import ConfigError

# By module name, imported when used: a worker that only looks up prompts needs no torch.
_KINDS = {
    "eagle": "draft_worker.drafters.eagle",
    "hybrid": "draft_worker.drafters.hybrid",
    "layer_skip": "draft_worker.drafters.layer_skip",
    "lookup": "draft_worker.drafters.lookup",
    "model": "draft_worker.drafters.model",
    "suffix": "draft_worker.drafters.suffix",
}


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """A drafter as the settings name it. checkpoint: empty for kinds without one."""

    kind: str
    checkpoint: str
    name: str
    options: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> DrafterSpec:
        """Read `KIND[=CHECKPOINT][,key=value...]`.

        Every kind has the option `name`, what sessions call it by; default: the kind. An option `drafter` is
        the last one: the rest of the text is the drafter that it names, with its own checkpoint and options.
        Raises ConfigError naming `drafters`, the value and what was expected.
        """
        own, *nested = text.split(",drafter=", maxsplit=1)
        head, *pairs = own.split(",")
        pairs += [f"drafter={spec}" for spec in nested]
        kind_name, _, checkpoint = head.partition("=")
        if kind_name not in _KINDS:
            raise _wrong(text, f"one of the known drafters: {', '.join(_KINDS)}")
        kind = _kind(kind_name)
        if kind.has_checkpoint != bool(checkpoint):
            expected = (
                f"{kind_name}=CHECKPOINT" if kind.has_checkpoint else f"{kind_name} without a checkpoint"
            )
            raise _wrong(text, expected)
        options = {}
        for pair in pairs:
            key, _, value = pair.partition("=")
            options[key] = _option(text, kind_name, kind, key, value)
        return cls(kind_name, checkpoint, options.pop("name", kind_name), options)


def build_drafter(spec: DrafterSpec, loading: Loading) -> Drafter:
    """The drafter, its model loaded. Raises ConfigError for what can only be seen then."""
    build = _kind(spec.kind).build
    return build(spec.name, spec.checkpoint, loading, **spec.options)


def _kind(name: str) -> Kind:
    kind: Kind = importlib.import_module(_KINDS[name]).KIND
    return kind


def _option(text: str, kind_name: str, kind: Kind, key: str, value: str) -> Any:
    readers = {"name": _name, **kind.options}
    if key not in readers:
        raise _wrong(text, f"{kind_name} with options of: {', '.join(readers)}")
    try:
        return readers[key](value)
    except ValueError as error:
        raise _wrong(text, f"{key} to be {error}") from None


def _name(text: str) -> str:
    if not text:
        raise ValueError("a name")
    return text


def _wrong(text: str, expected: str) -> ConfigError:
    return ConfigError(f"drafters has {text!r}, expected {expected}", field="drafters")


__all__ = ["Drafter", "DrafterSpec", "Loading", "build_drafter"]
