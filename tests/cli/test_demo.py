from __future__ import annotations

import io
import re

import pytest
from rich.console import Console, RenderableType

from splitspec.cli.demo import Column, Scene, scenes, show_columns, show_scene
from splitspec.cli.report import Played, report, round_times_ms, tokens_per_second
from splitspec.client import GenerateOptions
from splitspec.types import Origin
from tests.cli.recorded import result


def shown(renderable: RenderableType, width: int = 100) -> str:
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(renderable)
    return console.export_text()


def test_both_outputs_stand_side_by_side() -> None:
    plain = Column("plain", [(Origin.PLAIN, "It is Paris.")], "10.0 tokens/s")
    speculative = Column("speculative, lookup", [(Origin.ACCEPTED, "It is"), (Origin.BONUS, " Paris.")])
    lines = [line.split() for line in shown(show_columns([plain, speculative], signs=True)).splitlines()]
    assert lines[0] == ["plain", "10.0", "tokens/s", "speculative,", "lookup"]
    assert lines[1] == ["It", "is", "Paris.", "[It", "is]<", "Paris.>"]


def test_an_output_that_has_not_begun_says_what_it_waits_for() -> None:
    assert "reading the prompt" in shown(show_columns([Column("plain")], signs=True))


@pytest.mark.parametrize("width", [60, 80, 140])
def test_nothing_is_wider_than_the_terminal(width: int) -> None:
    scene = Scene("name", "A task", "long " * 100, GenerateOptions(drafter="lookup"))
    console = Console(file=io.StringIO(), record=True, width=width)
    show_scene(console, 1, scene)
    column = Column("plain", [(Origin.PLAIN, "zebra " * 60)])
    console.print(show_columns([column, column], signs=True))
    console.print(report([Played("question", result(), result(drafter="lookup"))]))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert len(re.findall("zebra", text)) == 120


def test_the_scenes_are_the_three_of_the_demo() -> None:
    question, summary, sampled = scenes()
    assert question.options["temperature"] == summary.options["temperature"] == 0
    assert len(summary.prompt.split()) > 300
    assert sampled.options["temperature"] == 0.7


def test_speed_leaves_the_prompt_out() -> None:
    assert tokens_per_second(result(total_us=2_500_000)) == pytest.approx(4 / 2.0)


def test_the_parts_of_a_round_add_up_to_all_of_the_time() -> None:
    times = round_times_ms(result(spec_steps=1, plain_steps=1))
    assert times == pytest.approx(
        {"draft": 100, "wire to draft": 25, "target": 500, "wire to target": 25, "coordinator": 350}
    )
    assert sum(times.values()) == pytest.approx(2_000 / 2)


def test_the_table() -> None:
    played = [
        Played(
            "question", result(), result(drafter="lookup", spec_steps=1, plain_steps=1, total_us=1_500_000)
        ),
        Played("warm", result(), result((1, 2, 9, 4), drafter="layer_skip", spec_steps=2, plain_steps=0)),
    ]
    rows = {
        line[:26].strip(): line[26:].split()
        for line in (line.strip() for line in shown(report(played)).splitlines())
    }
    assert rows["tokens/s, plain"] == ["2.0", "2.0"]
    assert rows["tokens/s, speculative"] == ["4.0", "2.0"]
    assert rows["speculative / plain"] == ["2.00", "×", "1.00", "×"]
    assert rows["same tokens as plain"] == ["yes", "no"]
    assert rows["mean acceptance length"] == ["3.00", "2.00"]
    assert rows["draft acceptance rate"] == ["0.50", "0.25"]
    assert rows["a speculative round, ms"] == ["500.0", "1000.0"]
    assert rows["target"] == ["500.0", "500.0"]
