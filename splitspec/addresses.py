"""host:port as text: IPv6 addresses in brackets, loopback, and what can only be listened on."""

from __future__ import annotations

import ipaddress
import re

_LOOPBACK = re.compile(r"(^|[/:@])(localhost|127(\.\d+){3}|\[?::1\]?)(:\d+)?(/.*)?$", re.IGNORECASE)


def joined(host: str, port: int) -> str:
    """host:port, with an IPv6 address in brackets; one that is in brackets already stays."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def normalised(address: str) -> str:
    """host:port with an IPv6 address in brackets, whether or not it came in them.

    Raises ValueError saying what was expected: also for an address that can't be connected to.
    """
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("host:port, with a port from 1 to 65535")
    if ":" in host and not _is_ip(host):
        raise ValueError("host:port, an IPv6 address as [address]:port")
    if is_wildcard(host):
        raise ValueError("an address that other processes can connect to")
    return joined(host, int(port))


def is_wildcard(host: str) -> bool:
    """Whether a host stands for all addresses of a machine: one can listen on it, and not connect to it."""
    host = host.removeprefix("[").removesuffix("]")
    return not host or (_is_ip(host) and ipaddress.ip_address(host).is_unspecified)


def is_loopback(address: str) -> bool:
    """Whether a gRPC target or a URL leads to this machine itself."""
    return _LOOPBACK.search(address) is not None


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
