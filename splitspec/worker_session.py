"""A session's stream on a worker: what draft and target workers have in common."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeAlias, TypeVar

from protos.v1 import common_pb2
from splitspec.engine.scheduler import Scheduler, Steps, Timer
from splitspec.errors import InvalidRequestError
from splitspec.handles import HandleStore, offered_tokens
from splitspec.limits import MAX_FEATURE_LAYERS, check_count, check_names
from splitspec.serving import EOF
from splitspec.telemetry.worker import Watch, Work
from splitspec.tokens import TokenLog

S = TypeVar("S")
R = TypeVar("R")
Write: TypeAlias = Callable[[Any], Awaitable[None]]


class WorkerSession(abc.ABC, Generic[S]):
    """One stream: the committed tokens, and the worker's state for them (`held.state`)."""

    def __init__(
        self,
        handles: HandleStore[S],
        scheduler: Scheduler,
        request: Any,
        new_state: Callable[[], S],
    ) -> None:
        """request: the stream's first message. Raises what `HandleStore.attach` does, and InvalidRequestError
        for names that are too long.
        """
        opening = request.open
        check_names(
            stamp__session_id=request.stamp.session_id,
            open__handle=opening.handle,
            open__tenant=opening.tenant,
        )
        self.held = handles.attach(request.stamp, request.open.handle, request.open.tenant, new_state)
        self.opened = False
        self._handles = handles
        self._scheduler = scheduler
        self._lease_s = request.open.lease_ms / 1000
        #: The coordinator has the handle. One that it may not have isn't kept: nobody could release it.
        self.known = self.held.handle == request.open.handle

    @property
    @abc.abstractmethod
    def vocabulary_size(self) -> int:
        """Ids that the session's tokens may have."""

    @abc.abstractmethod
    def prepare(self, request: Any) -> None:
        """Take what an Open says beside its tokens. Raises InvalidRequestError."""

    @abc.abstractmethod
    def take_over(self, tokens: TokenLog) -> Steps[int]:
        """Make the state hold the tokens; how many it had already."""

    @abc.abstractmethod
    def rest(self) -> None:
        """Called on the model's thread once the stream has ended: the state may go where room is needed."""

    @abc.abstractmethod
    async def answer(self, kind: str, request: Any, timer: Timer, work: Work, write: Write) -> Any:
        """The answer to a message that is neither open nor close; None when it gets none from here.

        write: sends other answers before it or, from a task of the session's own, after it.
        """

    @property
    def features_length(self) -> int:
        """Tokens, from the first on, whose target features the state holds."""
        return 0

    async def open(self, request: Any, timer: Timer) -> common_pb2.Opened:
        """Take over the committed tokens, and feed those that lack. A repeated Open takes nothing back."""
        held = self.held
        held.check_epoch(request.stamp)
        if self.opened:
            return self._opened(len(held.tokens), timer)
        check_count("open.features.layers", request.open.features.layers, MAX_FEATURE_LAYERS)
        self.prepare(request)
        # Beside the loop: a long text takes tens of milliseconds to hash.
        offered = await asyncio.to_thread(
            offered_tokens, held.tokens, request.stamp, request.open, self.vocabulary_size
        )
        if not offered.complete:
            held.tokens = offered.tokens
            return self._opened(0, timer)
        cached = await self.run(self.take_over(offered.tokens), timer)
        held.tokens = offered.tokens
        held.revision, held.round = request.stamp.revision, request.stamp.round
        self.opened = True
        return self._opened(cached, timer)

    def close(self, request: Any) -> int:
        """The final cut: the committed length is shortened to base_length; returns what stays held.

        A draft worker may not have been told the last tokens yet: the next Open brings them.
        """
        held = self.held
        held.check_epoch(request.stamp)
        held.tokens.truncate(min(request.stamp.base_length, len(held.tokens)))
        if not request.close.keep_handle:
            self._lease_s = 0
        return len(held.tokens) if self._lease_s else 0

    def detach(self) -> None:
        if not self.known:
            self._lease_s = 0
        self._handles.detach(self.held, self._lease_s)
        if self._lease_s and not self.held.fenced:  # else it was freed, or is another stream's
            self._scheduler.post(self.rest)

    async def run(self, steps: Steps[R], timer: Timer, stopped: Callable[[], bool] = lambda: False) -> R:
        """A job's result. Raises StaleError when the session got a new owner in the meantime.

        stopped: as for `Scheduler.run`.
        """
        try:
            result = await self._scheduler.run(steps, timer, lambda: self.held.fenced or stopped())
        except asyncio.CancelledError:
            self.check_fence()
            raise
        self.check_fence()
        return result

    def check_fence(self) -> None:
        if self.held.fenced:
            self.held.check_epoch(self.held.stamp())

    def _opened(self, cached_length: int, timer: Timer) -> common_pb2.Opened:
        return common_pb2.Opened(
            handle=self.held.handle,
            length=len(self.held.tokens),
            cached_length=cached_length,
            timings=timer.to_proto(),
            features_length=self.features_length,
        )


async def serve_session(
    context: Any, watch: Watch, begin: Callable[[Any], WorkerSession[Any]], response: Callable[..., Any]
) -> None:
    """Answer a stream's messages one after the other. begin: the session of its first message.

    response: makes an answer of `opened` or `closed`.
    """
    session: WorkerSession[Any] | None = None
    writing = asyncio.Lock()

    async def write(answer: Any) -> None:
        async with writing:
            await context.write(answer)

    try:
        while (request := await context.read()) is not EOF:
            timer = Timer()
            kind = request.WhichOneof("message")
            with watch.message(request) as work:
                if session is not None and kind != "open":  # whoever goes on has noted the handle
                    session.known = True
                if kind == "open":
                    session = session or begin(request)
                    opened = await session.open(request, timer)
                    work.opened(opened, request.stamp.base_length)
                    answer = response(opened=opened)
                elif session is None or not session.opened:
                    raise InvalidRequestError.of("message", kind, "open first, until it is complete")
                elif kind == "close":
                    answer = response(closed=common_pb2.Closed(length=session.close(request)))
                else:
                    answer = await session.answer(kind, request, timer, work, write)
            if answer is not None:
                await write(answer)
            if kind == "close":
                return
    finally:
        if session is not None:
            session.detach()
