"""The error tree, and its one table to gRPC status.

    SplitspecError
    ├── InvalidRequestError      the caller's field is wrong
    ├── NotFoundError            an unknown drafter, model or session
    ├── SessionBusyError         another request runs on the session
    ├── StaleError               an older epoch: another coordinator owns the session
    ├── OutOfSyncError           the worker holds other tokens than the message builds on
    ├── LostTokensError          Redis holds less of a session than somebody knows of
    ├── HandshakeError           two processes that don't fit each other
    ├── OverloadedError          no room now; try again later
    ├── UnavailableError         a worker or Redis can't be reached
    └── ConfigError              a wrong setting or start condition; exit code 2

Every message says what was wrong, what was expected and whose fault it is. Over gRPC an error is a
google.rpc.Status with ErrorInfo, and with BadRequest or RetryInfo where they apply.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

_DOMAIN = "splitspec"


@dataclass(eq=False)
class SplitspecError(Exception):
    """Base of all errors. `field` names the request's field or the setting that is wrong."""

    message: str
    field: str = ""
    retry_after_s: float = 0.0

    def __str__(self) -> str:
        return self.message


class InvalidRequestError(SplitspecError):
    """A field of the caller's request is wrong."""

    @classmethod
    def of(cls, field: str, value: object, expected: str) -> InvalidRequestError:
        """The sentence that every wrong field gets: its name, its value, what was expected."""
        try:
            shown = repr(value)
        except Exception:  # an integer of too many digits, or an object of the caller's
            shown = f"an object of type {type(value).__name__}"
        if len(shown) > 80:
            shown = shown[:77] + "..."
        return cls(f"{field} is {shown}, expected {expected}", field=field)


class NotFoundError(SplitspecError):
    """The request names a drafter, model or session that doesn't exist here."""


class SessionBusyError(SplitspecError):
    """Another request is running on the session."""


class StaleError(SplitspecError):
    """The epoch is older than one already seen: another coordinator owns the session."""


class OutOfSyncError(SplitspecError):
    """The worker holds other tokens than those that the message builds on."""


class LostTokensError(SplitspecError):
    """Redis holds less of a session than its client, its last coordinator or a worker knows of."""


class HandshakeError(SplitspecError):
    """Two processes don't fit each other: protocol version, vocabulary or model."""


class OverloadedError(SplitspecError):
    """No room now; `retry_after_s` says when to come again."""


class UnavailableError(SplitspecError):
    """A worker or Redis can't be reached, or doesn't answer in time."""


class ConfigError(SplitspecError):
    """A wrong setting, or a start condition that isn't met."""


_STATUS: dict[type[SplitspecError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    NotFoundError: grpc.StatusCode.NOT_FOUND,
    SessionBusyError: grpc.StatusCode.ABORTED,
    StaleError: grpc.StatusCode.ABORTED,
    OutOfSyncError: grpc.StatusCode.FAILED_PRECONDITION,
    LostTokensError: grpc.StatusCode.DATA_LOSS,
    HandshakeError: grpc.StatusCode.FAILED_PRECONDITION,
    OverloadedError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
}
_BY_REASON = {cls.__name__: cls for cls in _STATUS}


def status_code(error: SplitspecError) -> grpc.StatusCode:
    """The gRPC status code of an error."""
    return _STATUS[type(error)]


def to_status(error: SplitspecError) -> grpc.Status:
    """The rich gRPC status of an error, for `context.abort_with_status`."""
    info = error_details_pb2.ErrorInfo(
        reason=type(error).__name__, domain=_DOMAIN, metadata={"field": error.field}
    )
    packed = [_pack(info)]
    if isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        packed.append(_pack(error_details_pb2.BadRequest(field_violations=[violation])))
    if error.retry_after_s:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_after_s * 1000))
        packed.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    code: int = status_code(error).value[0]
    message = status_pb2.Status(code=code, message=error.message, details=packed)
    status: grpc.Status = rpc_status.to_status(message)
    return status


def from_rpc_error(error: grpc.aio.AioRpcError | grpc.RpcError) -> SplitspecError | None:
    """The error that a splitspec server raised, or None when the status isn't one of ours.

    A server that can't be reached is an UnavailableError, so that callers need no gRPC codes.
    """
    status = rpc_status.from_call(error)
    if status is not None:
        for detail in status.details:
            info = error_details_pb2.ErrorInfo()
            if detail.Unpack(info) and info.domain == _DOMAIN and info.reason in _BY_REASON:
                retry = error_details_pb2.RetryInfo()
                delay = next(
                    (retry.retry_delay.ToMilliseconds() for d in status.details if d.Unpack(retry)), 0
                )
                return _BY_REASON[info.reason](status.message, info.metadata["field"], delay / 1000)
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(error.details() or "the server can't be reached")
    return None


def _pack(message: object) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)  # type: ignore[arg-type]
    return packed


__all__ = [
    "ConfigError",
    "HandshakeError",
    "InvalidRequestError",
    "LostTokensError",
    "NotFoundError",
    "OutOfSyncError",
    "OverloadedError",
    "SessionBusyError",
    "SplitspecError",
    "StaleError",
    "UnavailableError",
    "from_rpc_error",
    "status_code",
    "to_status",
]
