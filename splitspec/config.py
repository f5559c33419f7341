"""One frozen settings object per process: flags over environment (SPLITSPEC_*), read once at start."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from splitspec.errors import ConfigError
from splitspec.types import MAX_NUM_DRAFT_TOKENS

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

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    port_file: str = Field("", description="File that gets host:port once the server listens.")
    advertise: str = Field(
        "", description="host:port that other processes reach this one by; default: where it listens."
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis that holds sessions and the worker directory."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least level that is logged."
    )
    shutdown_grace_s: float = Field(30.0, ge=0, description="Seconds that running streams get after SIGTERM.")


class WorkerSettings(ServerSettings):
    """What both workers need."""

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Element type of the weights."
    )
    device: str = Field("cpu", description="Device of the model: cpu, cuda or cuda:N.")
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0 leaves torch's choice.")
    max_sessions: int = Field(64, ge=1, description="Handles that may be held at once.")
    directory_lease_s: float = Field(
        5.0, gt=0, description="Seconds after which a silent worker leaves the directory."
    )


class TargetSettings(WorkerSettings):
    """The target worker's settings."""

    port: int = Field(50053, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    model: str = Field(..., min_length=1, description="Target model: hub id, directory or GGUF file.")
    prompt_chunk: int = Field(256, ge=1, description="Prompt tokens that are fed in one pass.")


class DraftSettings(WorkerSettings):
    """The draft worker's settings."""

    port: int = Field(50052, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    drafters: Annotated[tuple[str, ...], NoDecode] = Field(
        ..., min_length=1, description="Drafters, separated by spaces: NAME[=CHECKPOINT][,key=value...]."
    )
    prompt_chunk: int = Field(256, ge=1, description="Prompt tokens that are fed in one pass.")

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
    num_draft_tokens: int = Field(
        4, ge=0, le=MAX_NUM_DRAFT_TOKENS, description="Proposal length of requests that give none."
    )
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
    target_timeout_s: float = Field(
        60.0, gt=0, description="Longest wait for a verdict or a fed prompt, in seconds."
    )
    session_lease_s: float = Field(
        30.0, gt=0, description="Seconds after which a silent coordinator loses a session."
    )
    session_keep_s: float = Field(
        600.0, ge=0, description="Seconds that an idle session and its KV are kept."
    )


S = TypeVar("S", bound=ServerSettings)


def load_settings(cls: type[S], arguments: Sequence[str] | None = None) -> S:
    """Settings from flags and environment.

    arguments: command-line flags, or None for none. Raises ConfigError that names each wrong setting
    as flag and variable, its value, and what was expected. `--help` prints the flags and exits.
    """
    flags = list(arguments) if arguments is not None else None
    try:
        return cls(_cli_parse_args=flags, _cli_prog_name=f"{sys.argv[0].rsplit('/', 1)[-1]}")
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(dict(e)) for e in error.errors())) from None


def _sentence(error: dict[str, object]) -> str:
    location = error["loc"]
    name = str(location[0]) if isinstance(location, tuple) and location else "settings"
    where = f"--{name.replace('_', '-')} ({ENV_PREFIX}{name.upper()})"
    if error["type"] == "missing":
        return f"{where} is missing, expected a value"
    return f"{where} is {error['input']!r}: {error['msg']}"
