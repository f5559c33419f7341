"""One frozen settings object per process, read once at start: flags over SPLITSPEC_* over a file.

The file is TOML: keys that processes share at its top, the others in a section of their role.

    redis_url = "redis://redis:6379/0"
    model = "org/name"

    [draft]
    drafters = ["lookup", "layer_skip=org/name"]

What nobody knows is an error, in the file and in the environment: a warning about SPLITSPEC_DRAFERS would
scroll by, and the process would run with other settings than it was given.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    NoDecode,
    SettingsConfigDict,
)

from splitspec.addresses import is_wildcard, normalised
from splitspec.errors import ConfigError
from splitspec.types import MAX_NUM_AHEAD, MAX_NUM_DRAFT_TOKENS, Mode

ENV_PREFIX = "SPLITSPEC_"


class ServerSettings(BaseSettings):
    """What all three servers need."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        protected_namespaces=(),
    )

    config: str = Field("", description="Settings file (TOML); flags and environment go before it.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    port_file: str = Field("", description="File that gets host:port once the server listens.")
    advertise: str = Field(
        "",
        validate_default=True,
        description="host:port that other processes reach this one by; default: where it listens. Workers "
        "that listen on all addresses need it.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis that holds sessions and the worker directory: redis://, rediss:// for TLS, or "
        "redis+sentinel://host,host/service.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    shutdown_grace_s: float = Field(30.0, ge=0, description="Seconds that running streams get after SIGTERM.")
    trace_file: str = Field(
        "", description="File that spans are appended to as lines of OTLP JSON; processes may share one."
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of the Prometheus endpoint, on the same host; 0 for none."
    )

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, value: str) -> str:
        return value.removeprefix("[").removesuffix("]")

    @field_validator("advertise")
    @classmethod
    def _can_be_reached(cls, value: str) -> str:
        return normalised(value) if value else value


class WorkerSettings(ServerSettings):
    """What both workers need."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Element type of the weights."
    )
    device: str = Field("cpu", description="Device of the model: cpu, cuda or cuda:N.")
    attention: Literal["auto", "flex", "sdpa"] = Field(
        "auto",
        description="Attention of all sessions in one kernel (flex, for GPUs) or one after the other (sdpa); "
        "auto is flex on GPUs.",
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0 leaves torch's choice.")
    max_sessions: int = Field(64, ge=1, description="Handles that may be held at once.")
    max_positions: int = Field(
        256, ge=1, description="Positions of all sessions together in one pass; longer prompts are cut."
    )
    kv_memory_mib: int = Field(
        0,
        ge=0,
        description="Memory for the KV of each model in MiB; 0 takes a quarter of what is free, or of what "
        "the container's limit leaves.",
    )
    directory_lease_s: float = Field(
        5.0, gt=0, description="Seconds after which a silent worker leaves the directory."
    )

    @field_validator("advertise")
    @classmethod
    def _is_known(cls, value: str, info: ValidationInfo) -> str:
        host = info.data.get("host", "")
        if not value and is_wildcard(host):
            raise ValueError(f"host:port that other processes reach this one by, as the host is {host!r}")
        return value

    @field_validator("attention")
    @classmethod
    def _has_kernel(cls, value: str, info: ValidationInfo) -> str:
        if value == "flex" and info.data.get("device") == "cpu":
            raise ValueError("auto or sdpa on the device cpu, where flex has no kernel")
        return value

    @property
    def kv_memory_bytes(self) -> int | None:
        """None for a part of what is free."""
        return self.kv_memory_mib * 2**20 or None


class TargetSettings(WorkerSettings):
    """The target worker's settings."""

    port: int = Field(50053, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    model: str = Field(..., min_length=1, description="Target model: hub id, directory or GGUF file.")
    deterministic: bool = Field(
        True,
        description="Whether greedy and seeded text must not depend on speculation and on other requests.",
    )
    feature_layers: str = Field(
        "auto",
        description="Decoder layers whose outputs are kept for drafters that ask for them: auto, none, or "
        "numbers from 0 such as 2+15+27; auto is what EAGLE-3 takes.",
    )


class DraftSettings(WorkerSettings):
    """The draft worker's settings."""

    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    drafters: Annotated[tuple[str, ...], NoDecode] = Field(
        ..., min_length=1, description="Drafters, separated by spaces: NAME[=CHECKPOINT][,key=value...]."
    )

    @field_validator("drafters", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(value.split())
        if isinstance(value, list | tuple):
            return tuple(word for item in value for word in str(item).split())
        return value


class CoordinatorSettings(ServerSettings):
    """The coordinator's settings."""

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    model: str = Field(
        ..., min_length=1, description="The target model's name: its tokenizer is read from it."
    )
    drafter: str = Field("", description="Drafter of requests that name none; empty: the first at hand.")
    num_draft_tokens: int | None = Field(
        None,
        ge=0,
        le=MAX_NUM_DRAFT_TOKENS,
        description="Proposal length of requests that give none; by default chosen anew for each round.",
    )
    overlap: Literal["auto", "plain", "sequential", "pipelined", "prefetch_pull", "prefetch_push"] = Field(
        "auto",
        description="What draft workers do while the target verifies, unless a request says; auto: chosen "
        "anew for each round.",
    )
    num_ahead: int = Field(
        8,
        ge=1,
        le=MAX_NUM_AHEAD,
        description="Proposals that a draft worker may be ahead, or verdicts that it may prepare for.",
    )
    max_requests: int = Field(256, ge=1, description="Requests that may run at once.")
    max_tokens: int = Field(4096, ge=1, description="Most tokens that one request may generate.")
    decode_window: int = Field(
        3, ge=1, description="Plain tokens that the target may run ahead of the coordinator."
    )
    draft_patience: float = Field(
        1.0,
        gt=0,
        description="Wait for a proposal at most this often the time that plain decoding would take.",
    )
    draft_timeout_s: float = Field(
        2.0, gt=0, description="Wait for a proposal at most this long, in seconds."
    )
    draft_retry_s: float = Field(
        1.0, gt=0, description="Seconds between attempts to find a draft worker for a running request."
    )
    client_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait, in seconds, for a client that doesn't read."
    )
    target_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait for a verdict or a fed prompt, in seconds."
    )
    session_lease_s: float = Field(
        30.0, gt=0, description="Seconds after which a silent coordinator loses a session."
    )
    session_keep_s: float = Field(
        600.0, ge=0, description="Seconds that an idle session and its KV are kept."
    )
    slow_round_s: float = Field(
        1.0,
        ge=0,
        description="Rounds that take as long are traced even when their request isn't sampled; 0 for none.",
    )

    @property
    def overlap_mode(self) -> Mode | None:
        """The mode of requests that name none; None when it is chosen."""
        return None if self.overlap == "auto" else Mode[self.overlap.upper()]


#: The processes by the name of their section in the file.
ROLES: Mapping[str, type[ServerSettings]] = {
    "coordinator": CoordinatorSettings,
    "draft": DraftSettings,
    "target": TargetSettings,
}
#: Variables with our prefix that something else than the settings reads.
OTHER_VARIABLES = frozenset({"SPLITSPEC_CACHE_DIR"})

S = TypeVar("S", bound=ServerSettings)


@dataclass(frozen=True)
class Setting:
    """One setting in effect. value: for people, without secrets. origin: which flag, variable or file."""

    name: str
    value: str
    origin: str


def load_settings(cls: type[S], arguments: Sequence[str] | None = None) -> S:
    """Settings from flags, environment and file.

    arguments: command-line flags, or None for none. Raises ConfigError that names each wrong setting
    as flag, variable and key of the file, its value, and what was expected. `--help` prints the flags and
    exits.
    """
    return _load(cls, arguments)[0]


def explain_settings(cls: type[ServerSettings], arguments: Sequence[str] | None = None) -> list[Setting]:
    """Every setting in effect, in the order of declaration. Arguments and errors as for `load_settings`."""
    settings, origins = _load(cls, arguments)
    return [
        Setting(name, _shown(getattr(settings, name)), origins.get(name, "default"))
        for name in cls.model_fields
    ]


def redacted(text: str) -> str:
    """The text with user and password of every URL in it replaced by stars."""
    text = re.sub(r"(?<=://)[^\s'\"]*@", "***@", text)
    return re.sub(r"(?<=[?&])(\w*(?:username|password))=[^&\s'\"]*", r"\1=***", text)


def _load(cls: type[S], arguments: Sequence[str] | None) -> tuple[S, dict[str, str]]:
    """The settings, and where each value that isn't a default comes from."""
    _check_variables(os.environ)
    flags = CliSettingsSource[Any](
        cls,
        cli_parse_args=list(arguments or ()),
        cli_prog_name=sys.argv[0].rsplit("/", 1)[-1],
    )()
    variables = EnvSettingsSource(cls)()
    path = str(flags.get("config") or variables.get("config") or "")
    keys = _read_file(cls, path) if path else {}
    origins = {
        **{name: f"file {path}" for name in keys},
        **{name: f"variable {_variable(name)}" for name in variables},
        **{name: f"flag {_flag(name)}" for name in flags},
    }
    try:
        return cls(**{**keys, **variables, **flags}), origins
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(dict(e), origins) for e in error.errors())) from None


