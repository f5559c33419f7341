"""Tokens shown by how they came to be: in colour, by text attributes, and where neither works by signs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from splitspec.types import Origin

#: A token's text with its origin.
Piece = tuple[Origin, str]


@dataclass(frozen=True)
class Mark:
    """style: colours, and attributes that tell the origins apart without them. signs: around the text."""

    style: str
    signs: tuple[str, str]
    meaning: str


MARKS = {
    Origin.ACCEPTED: Mark("green underline", ("[", "]"), "draft token that the target accepted"),
    Origin.CORRECTION: Mark("yellow bold", ("{", "}"), "the target's token at the first rejection"),
    Origin.BONUS: Mark("cyan bold underline", ("<", ">"), "the target's token after all were accepted"),
    Origin.PLAIN: Mark("", ("", ""), "the target's token without a draft"),
    Origin.REPEATED: Mark("dim", ("(", ")"), "token of an earlier attempt, sent again"),
}


def needs_signs(console: Console) -> bool:
    """The output shows no text attributes: a file, a pipe, a dumb terminal."""
    return console.color_system is None


def marked(pieces: Iterable[Piece], signs: bool) -> Text:
    """The text of tokens, each run of one origin with its mark."""
    text = Text()
    for origin, run in itertools.groupby(pieces, key=lambda piece: piece[0]):
        content = "".join(piece[1] for piece in run)
        mark = MARKS[origin]
        if content and signs:
            content = f"{mark.signs[0]}{content}{mark.signs[1]}"
        text.append(content, None if signs else mark.style)
    return text


def legend(origins: Collection[Origin], signs: bool) -> Text:
    """One line for each of these origins, in its own mark."""
    lines = []
    for origin, mark in MARKS.items():
        if origin not in origins:
            continue
        name = marked([(origin, origin.name.lower())], signs)
        lines.append(name + Text(" " * (14 - len(name)) + mark.meaning, style="dim"))
    return Text("\n").join(lines)
