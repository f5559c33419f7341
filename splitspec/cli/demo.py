"""`splitspec demo`: three scenes on a real model, each plain and speculative."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.rule import Rule as Line
from rich.table import Table
from rich.text import Text

from splitspec.cli.origins import Piece, legend, marked, needs_signs
from splitspec.cli.report import Played, report, tokens_per_second
from splitspec.cli.stack import Stack
from splitspec.cli.steps import Steps
from splitspec.client import AsyncClient, GenerateOptions, Message, Result
from splitspec.models import fetch_demo_model
from splitspec.types import Origin

_INDENT = (0, 0, 0, 2)
_ORIGINS = (Origin.ACCEPTED, Origin.CORRECTION, Origin.BONUS, Origin.PLAIN)
_READING = Text("reading the prompt …", style="dim")


@dataclass(frozen=True)
class Scene:
    """One prompt with its parameters. name: short, for the table. task: for the heading."""

    name: str
    task: str
    prompt: str
    options: GenerateOptions


@dataclass
class Column:
    """One of the two outputs as it grows."""

    title: str
    pieces: list[Piece] = field(default_factory=list)
    note: str = ""


def scenes() -> list[Scene]:
    text = Path(__file__).with_name("demo_text.txt").read_text()
    return [
        Scene(
            "question",
            "A question, greedy",
            "What is the capital of France, and what is it known for?",
            GenerateOptions(temperature=0, max_tokens=64),
        ),
        Scene(
            "summary",
            "A summary in the text's own sentences, greedy",
            f"Summarise this text by its most important sentences, word for word.\n\n{text}",
            GenerateOptions(temperature=0, max_tokens=96),
        ),
        Scene(
            "temperature 0.7",
            "A question at temperature 0.7",
            "Why do leaves turn yellow in autumn?",
            GenerateOptions(temperature=0.7, seed=7, max_tokens=64),
        ),
    ]


async def play(redis_url: str | None, console: Console) -> None:
    """Fetch the model, start everything, play the scenes, show the table, stop everything."""
    begun = time.monotonic()
    async with AsyncExitStack() as exits:
        with Steps(console) as steps:
            model = fetch_demo_model(
                lambda line: steps.update("demo model", line.removeprefix("demo model: "), False)
            )
            steps.update("demo model", model.name, True)
            trace = Path(tempfile.mkdtemp(prefix="splitspec-demo-")) / "trace.jsonl"
            flag = [f"--trace-file={trace}"]
            stack = Stack(
                model=model,
                drafters=["hybrid,drafter=eagle=demo,depth=2"],
                target_args=flag,
                draft_args=flag,
                # On one machine what is drafted ahead takes the target's cores.
                coordinator_args=[*flag, "--overlap=sequential", "--num-draft-tokens=8"],
                redis_url=redis_url,
                progress=steps.update,
            )
            await exits.enter_async_context(stack)
            client = await exits.enter_async_context(AsyncClient(stack.address))
            await _warm_up(client, steps)
        signs = needs_signs(console)
        console.print()
        console.print(Padding(legend(_ORIGINS, signs), _INDENT))
        played = []
        for number, scene in enumerate(scenes(), 1):
            show_scene(console, number, scene)
            played.append(await _play_scene(console, client, scene))
            if number == 1:
                seconds = time.monotonic() - begun
                console.print(
                    Padding(Text(f"first answers {seconds:.0f} s after the command", "dim"), _INDENT)
                )
        console.print(report(played))
        with console.status("stopping"):
            await exits.aclose()
        console.print(f"the trace of every request: {trace} (docs/telemetry.md)", soft_wrap=True)


async def _warm_up(client: AsyncClient, steps: Steps) -> None:
    """A model's first passes are slow, and would count against whoever comes first."""
    steps.update("warming up", "the first passes are slow", False)
    await client.generate("one two three one two three one two", temperature=0, max_tokens=32).result()
    steps.update("warming up", "done", True)


async def _play_scene(console: Console, client: AsyncClient, scene: Scene) -> Played:
    plain, speculative = Column("plain"), Column("speculative")
    columns = [plain]
    with Live(console=console, get_renderable=lambda: show_columns(columns, needs_signs(console))) as live:
        first = await _generate(client, scene, plain, speculate=False, changed=live.refresh)
        columns.append(speculative)
        second = await _generate(client, scene, speculative, speculate=True, changed=live.refresh)
        live.refresh()
    if not console.is_terminal:
        console.line()  # which Live only ends on a terminal
    return Played(scene.name, first, second)


async def _generate(
    client: AsyncClient, scene: Scene, column: Column, speculate: bool, changed: Callable[[], None]
) -> Result:
    options = scene.options.copy()
    options["speculate"] = speculate
    generation = client.generate([Message("user", scene.prompt)], **options)
    async for chunk in generation:
        column.pieces += [(token.origin, text) for token, text in chunk.pieces]
        changed()
    result = await generation.result()
    column.note = f"{tokens_per_second(result):.1f} tokens/s"
    return result


def show_scene(console: Console, number: int, scene: Scene) -> None:
    """The scene's heading, and the beginning of its prompt."""
    console.print()
    console.print(Line(Text(f"{number}  {scene.task}", "bold"), align="left", style="dim"))
    prompt = Text(" ".join(scene.prompt.split()), "dim", no_wrap=True, overflow="ellipsis")
    console.print(Padding(prompt, _INDENT))
    console.print()


def show_columns(columns: list[Column], signs: bool) -> RenderableType:
    """Both outputs side by side."""
    grid = Table.grid(expand=True, padding=(0, 2))
    for _ in range(2):
        grid.add_column(ratio=1)
    grid.add_row(*[Text.assemble((column.title, "bold"), ("  " + column.note, "dim")) for column in columns])
    grid.add_row(*[marked(column.pieces, signs) if column.pieces else _READING for column in columns])
    return Padding(grid, _INDENT)
