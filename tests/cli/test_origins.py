from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.style import Style

from splitspec.cli.origins import MARKS, legend, marked, needs_signs
from splitspec.types import Origin

PIECES = [
    (Origin.PLAIN, "A"),
    (Origin.ACCEPTED, " b"),
    (Origin.ACCEPTED, " c"),
    (Origin.CORRECTION, " d"),
    (Origin.BONUS, ""),
    (Origin.BONUS, " e"),
]


def test_signs_go_around_each_run() -> None:
    assert marked(PIECES, signs=True).plain == "A[ b c]{ d}< e>"


def test_without_signs_the_text_is_untouched_and_each_origin_has_its_style() -> None:
    text = marked(PIECES, signs=False)
    assert text.plain == "A b c d e"
    styles = {text.plain[span.start : span.end]: span.style for span in text.spans}
    assert styles[" b c"] == MARKS[Origin.ACCEPTED].style
    assert styles[" e"] == MARKS[Origin.BONUS].style


def test_what_has_no_text_gets_no_signs() -> None:
    assert marked([(Origin.ACCEPTED, "")], signs=True).plain == ""


def test_markup_in_the_text_stays_text() -> None:
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(marked([(Origin.PLAIN, "[bold]:smile:")], signs=False), end="")
    assert console.export_text() == "[bold]:smile:"


def test_origins_differ_without_colour() -> None:
    attributes = {
        (style.bold, style.underline, style.italic, style.dim)
        for style in (Style.parse(mark.style) for mark in MARKS.values())
    }
    assert len(attributes) == len(MARKS)
    assert len({mark.signs for mark in MARKS.values()}) == len(MARKS)


@pytest.mark.parametrize("signs", [True, False])
def test_the_legend_names_every_origin_in_its_mark(signs: bool) -> None:
    lines = legend(list(Origin), signs).plain.splitlines()
    assert len(lines) == len(Origin)
    for origin, line in zip(MARKS, lines, strict=True):
        assert line.startswith(marked([(origin, origin.name.lower())], signs).plain)
        assert line.endswith(MARKS[origin].meaning)
    assert legend([Origin.PLAIN], signs).plain.split()[0] == "plain"


def test_signs_are_for_what_shows_no_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert needs_signs(Console(file=io.StringIO()))
    assert not needs_signs(Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not needs_signs(Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setenv("TERM", "dumb")
    assert needs_signs(Console(file=io.StringIO(), force_terminal=True))
