"""A client of Redis by its url: one server, or the primary that Sentinels name, each with or without TLS."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.connection import Connection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import ExponentialWithJitterBackoff

from splitspec.errors import ConfigError

#: A call takes about 0.2 ms; with its retries it gives up after about 3 s.
_TIMEOUT_S = 1.0
_RETRIES = 2
_MAX_CONNECTIONS = 32
#: Schemes of Sentinels, and the one that their primary is reached by.
_SENTINEL_SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
_SENTINEL_PORT = 26379
#: Options of a Sentinel url that are for the Sentinels themselves.
_FOR_SENTINELS = {"sentinel_username": "username", "sentinel_password": "password"}


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary, of which a call waits for a free one."""


class Client:
    """redis-py's client, and the Sentinels that it asks for its primary."""

    def __init__(self, url: str) -> None:
        """Connects to nothing yet. Raises ConfigError for a wrong url."""
        shown_url = hide_password(url)
        try:
            self._sentinel = _sentinel(urlsplit(url))
            self.redis = _primary(self._sentinel, urlsplit(url)) if self._sentinel else _single(url)
        except (TypeError, ValueError):
            # The reason isn't shown: it may quote a piece of the password.
            raise ConfigError(
                f"{shown_url} isn't a url of Redis, expected redis://[[user]:password@]host[:port][/database],"
                " rediss:// for TLS, or redis+sentinel://[[user]:password@]host[:port],.../service[/database]",
                field="redis_url",
            ) from None

    async def forget_connections(self) -> None:
        """Close idle connections, so that the next call resolves the name, or asks the Sentinels, again."""
        await self.redis.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        await self.redis.aclose()
        if self._sentinel is not None:
            await self._sentinel.aclose()


def hide_password(url: str) -> str:
    """The url without user, password and options; a broken one is hidden as a whole."""
    try:
        parts = urlsplit(url)
        hosts = parts.netloc.rpartition("@")[2]
        if parts.scheme not in _SENTINEL_SCHEMES:
            port = f":{parts.port}" if parts.port else ""
            hosts = f"{parts.hostname or ''}{port}"
    except ValueError:
        return "***"
    # An @ after the host: an unquoted character in the password has moved the boundaries.
    known = parts.scheme in ("redis", "rediss", "unix", *_SENTINEL_SCHEMES)
    if not known or "@" in parts.path + parts.query + parts.fragment:
        return "***"
    return f"{parts.scheme}://{'***@' if '@' in parts.netloc else ''}{hosts}{parts.path}"


def _options() -> dict[str, Any]:
    """What every connection has."""
    return {
        "socket_timeout": _TIMEOUT_S,
        "socket_connect_timeout": _TIMEOUT_S,
        # The newer protocol brings nothing here, and a greeting that Redis 6.2 doesn't know.
        "protocol": 2,
        "retry": Retry(ExponentialWithJitterBackoff(cap=0.2, base=0.05), _RETRIES),
    }


def _single(url: str) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url, max_connections=_MAX_CONNECTIONS, timeout=_TIMEOUT_S, **_options()
    )
    # A connection checks the url's options when it is made, and not before.
    pool.connection_class(**pool.connection_kwargs)
    return Redis.from_pool(pool)


def _sentinel(url: SplitResult) -> Sentinel | None:
    """The Sentinels of a url; None for another url. Raises ValueError."""
    if url.scheme not in _SENTINEL_SCHEMES:
        return None
    given = dict(parse_qsl(url.query))
    own = {name: given[option] for option, name in _FOR_SENTINELS.items() if option in given}
    tls = {name: value for name, value in _of_primary(url).items() if name.startswith("ssl")}
    hosts = [_host_and_port(host) for host in url.netloc.rpartition("@")[2].split(",")]
    return Sentinel(hosts, sentinel_kwargs={**_options(), **own, **tls})  # type: ignore[no-untyped-call]


def _primary(sentinel: Sentinel, url: SplitResult) -> Redis:
    service = unquote(url.path.strip("/").partition("/")[0])
    if not service:
        raise ValueError("no service")
    options = {**_options(), **_of_primary(url)}
    pool = _SentinelPool(  # type: ignore[no-untyped-call]
        service, sentinel, max_connections=_MAX_CONNECTIONS, timeout=_TIMEOUT_S, **options
    )
    return Redis.from_pool(pool)


def _of_primary(url: SplitResult) -> dict[str, Any]:
    """A Sentinel url's user, password, database and options as redis-py reads those of one server's url."""
    credentials, _, _ = url.netloc.rpartition("@")
    database = url.path.strip("/").partition("/")[2]
    options = urlencode([(name, value) for name, value in parse_qsl(url.query) if name not in _FOR_SENTINELS])
    scheme = _SENTINEL_SCHEMES[url.scheme]
    read: dict[str, Any] = {
        **parse_url(urlunsplit((scheme, f"{credentials}@primary", f"/{database}", options, "")))
    }
    connection_class = read.pop("connection_class", Connection)
    connection_class(**read)  # which checks the options
    del read["host"]
    return {**read, "ssl": scheme == "rediss"}


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("no host")
    return parts.hostname, parts.port or _SENTINEL_PORT
