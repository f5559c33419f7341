"""`splitspec up`: a stack that runs until it is interrupted or a process ends."""

from __future__ import annotations

import os
import signal
from contextlib import AsyncExitStack

from rich.console import Console

from splitspec.cli.stack import Stack
from splitspec.cli.steps import Steps


async def keep_up(stack: Stack, out: Console, err: Console) -> None:
    """Print the coordinator's address on `out`, all else on `err`.

    Raises SplitspecError when a process can't start or ends; everything is stopped in every case.
    """
    async with AsyncExitStack() as exits:
        with Steps(err) as steps:
            stack.progress = steps.update
            await exits.enter_async_context(stack)
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # as in the background of a script
        stop = f"kill {os.getpid()}" if ignored else "Ctrl-C"
        err.print(f"logs in {stack.log_dir}; {stop} stops everything", style="dim", soft_wrap=True)
        out.print(stack.address)
        exits.callback(lambda: err.print("stopping …", style="dim"))
        raise await stack.failed()
