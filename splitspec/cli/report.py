"""The demo's table: speed, acceptance, and where the time of a round went."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from splitspec.client import Result

_INDENT = (1, 0, 0, 2)
_NOTES = (
    "tokens/s count the time after the prompt was fed. A round is one verification or one plain token; "
    "wire is waiting for a worker less its own time.",
    "At temperature 0 speculation gives the same tokens as plain decoding; above, tokens of the same "
    "distribution, so the words differ.",
    "hybrid quotes what the text has had before, and drafts with a small network that was trained on the "
    "target's own hidden states otherwise. On one machine both share its cores; apart, they don't.",
)


@dataclass(frozen=True)
class Played:
    """A scene that was run both ways. name: short, for the head of a column."""

    name: str
    plain: Result
    speculative: Result

    @property
    def speedup(self) -> float:
        return tokens_per_second(self.speculative) / tokens_per_second(self.plain)

    @property
    def same_tokens(self) -> bool:
        return self.plain.token_ids == self.speculative.token_ids


def tokens_per_second(result: Result) -> float:
    """Generated tokens over the time after the prompt was fed."""
    timings = result.finished.timings
    return result.finished.usage.completion_tokens / ((timings.total_us - timings.open_us) / 1e6)


def round_times_ms(result: Result) -> dict[str, float]:
    """Mean milliseconds of a round, by where they went; all of the time after the prompt was fed."""
    timings, acceptance = result.finished.timings, result.finished.acceptance
    rounds = acceptance.num_spec_steps + acceptance.num_plain_steps
    known = {
        "draft": timings.draft_us,
        "wire to draft": timings.draft_wire_us,
        "target": timings.target_us,
        "wire to target": timings.target_wire_us,
    }
    rest = timings.total_us - timings.open_us - sum(known.values())
    return {name: us / rounds / 1e3 for name, us in {**known, "coordinator": rest}.items()}


def report(played: Sequence[Played]) -> RenderableType:
    """A column for each scene."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2), header_style="bold")
    table.add_column("")
    for scene in played:
        table.add_column(f"{scene.name}\n{scene.speculative.finished.drafter}", justify="right")
    stats = [scene.speculative.finished.acceptance for scene in played]
    _row(table, "tokens/s, plain", [f"{tokens_per_second(scene.plain):.1f}" for scene in played])
    _row(table, "tokens/s, speculative", [f"{tokens_per_second(scene.speculative):.1f}" for scene in played])
    _row(table, "speculative / plain", [f"{scene.speedup:.2f} ×" for scene in played], style="bold")
    _row(table, "same tokens as plain", ["yes" if scene.same_tokens else "no" for scene in played])
    _row(table, "mean acceptance length", [f"{entry.mean_acceptance_length:.2f}" for entry in stats])
    _row(table, "draft acceptance rate", [f"{entry.draft_acceptance_rate:.2f}" for entry in stats])
    _row(table, "rounds with a proposal", [str(entry.num_spec_steps) for entry in stats])
    _row(table, "plain rounds", [str(entry.num_plain_steps) for entry in stats])
    table.add_section()
    times = [round_times_ms(scene.speculative) for scene in played]
    _row(table, "a speculative round, ms", [f"{sum(entry.values()):.1f}" for entry in times])
    for name in times[0]:
        _row(table, f"  {name}", [f"{entry[name]:.1f}" for entry in times], style="dim")
    notes = [Padding(Text(note, "dim"), (0, 0, 0, 2)) for note in _NOTES]
    return Padding(Group(table, *notes), _INDENT)


def _row(table: Table, name: str, values: list[str], style: str = "") -> None:
    table.add_row(name, *values, style=style)
