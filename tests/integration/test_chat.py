"""`splitspec chat` as a user runs it, with lines from a pipe, on the demo model's stack."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from splitspec.cli.stack import Stack
from tests.integration.conftest import settle_empty

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session")]

LINES = b"My name is Ada. Say hello.\n\n" + b"word " * 9000 + b"\nWhat is my name?\n"


async def test_chat_is_one_session(stack: Stack) -> None:
    program = Path(sys.executable).with_name("splitspec")
    arguments = ["chat", stack.address, "--temperature", "0", "--max-tokens", "30", "--drafter", "lookup"]
    process = await asyncio.create_subprocess_exec(
        program,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate(LINES)
    assert process.returncode == 0, errors
    assert len([line for line in output.decode().splitlines() if line]) >= 2
    # The turn that is too long ends alone; the empty line is none.
    assert errors.decode().count("error: prompt is") == 1
    turns = re.findall(r"(\d+) of (\d+) prompt tokens fed", errors.decode())
    assert len(turns) == 2
    (first, whole), (second, longer) = [(int(fed), int(total)) for fed, total in turns]
    assert first == whole
    assert second < 20 < longer
    # The session is closed with the chat.
    await settle_empty(stack)


async def test_chat_without_a_server() -> None:
    program = Path(sys.executable).with_name("splitspec")
    process = await asyncio.create_subprocess_exec(
        program,
        "chat",
        "127.0.0.1:1",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    _, errors = await process.communicate(b"hello\n")
    assert process.returncode == 1
    assert errors.decode().splitlines()[-1].startswith("error: ")
    assert b"Traceback" not in errors