def _check_variables(environment: Collection[str]) -> None:
    """Refuse variables that no process knows. Those of other roles are fine: one environment serves all."""
    known = OTHER_VARIABLES | {_variable(name) for cls in ROLES.values() for name in cls.model_fields}
    for name in sorted(environment):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise ConfigError(f"the variable {name} is unknown, expected {_nearest(name.upper(), known)}")


def _read_file(cls: type[ServerSettings], path: str) -> dict[str, Any]:
    """The file's values for one process: its section over the common keys."""
    where = f"{_places('config')} is {path!r}"
    try:
        document = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: {error}, expected a file that can be read") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: {error}, expected TOML") from None
    sections = {role: document.pop(role, {}) for role in ROLES}
    for role, section in sections.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{role} in {path} is {section!r}, expected the section [{role}]")
        for key in section:
            if key not in _keys(role):
                raise ConfigError(
                    f"{key} in [{role}] of {path} is unknown, expected {_nearest(key, _keys(role))}"
                )
    for key in document:
        _check_shared(key, path)
    own: dict[str, Any] = next((section for role, section in sections.items() if ROLES[role] is cls), {})
    keys = {key: value for key, value in document.items() if key in cls.model_fields} | own
    _check_types(cls, keys, path)
    return keys


def _keys(role: str) -> set[str]:
    return set(ROLES[role].model_fields) - {"config"}


