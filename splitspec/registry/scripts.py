"""The connection to Redis: runs the Lua scripts of this folder, and maps all of redis-py's errors."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, RedisError

from splitspec.errors import ConfigError, UnavailableError

#: Redis older than this lacks what the scripts use.
_MIN_VERSION = (6, 2)
#: A call takes about 0.2 ms; with its retries it gives up after about 3 s.
_TIMEOUT_S = 1.0
_RETRIES = 2
_MAX_CONNECTIONS = 32


class Scripts:
    """Runs scripts by EVALSHA; a server that lost them gets them again.

    Every script is safe to run twice, since a call whose answer was lost is tried again.
    """

    def __init__(self, client: Redis, shown_url: str) -> None:
        self._client = client
        self._shown_url = shown_url
        self._scripts = {name: client.register_script(text) for name, text in _sources().items()}

    @classmethod
    async def connect(cls, url: str) -> Scripts:
        """Raises ConfigError for a wrong url, password, version or a server that evicts keys.

        Raises UnavailableError without a server.
        """
        shown_url = hide_password(url)
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                max_connections=_MAX_CONNECTIONS,
                timeout=_TIMEOUT_S,
                socket_timeout=_TIMEOUT_S,
                socket_connect_timeout=_TIMEOUT_S,
                # The newer protocol brings nothing here, and a greeting that Redis 6.2 doesn't know.
                protocol=2,
                retry=Retry(ExponentialWithJitterBackoff(cap=0.2, base=0.05), _RETRIES),
            )
            # A connection checks the url's options when it is made, and not before.
            pool.connection_class(**pool.connection_kwargs)
        except (TypeError, ValueError):
            # The reason isn't shown: it may quote a piece of the password.
            raise ConfigError(
                f"{shown_url} isn't a url of Redis, expected redis://[[user]:password@]host[:port][/database]",
                field="redis_url",
            ) from None
        scripts = cls(Redis.from_pool(pool), shown_url)
        try:
            await scripts._greet()
        except BaseException:
            await scripts.close()
            raise
        return scripts

    async def close(self) -> None:
        await self._client.aclose()

    async def run(self, name: str, keys: Sequence[str], *args: str | int | bytes) -> Any:
        """The script's reply. Raises UnavailableError when Redis can't be reached or refuses."""
        try:
            return await self._scripts[name](keys=keys, args=args)
        except RedisError as error:
            raise self._unavailable(error) from error

    async def _greet(self) -> None:
        try:
            await self._client.ping()
            info = await self._client.info()
        except AuthenticationError as error:
            raise ConfigError(
                f"Redis at {self._shown_url} expected another user or password than the url's: {error}",
                field="redis_url",
            ) from error
        except RedisError as error:
            raise self._unavailable(error) from error
        check_version(str(info["redis_version"]), self._shown_url)
        # INFO tells what CONFIG GET would, which managed servers forbid. One that doesn't tell is trusted.
        check_eviction(info.get("maxmemory_policy", "noeviction"), info.get("maxmemory", 0), self._shown_url)

    def _unavailable(self, error: RedisError) -> UnavailableError:
        reason = str(error) or type(error).__name__
        return UnavailableError(
            f"no answer from Redis at {self._shown_url}, expected a running server: {reason}"
        )


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


def hide_password(url: str) -> str:
    """The url without user, password and options; a broken one is hidden as a whole."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "***"
    # An @ after the host: an unquoted character in the password has moved the boundaries.
    if parts.scheme not in ("redis", "rediss", "unix") or "@" in parts.path + parts.query + parts.fragment:
        return "***"
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{host}{port}{parts.path}"


def _sources() -> dict[str, str]:
    """Each script by name, with what they share put before it."""
    files = [file for file in resources.files(__package__).iterdir() if file.name.endswith(".lua")]
    texts = {file.name.removesuffix(".lua"): file.read_text(encoding="utf-8") for file in files}
    common = texts.pop("common")
    return {name: common + text for name, text in texts.items()}
