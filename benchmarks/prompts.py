"""Prompts of Spec-Bench, the public benchmark of speculative decoding.

data/spec_bench.jsonl.gz: every second question of each category of hemingkx/Spec-Bench (Apache-2.0), by Xia
et al., "Unlocking efficiency in large language model inference", 2401.07851.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

_PATH = Path(__file__).parent / "data" / "spec_bench.jsonl.gz"
_GROUPS = {
    "translation": "translation",
    "summarization": "summarization",
    "qa": "question answering",
    "math_reasoning": "mathematics",
    "rag": "retrieval",
}
GROUPS = ("conversation", *_GROUPS.values())


@dataclass(frozen=True)
class Question:
    """group: one of six; the eight small categories of MT-bench are "conversation"."""

    id: int
    group: str
    turns: tuple[str, ...]


def questions(per_group: int | None, groups: Collection[str] = GROUPS) -> list[Question]:
    """The first `per_group` questions of each group, None for all; of conversation in turn from its
    categories."""
    found: defaultdict[str, list[Question]] = defaultdict(list)
    with gzip.open(_PATH, "rt", encoding="utf-8") as lines:
        for line in lines:
            record = json.loads(line)
            group = _GROUPS.get(record["category"], "conversation")
            found[group].append(Question(record["id"], group, tuple(record["turns"])))
    # Conversation's categories follow one another, five questions each.
    found["conversation"].sort(key=lambda question: question.id % 10)
    return [question for group in found if group in groups for question in found[group][:per_group]]


def prompts(directory: Path, per_group: int, length: int) -> list[tuple[int, ...]]:
    """First turns of Spec-Bench in the model's chat template, group by group, the last tokens of each."""
    tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    turns = [[{"role": "user", "content": question.turns[0]}] for question in questions(per_group)]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    return [tuple(text[-length:]) for text in texts]
