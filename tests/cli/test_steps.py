from __future__ import annotations

import io

from rich.console import Console

from splitspec.cli.steps import Steps


def test_a_line_for_each_change_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    with Steps(Console(file=file)) as steps:
        steps.update("Redis", "redis://[::1]:1/0", True)
        steps.update("target worker", "loading m", False)
    assert file.getvalue() == "Redis: redis://[::1]:1/0\ntarget worker: loading m\n"


def test_what_was_not_done_is_marked_at_the_end() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, record=True, width=60)
    with Steps(console) as steps:
        steps.update("Redis", "ready", True)
        steps.update("target worker", "loading m", False)
        console.print(steps.render())
    running = console.export_text().splitlines()
    console.print(steps.render())
    assert any("loading m … 0 s" in line for line in running)
    assert [line.split() for line in console.export_text().splitlines()] == [
        ["✓", "Redis", "ready"],
        ["✗", "target", "worker", "loading", "m"],
    ]
