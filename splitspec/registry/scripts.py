"""Runs the Lua scripts of this folder on Redis, and maps all of redis-py's errors."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis.exceptions import AuthenticationError, RedisError

from splitspec.errors import ConfigError, UnavailableError
from splitspec.registry.connection import Client, hide_password
from splitspec.registry.refusals import elsewhere, sentence

#: Redis older than this lacks what the scripts use.
_MIN_VERSION = (6, 2)


class Scripts:
    """Runs scripts by EVALSHA; a server that lost them gets them again.

    Every script is safe to run twice, since a call whose answer was lost is tried again.
    """

    def __init__(self, client: Client, shown_url: str) -> None:
        self._client = client
        self._shown_url = shown_url
        self._scripts = {name: client.redis.register_script(text) for name, text in _sources().items()}

    @classmethod
    async def connect(cls, url: str) -> Scripts:
        """Raises ConfigError for a wrong url, password, version or a server that evicts keys.

        Raises UnavailableError without a server, or without the primary.
        """
        scripts = cls(Client(url), hide_password(url))
        try:
            await scripts._greet()
        except BaseException:
            await scripts.close()
            raise
        return scripts

    async def close(self) -> None:
        await self._client.close()

    async def run(self, name: str, keys: Sequence[str], *args: str | int | bytes) -> Any:
        """The script's reply. Raises UnavailableError when Redis can't be reached or refuses."""
        try:
            try:
                return await self._scripts[name](keys=keys, args=args)
            except RedisError as error:
                if not elsewhere(error):
                    raise
                await self._client.forget_connections()
                return await self._scripts[name](keys=keys, args=args)
        except RedisError as error:
            raise self._unavailable(error) from error

    async def _greet(self) -> None:
        try:
            info = await self._client.redis.info()
        except AuthenticationError as error:
            raise ConfigError(sentence(error, self._shown_url), field="redis_url") from error
        except RedisError as error:
            raise self._unavailable(error) from error
        check_version(str(info["redis_version"]), self._shown_url)
        # INFO tells what CONFIG GET would, which managed servers forbid. One that doesn't tell is trusted.
        check_eviction(info.get("maxmemory_policy", "noeviction"), info.get("maxmemory", 0), self._shown_url)
        # Fails where nothing can be written.
        await self.run("probe", ["splitspec:probe"])

    def _unavailable(self, error: RedisError) -> UnavailableError:
        return UnavailableError(sentence(error, self._shown_url))


def check_version(version: str, shown_url: str) -> None:
    """Raises ConfigError for a server that is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < _MIN_VERSION:
        expected = ".".join(map(str, _MIN_VERSION))
        raise ConfigError(
            f"Redis at {shown_url} has version {version}, expected at least {expected}", field="redis_url"
        )


def check_eviction(policy: str, maxmemory: int, shown_url: str) -> None:
    """Raises ConfigError for a server that evicts keys when it has used maxmemory bytes; 0 is no limit.

    A refusal and no warning: an eviction takes single keys, and every key here is one that may be taken. A
    session without its journal goes on as if it were new, and no error tells. That shows under load, weeks
    after a warning was last read; at the start it is one setting. Without evictions a full server refuses
    writes, which callers see as UnavailableError.
    """
    if maxmemory and policy != "noeviction":
        raise ConfigError(
            f"Redis at {shown_url} has maxmemory-policy {policy} and would drop running sessions when it is "
            "full, expected noeviction: set it there, or give the url of another Redis",
            field="redis_url",
        )


def _sources() -> dict[str, str]:
    """Each script by name, with what they share put before it."""
    files = [file for file in resources.files(__package__).iterdir() if file.name.endswith(".lua")]
    texts = {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in files}
    common = texts.pop("common")
    return {name: common + text for name, text in texts.items()}
