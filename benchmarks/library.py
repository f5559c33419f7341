"""The library's own ways to generate, in a process of their own: `generate`, prompt lookup, assisted.

`LibraryProcess` starts this file and asks it, a line of JSON each way; it is idle between questions. Its
threads wait as torch has it by default, not as the workers' do: that is what the library's users get.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from splitspec.worker_environment import DEFAULTS

#: Its modes by their name in tables.
GENERATE, LOOKUP, ASSISTED = "library", "library lookup", "library assisted"
#: A prompt of 8,000 ids is about 50 kB.
_MAX_LINE_BYTES = 2**20


@dataclass(frozen=True)
class Asked:
    """One prompt for one mode. seed: of torch; it has no effect at temperature 0."""

    mode: str
    prompt: Sequence[int]
    temperature: float
    seed: int
    max_tokens: int


@dataclass(frozen=True)
class Answered:
    """passes: of the target, the prompt's included."""

    token_ids: list[int]
    seconds: float
    passes: int


class LibraryProcess:
    """The process, as an async context manager. threads: 0 leaves torch's choice.

    assistant: directory of a draft model for assisted generation; None leaves it out of `modes`.
    """

    def __init__(
        self, model: Path, dtype: str, threads: int, lookup_tokens: int, assistant: Path | None
    ) -> None:
        self.modes = [GENERATE, LOOKUP, *([ASSISTED] if assistant else [])]
        self._arguments = [f"--model={model}", f"--dtype={dtype}", f"--threads={threads}"]
        self._arguments += [f"--lookup-tokens={lookup_tokens}"]
        self._arguments += [f"--assistant={assistant}"] if assistant else []

    async def __aenter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if name not in DEFAULTS}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
            limit=_MAX_LINE_BYTES,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # which ends its loop
        await self._process.wait()

    async def ask(self, asked: Asked) -> Answered:
        """Raises RuntimeError when the process has ended; its last words are on stderr."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(asked)).encode() + b"\n")
        await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the library's process ended with code {await self._process.wait()}")
        return Answered(**json.loads(line))


class Library:
    """The library's model, and its assistant if there is one, in this process."""

    def __init__(self, model: Path, dtype: str, lookup_tokens: int, assistant: Path | None) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        def load(directory: Path) -> Any:
            return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))

        self._model = load(model)
        self._options: dict[str, dict[str, Any]] = {
            GENERATE: {},
            LOOKUP: {"prompt_lookup_num_tokens": lookup_tokens},
        }
        if assistant:
            self._options[ASSISTED] = {"assistant_model": load(assistant)}
        self._passes = 0
        self._model.register_forward_pre_hook(self._count)

    def answer(self, asked: Asked) -> Answered:
        import torch

        torch.manual_seed(asked.seed)
        ids = torch.tensor([asked.prompt])
        drawing: dict[str, Any] = {"do_sample": False}
        if asked.temperature:
            drawing = {"do_sample": True, "temperature": asked.temperature, "top_k": 0, "top_p": 1.0}
        self._passes = 0
        started = time.perf_counter()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=asked.max_tokens,
            **drawing,
            **self._options[asked.mode],
        )
        seconds = time.perf_counter() - started
        return Answered(output[0, len(asked.prompt) :].tolist(), seconds, self._passes)

    def _count(self, *_: object) -> None:
        self._passes += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--lookup-tokens", type=int, required=True)
    parser.add_argument("--assistant", type=Path)
    arguments = parser.parse_args()
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    library = Library(arguments.model, arguments.dtype, arguments.lookup_tokens, arguments.assistant)
    for line in sys.stdin:
        print(json.dumps(asdict(library.answer(Asked(**json.loads(line))))), flush=True)


if __name__ == "__main__":
    main()
