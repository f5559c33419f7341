"""Training data: one answer of the target a line, in JSON, as `splitspec train data` writes them."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from splitspec.errors import ConfigError

_VALIDATION_SHARE = 32


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the target's answer to it, as token ids of the target.

    token_ids: prompt in the chat template, then the answer. answer_start: index of the answer's first
    token. temperature: what the answer was sampled at.
    """

    token_ids: list[int]
    answer_start: int
    temperature: float

    @property
    def is_validation(self) -> bool:
        """One example in 32, by its prompt: a file that grows keeps its split."""
        prompt = json.dumps(self.token_ids[: self.answer_start])
        return zlib.crc32(prompt.encode()) % _VALIDATION_SHARE == 0


def read_examples(paths: Sequence[Path], tokenizer: Any, max_length: int) -> Iterator[Example]:
    """Examples of JSON lines files, .gz or not, cut to max_length tokens; prompts longer than half of that
    are left out.

    A line has `prompt`, the user's text, `response`, token ids, and `temperature`. tokenizer: the library's,
    with the chat template. Raises ConfigError naming the file and the line.
    """
    for path in paths:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
            for number, line in enumerate(file, start=1):
                try:
                    fields = json.loads(line)
                    prompt, answer = fields["prompt"], [int(index) for index in fields["response"]]
                    temperature = float(fields["temperature"])
                except (ValueError, KeyError, TypeError) as error:
                    raise ConfigError(
                        f"line {number} of {path} is not an example ({error}), expected JSON with prompt, "
                        f"response and temperature",
                        field="data",
                    ) from error
                ids = chat_ids(tokenizer, prompt)
                if len(ids) <= max_length // 2 and answer:
                    yield Example((ids + answer)[:max_length], len(ids), temperature)


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """The user's message in the target's chat template, up to where the answer begins."""
    messages = [{"role": "user", "content": prompt}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    ids: list[int] = encoded["input_ids"]
    return ids
