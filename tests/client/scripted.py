"""A real gRPC server whose answers a test writes down."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos.v1 import coordinator_pb2, coordinator_pb2_grpc
from splitspec.errors import SplitspecError, to_status
from splitspec.types import FinishReason, Origin, Rule

Answer = Callable[[grpc.ServicerContext], Iterable[coordinator_pb2.GenerateResponse]]


@dataclass
class Script(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """answer: the events of Generate. requests: all that came. ended: a call of Generate has ended."""

    answer: Answer = lambda context: whole()
    description: coordinator_pb2.DescribeResponse = field(default_factory=coordinator_pb2.DescribeResponse)
    requests: list[Any] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def Generate(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        context.add_callback(self.ended.set)
        try:
            yield from self.answer(context)
        except SplitspecError as error:
            context.abort_with_status(to_status(error))

    def CloseSession(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.requests.append(request)
        return coordinator_pb2.CloseSessionResponse(closed=request.session_id == "known")

    def Describe(self, request: Any, context: Any) -> Any:  # noqa: N802
        return self.description


@contextlib.contextmanager
def serving(script: Script) -> Iterator[str]:
    """The address of a server that answers as the script says."""
    with ThreadPoolExecutor(4) as pool:
        server = grpc.server(pool)
        coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server(script, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(grace=0).wait()


def started() -> coordinator_pb2.GenerateResponse:
    return coordinator_pb2.GenerateResponse(
        started=coordinator_pb2.Started(
            request_id="r", session_id="s", seed=2**64 - 1, prompt_tokens=5, cached_tokens=2
        )
    )


def chunk(offset: int, text: str, *tokens: tuple[int, Origin, int]) -> coordinator_pb2.GenerateResponse:
    """tokens: id, origin, text_end."""
    sent = [coordinator_pb2.Token(id=i, origin=origin.value, text_end=end) for i, origin, end in tokens]
    return coordinator_pb2.GenerateResponse(
        chunk=coordinator_pb2.Chunk(offset=offset, tokens=sent, text=text, durable=True)
    )


def finished() -> coordinator_pb2.GenerateResponse:
    return coordinator_pb2.GenerateResponse(
        finished=coordinator_pb2.Finished(
            reason=FinishReason.STOP_STRING.value,
            stop_string="!",
            usage=coordinator_pb2.Usage(prompt_tokens=5, cached_tokens=2, completion_tokens=4),
            acceptance=coordinator_pb2.AcceptanceStats(
                num_spec_steps=1,
                num_draft_tokens=2,
                num_accepted_draft_tokens=2,
                mean_acceptance_length=3.0,
                draft_acceptance_rate=1.0,
                acceptance_histogram=[0, 0, 1],
                num_plain_steps=1,
            ),
            timings=coordinator_pb2.Timings(total_us=1000, draft_us=300),
            rule=Rule.GREEDY.value,
            drafter="lookup",
        )
    )


def whole() -> list[coordinator_pb2.GenerateResponse]:
    """A generation of four tokens; the second one is half a character."""
    return [
        started(),
        chunk(0, "Grü", (7, Origin.PLAIN, 2), (8, Origin.ACCEPTED, 2), (9, Origin.ACCEPTED, 3)),
        chunk(3, "ße", (10, Origin.BONUS, 5)),
        finished(),
    ]
