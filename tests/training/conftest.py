"""A tiny target, its answers and their features, made once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from draft_worker.training.cache import FeatureCache, Row
from draft_worker.training.data import Example
from draft_worker.training.target import Teacher
from tests.training import tiny_target


@dataclass(frozen=True)
class Tiny:
    """directory: the target's. data: its answers, JSON lines. rows: those of the examples, cached."""

    directory: Path
    data: Path
    teacher: Teacher
    examples: list[Example]
    rows: list[Row]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    root = tmp_path_factory.mktemp("training")
    directory = tiny_target.target(root / "target")
    data = tiny_target.write_data(directory, root / "data.jsonl", 120)
    teacher = tiny_target.teacher(directory)
    examples = tiny_target.examples(directory, data)
    rows = FeatureCache(root / "features", "tiny").rows(examples, teacher, 512, lambda done: None)
    return Tiny(directory, data, teacher, examples, rows)
