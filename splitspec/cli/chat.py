"""`splitspec chat`: a conversation in one session, so that each turn feeds only what is new."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import sys
import threading
import uuid

from rich.console import Console
from rich.markup import escape

from splitspec.cli.generate import show
from splitspec.client import AsyncClient, GenerateOptions, Message
from splitspec.errors import InvalidRequestError, LostTokensError, OverloadedError, SplitspecError


async def converse(address: str, system: str, options: GenerateOptions, out: Console, err: Console) -> None:
    """Read a line, answer it, until the input ends; then the session is closed.

    A turn that is refused ends alone, and the conversation goes on from what was committed; one whose session
    the service has lost is sent again with the whole conversation; a server that can't be reached ends it.
    """
    session_id = f"chat-{uuid.uuid4().hex[:12]}"
    options["session_id"] = session_id
    err.print(f"session {session_id}; Ctrl-D ends it", style="dim")
    transcript = [Message("system", system)] if system else []
    unsent = list(transcript)
    async with AsyncClient(address) as client:
        try:
            while (line := await _next_line(err)) is not None:
                if not line.strip():
                    continue
                turn = Message("user", line)
                try:
                    generation = client.generate([*unsent, turn], **options)
                    try:
                        await show(generation, out, err)
                    except LostTokensError as error:
                        err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
                        await client.close_session(session_id, tenant=options.get("tenant"))
                        unsent = list(transcript)
                        generation = client.generate([*unsent, turn], **options)
                        await show(generation, out, err)
                except (InvalidRequestError, OverloadedError) as error:
                    err.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
                    continue
                transcript += [turn, Message("assistant", await generation.text())]
                unsent = []  # the session has them from now on
                usage = generation.finished.usage
                fed = usage.prompt_tokens - usage.cached_tokens
                words = f"{usage.completion_tokens} tokens; {fed} of {usage.prompt_tokens} prompt tokens fed"
                err.print(words, style="dim", soft_wrap=True)
        except BaseException:
            with contextlib.suppress(SplitspecError):  # what ends the conversation says more
                await client.close_session(session_id, tenant=options.get("tenant"))
            raise
        await client.close_session(session_id, tenant=options.get("tenant"))


async def _next_line(err: Console) -> str | None:
    """The next line of standard input, None at its end. A reader that is left behind holds nothing up."""
    read: concurrent.futures.Future[str | None] = concurrent.futures.Future()
    read.set_running_or_notify_cancel()  # so that it can be told also when nobody waits any more

    def work() -> None:
        try:
            read.set_result(_read_line(err))
        except BaseException as error:
            read.set_exception(error)

    threading.Thread(target=work, name="stdin", daemon=True).start()
    return await asyncio.wrap_future(read)


def _read_line(err: Console) -> str | None:
    if sys.stdin is None:  # closed by the caller
        return None
    if sys.stdin.isatty():
        err.print("> ", end="", style="bold")
        sys.stderr.flush()
    # By the file descriptor: the interpreter can't end while a thread holds the lock of `sys.stdin`.
    read = bytearray()
    while not read.endswith(b"\n") and (byte := os.read(sys.stdin.fileno(), 1)):
        read += byte
    return read.decode(sys.stdin.encoding, "surrogateescape").rstrip("\r\n") if read else None
