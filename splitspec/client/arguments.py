"""A call's arguments by their types: each check returns Python's own value, or refuses the caller's.

Numbers and lists may come from numpy or torch. An integer is what is integral by its type: True and 1.0
aren't. Every check raises InvalidRequestError, which names the argument, the value and what was expected.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any, SupportsFloat, SupportsIndex, TypeVar

from splitspec.addresses import normalised
from splitspec.errors import InvalidRequestError

_RESOLVERS = ("dns:", "unix:", "unix-abstract:", "ipv4:", "ipv6:", "xds:")
_YEAR_S = 365 * 24 * 3600.0

E = TypeVar("E", bound=enum.Enum)
V = TypeVar("V")


def integer(name: str, value: object, limit: int = 2**32) -> int:
    """An integer from 0 to limit - 1."""
    number = _plain(value)
    if isinstance(number, SupportsIndex) and not isinstance(number, bool):
        number = operator.index(number)
        if 0 <= number < limit:
            return number
    bound = f"2**{limit.bit_length() - 1}"
    raise InvalidRequestError.of(name, value, f"an integer from 0 to {bound} - 1")


def number(name: str, value: object) -> float:
    """A number; what is in range is known elsewhere."""
    plain = _plain(value)
    if isinstance(plain, SupportsFloat) and not isinstance(plain, bool):
        try:
            return float(plain)
        except (OverflowError, TypeError, ValueError):
            pass
    raise InvalidRequestError.of(name, value, "a number")


def flag(name: str, value: object) -> bool:
    plain = _plain(value)
    if not isinstance(plain, bool):
        raise InvalidRequestError.of(name, value, "True or False")
    return plain


def text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError.of(name, value, "text (str)")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        code = ord(value[error.start])
        # Python reads bytes that aren't text as U+DC80 to U+DCFF: arguments, file names.
        what = f"byte 0x{code & 0xFF:02x}" if 0xDC80 <= code <= 0xDCFF else f"lone surrogate U+{code:04X}"
        expected = f"text that UTF-8 can hold, without the {what} at index {error.start}"
        raise InvalidRequestError.of(name, value, expected) from None
    return value


def seconds(name: str, value: object) -> float:
    """A deadline."""
    duration = number(name, value)
    if not 0 < duration <= _YEAR_S:
        raise InvalidRequestError.of(name, value, f"seconds above 0 and at most {_YEAR_S:.0f}, a year")
    return duration


def member(kind: type[E], name: str, value: object) -> E:
    """A member of an enumeration."""
    if not isinstance(value, kind):
        known = ", ".join(f"{kind.__name__}.{each.name}" for each in kind)
        raise InvalidRequestError.of(name, value, f"one of {known}")
    return value


def items(name: str, value: object, expected: str) -> list[Any]:
    """The items of a list, a set, an array; text, bytes and mappings aren't lists."""
    plain = _plain(value)
    if isinstance(plain, str | bytes | bytearray | memoryview | Mapping) or not isinstance(plain, Collection):
        raise InvalidRequestError.of(name, value, expected)
    return list(plain)


def ordered(name: str, value: object, expected: str) -> list[Any]:
    """As `items`, but for sets, which have no order."""
    if isinstance(value, Set):
        raise InvalidRequestError.of(name, value, expected)
    return items(name, value, expected)


def integers(name: str, value: object) -> list[int]:
    values = items(name, value, "a list of integers")
    if all(type(each) is int for each in values) and values and min(values) >= 0 and max(values) < 2**32:
        return values  # the same as below, for prompts of 100,000 ids
    return checked_items(integer, name, values)


def texts(name: str, value: object) -> list[str]:
    return checked_items(text, name, items(name, value, "a list of texts"))


def checked_items(check: Callable[[str, object], V], name: str, values: list[Any]) -> list[V]:
    """What `check` makes of each; one that is wrong is named by its index."""
    return [check(f"{name}[{index}]", value) for index, value in enumerate(values)]


def numbers_by_id(name: str, value: object) -> dict[int, float]:
    """A mapping of token ids to numbers."""
    if not isinstance(value, Mapping):
        raise InvalidRequestError.of(name, value, "a mapping of token ids to numbers")
    try:
        return {integer(name, token): number(name, entry) for token, entry in value.items()}
    except InvalidRequestError:
        raise InvalidRequestError.of(
            name, value, "integers from 0 to 2**32 - 1, each with a number"
        ) from None


def coordinator_address(value: object) -> str:
    """host:port with an IPv6 address in brackets, or what names gRPC's resolver, such as dns:///host:port."""
    address = text("address", value)
    if address.startswith(_RESOLVERS):
        return address
    if "://" in address:
        raise InvalidRequestError.of("address", value, "host:port without a scheme")
    try:
        return normalised(address)
    except ValueError as error:
        raise InvalidRequestError.of("address", value, str(error)) from None


def _plain(value: Any) -> Any:
    """Arrays and scalars of numpy, torch and the like as Python's own values."""
    if hasattr(value, "tolist") and not isinstance(value, memoryview | type):
        return value.tolist()
    return value
