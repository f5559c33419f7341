"""What is being done and what is done, on standard error."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

_SPINNER = "dots"


@dataclass
class _Step:
    detail: str
    done: bool
    begun: float = field(default_factory=time.monotonic)


class Steps:
    """A line for each step, kept up to date on a terminal; elsewhere a line for each change."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._steps: dict[str, _Step] = {}
        self._spinner = Spinner(_SPINNER)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=10)
        self._ended = False

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        if self._console.is_terminal:
            self._live.stop()

    def update(self, step: str, detail: str, done: bool) -> None:
        """A step begins, does something else, or ends."""
        begun = self._steps[step].begun if step in self._steps else time.monotonic()
        self._steps[step] = _Step(detail, done, begun)
        if not self._console.is_terminal:
            self._console.print(f"{step}: {detail}", markup=False, soft_wrap=True)

    def render(self) -> Table:
        grid = Table.grid(padding=(0, 1))
        for name, step in self._steps.items():
            grid.add_row(self._symbol(step), Text(name), Text(self._detail(step), style="dim"))
        return grid

    def _symbol(self, step: _Step) -> Text | Spinner:
        if step.done:
            return Text("✓", style="green")
        return Text("✗", style="red") if self._ended else self._spinner

    def _detail(self, step: _Step) -> str:
        if step.done or self._ended:
            return step.detail
        return f"{step.detail} … {time.monotonic() - step.begun:.0f} s"
