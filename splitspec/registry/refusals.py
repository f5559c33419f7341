"""Why Redis doesn't do what it is asked, as a sentence: its own words are about its scripts and settings."""

from __future__ import annotations

import re

from redis.asyncio.sentinel import MasterNotFoundError
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

#: What is wrong by the code of an answer, and what was expected.
_REASONS = {
    "READONLY": "is a replica, which takes no writes, expected the primary",
    "MASTERDOWN": "is a replica that has lost its primary, expected the primary",
    "LOADING": "is still loading its data, expected it ready: try again",
    "OOM": "is full (its maxmemory is used), expected room: raise it there, or wait until sessions end",
    "MISCONF": "can't save its data and so takes no writes, expected room on its disk: see its log",
    "NOREPLICAS": "takes no writes as it has too few replicas (min-replicas-to-write), expected enough",
    "NOAUTH": "expected another user or password than the url's",
    "WRONGPASS": "expected another user or password than the url's",
    "NOPERM": "doesn't let the url's user do what is needed, expected all commands on keys splitspec:*",
    "MOVED": "is one of a cluster's nodes, expected a server that holds every key",
    "ASK": "is one of a cluster's nodes, expected a server that holds every key",
    "CROSSSLOT": "is one of a cluster's nodes, expected a server that holds every key",
    "CLUSTERDOWN": "is one of a cluster's nodes that serves no keys, expected a server that holds every key",
    "DENIED": "takes no connections from other machines (protected mode), expected a password set there",
    "BUSY": "is busy with another program's script, expected it to answer: try again",
}
_BY_CLASS: dict[type[RedisError], str] = {
    ReadOnlyError: "READONLY",
    MasterDownError: "MASTERDOWN",
    BusyLoadingError: "LOADING",
    OutOfMemoryError: "OOM",
    AuthenticationError: "NOAUTH",
    NoPermissionError: "NOPERM",
    AskError: "MOVED",  # and MovedError, which is one
    ClusterDownError: "CLUSTERDOWN",
}
#: In Redis 6.2 the error of a script has the code within its text.
_CODE = re.compile(rf"(?:^|[\s-])({'|'.join(_REASONS)})\b")
#: Where a script failed, which Redis puts around the reason.
_SCRIPT = re.compile(r"^.*@?user_script:\s*\d+:\s*-?|\s*script: .*$", re.DOTALL)
#: Another server may be the right one by now.
_ELSEWHERE = {"READONLY", "MASTERDOWN", "MOVED", "ASK", "CLUSTERDOWN"}


def sentence(error: RedisError, shown_url: str) -> str:
    """What is wrong with the Redis of a url."""
    code = _code(error)
    if code:
        return f"Redis at {shown_url} {_REASONS[code]}"
    if isinstance(error, MasterNotFoundError):
        return f"the Sentinels at {shown_url} know no primary that runs, expected one of the url's service"
    text = _SCRIPT.sub("", str(error)) or type(error).__name__
    if isinstance(error, ResponseError):
        return f"Redis at {shown_url} refused a call, expected it to be taken: {text}"
    return f"no answer from Redis at {shown_url}, expected a running server: {text}"


def elsewhere(error: RedisError) -> bool:
    """Whether the primary may be another server than the one that answered."""
    return _code(error) in _ELSEWHERE


def _code(error: RedisError) -> str:
    for kind, code in _BY_CLASS.items():
        if isinstance(error, kind):
            return code
    found = _CODE.search(str(error))
    return found[1] if found else ""
