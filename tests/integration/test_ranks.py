"""A target worker of two ranks under torchrun, in the place of one that is a single process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from protos.v1 import target_pb2
from splitspec.cli.process import ServerProcess
from splitspec.client import AsyncClient
from tests.integration.conftest import tiny_stack
from tests.waiting import until

pytestmark = [pytest.mark.model, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

SERVICE = target_pb2.DESCRIPTOR.services_by_name["TargetWorkerService"].full_name
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1", "-m"]
PROMPTS = [list(range(start, start + length)) for start, length in ((1000, 40), (2000, 9), (3000, 170))]


def ranks_of(torchrun: ServerProcess) -> list[int]:
    """Processes that it has started, the first rank first."""
    tasks = Path(f"/proc/{torchrun.pid}/task")
    children = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
    ranks = {}
    for pid in children:
        with contextlib.suppress(OSError):  # it has just ended
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks.update({int(v.removeprefix(b"RANK=")): pid for v in variables if v.startswith(b"RANK=")})
    return [ranks[index] for index in sorted(ranks)]


async def texts(client: AsyncClient, *, speculate: bool) -> list[list[int]]:
    """Greedy continuations of all prompts, generated at the same time."""

    async def one(prompt: Sequence[int]) -> list[int]:
        generation = client.generate(
            prompt, temperature=0.0, max_tokens=60, ignore_eos=True, speculate=speculate
        )
        return (await generation.result()).token_ids

    return list(await asyncio.gather(*map(one, PROMPTS)))


async def test_two_ranks_say_what_one_process_says_and_a_lost_rank_is_replaced(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with tiny_stack(tiny_model) as stack, AsyncClient(stack.address) as client:
        expected = await texts(client, speculate=False)
        arguments = [f"--model={tiny_model}", "--dtype=float32", f"--redis-url={stack.redis_url}"]
        target = ServerProcess("ranks", "target_worker", SERVICE, arguments, tmp_path, launcher=TORCHRUN)
        await target.start()
        try:
            await stack.target.kill()
            assert await texts(client, speculate=True) == expected
            first, second = ranks_of(target)
            os.kill(second, signal.SIGKILL)

            async def replaced() -> bool:
                return target.log_path.read_text().count("event='serving'") == 2

            await until(replaced)
            assert not {first, second} & set(ranks_of(target))
            assert "error: a rank of this worker was lost" in target.log_path.read_text()
            assert await texts(client, speculate=True) == expected
            last = ranks_of(target)
        finally:
            await target.stop()
        for pid in last:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        assert "error: " not in target.log_path.read_text().rpartition("event='serving'")[2]
