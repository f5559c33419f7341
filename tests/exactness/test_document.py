"""docs/exactness.md names a test for each of its claims: each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_the_document_names_exists() -> None:
    text = TESTS.parent.joinpath("docs", "exactness.md").read_text()
    names = set(re.findall(r"`(?:(\w+)/)?(test_\w+)`", text))
    assert len(names) > 15
    for folder, name in names:
        places = [folder] if folder else ["", "exactness"]
        assert any((TESTS / place / f"{name}.py").exists() for place in places), (folder, name)