def _check_shared(key: str, path: str) -> None:
    """Refuse a key at the top of the file unless two processes know it."""
    roles = [role for role in ROLES if key in _keys(role)]
    if len(roles) == 1:
        raise ConfigError(f"{key} stands at the top of {path}, expected it in the section [{roles[0]}]")
    if not roles:
        known = set().union(ROLES, *map(_keys, ROLES))
        raise ConfigError(f"{key} in {path} is unknown, expected {_nearest(key, known)}")


def _check_types(cls: type[ServerSettings], keys: Mapping[str, Any], path: str) -> None:
    """Refuse values of another type: TOML has types, so "8" is no number there."""
    origins = dict.fromkeys(keys, f"file {path}")
    # As JSON, whose strict mode takes an array for a tuple; dates have no counterpart and fit nowhere.
    for key, value in keys.items():
        try:
            TypeAdapter[Any](cls.model_fields[key].annotation or str).validate_json(
                json.dumps(value, default=lambda _: None), strict=True
            )
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise ConfigError(_wrong(key, value, message, origins)) from None


def _sentence(error: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    if error["type"] == "missing":
        return f"{_places(name)} is missing, expected a value"
    return _wrong(name, error["input"], error["msg"], origins)


def _wrong(name: str, value: object, message: str, origins: Mapping[str, str]) -> str:
    expected = message.removeprefix("Input should be ").removeprefix("Value error, ")
    return (
        f"{_places(name)} is {redacted(repr(value))} by {origins.get(name, 'default')}, expected {expected}"
    )


def _places(name: str) -> str:
    """Where a setting can be set: its flag, its variable, its key in the file."""
    key = "" if name == "config" else f", {name} in the file"
    return f"{_flag(name)} ({_variable(name)}{key})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _variable(name: str) -> str:
    return f"{ENV_PREFIX}{name.upper()}"


def _nearest(name: str, known: Collection[str]) -> str:
    """What was probably meant, or everything that could have been."""
    close = difflib.get_close_matches(name, known, n=1)
    return close[0] if close else f"one of: {', '.join(sorted(known))}"


def _shown(value: object) -> str:
    """A value as people read it."""
    if isinstance(value, tuple):
        return " ".join(redacted(str(item)) for item in value)
    return redacted(str(value)) or '""'
