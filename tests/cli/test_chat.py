"""`splitspec chat` beside a server whose answers are written down."""

from __future__ import annotations

import io
from pathlib import Path

import grpc
import pytest
from rich.console import Console

from protos.v1 import coordinator_pb2
from splitspec.cli.chat import converse
from splitspec.errors import LostTokensError, OverloadedError
from tests.client.scripted import Script, serving, whole


def texts_of(request: coordinator_pb2.GenerateRequest) -> list[str]:
    return [message.content for message in request.chat.messages]


async def test_a_session_that_was_lost_is_begun_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = iter([None, LostTokensError("lost"), OverloadedError("full"), None, None])

    def answer(context: grpc.ServicerContext) -> list[coordinator_pb2.GenerateResponse]:
        error = next(answers)
        if error is not None:
            raise error
        return whole()

    (tmp_path / "lines").write_text("One?\nTwo?\nAgain?\nThree?\n")
    script = Script(answer)
    with serving(script) as address, (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        await converse(address, "Be brief.", {}, Console(file=io.StringIO()), Console(file=io.StringIO()))
    sent = [
        "close" if isinstance(request, coordinator_pb2.CloseSessionRequest) else texts_of(request)
        for request in script.requests
    ]
    said = "Grüße"
    assert sent == [
        ["Be brief.", "One?"],
        ["Two?"],
        "close",
        ["Be brief.", "One?", said, "Two?"],
        ["Be brief.", "One?", said, "Again?"],
        ["Three?"],
        "close",
    ]
