"""Training data without a data set: the target writes prompts, and answers them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draft_worker.training.data import chat_ids
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.feed import Feed
from splitspec.engine.kv import KV
from splitspec.errors import ConfigError

#: Greedy answers are what most requests of a served model come closest to, hence twice.
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
_PLACEHOLDER = "\x00"
_SHORTEST_PROMPT = 3


@dataclass(slots=True)
class _Turn:
    """A text that the target is writing. prompt: what it answers; None while it writes one itself."""

    kv: KV
    pending: list[int]
    prompt: str | None
    temperature: float
    written: list[int] = field(default_factory=list)


class DataWriter:
    """Writes answers with a batch of `parallel` texts at a time; as soon as one ends the next begins."""

    def __init__(
        self,
        model: CausalLM,
        tokenizer: Any,
        *,
        parallel: int,
        max_prompt_tokens: int,
        max_answer_tokens: int,
        seed: int,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._parallel = parallel
        self._max_tokens = {True: max_prompt_tokens, False: max_answer_tokens}
        self._generator = torch.Generator().manual_seed(seed)
        self._eos = set(model.info.eos_token_ids)
        self._temperatures = itertools.cycle(TEMPERATURES)

    def records(self, prompts: Iterable[str] | None) -> Iterator[dict[str, Any]]:
        """Records as `data.read_examples` reads them: of each prompt, or without end of the target's own."""
        wanted: Iterator[str | None] = itertools.repeat(None) if prompts is None else iter(prompts)
        turns: list[_Turn] = []
        while True:
            turns.extend(map(self._begin, itertools.islice(wanted, self._parallel - len(turns))))
            if not turns:
                return
            going: list[_Turn] = []
            for turn, token in zip(turns, self._next_tokens(turns), strict=True):
                turn.written.append(token)
                turn.pending = [token]
                own = turn.prompt is None
                if token not in self._eos and len(turn.written) < self._max_tokens[own]:
                    going.append(turn)
                    continue
                turn.kv.free()
                if not own:
                    yield {
                        "prompt": turn.prompt,
                        "response": turn.written,
                        "temperature": turn.temperature,
                    }
                elif len(turn.written) > _SHORTEST_PROMPT:
                    going.append(self._begin(self._text(turn.written)))
            turns = going

    def _begin(self, prompt: str | None) -> _Turn:
        """A turn to write an answer, or without a prompt to write one as a user would, at temperature 1."""
        ids = user_turn_ids(self._tokenizer) if prompt is None else chat_ids(self._tokenizer, prompt)
        kv = self._model.new_kv(token_ids=ids[:-1])
        temperature = 1.0 if prompt is None else next(self._temperatures)
        return _Turn(kv, ids[kv.length :], prompt, temperature)

    def _next_tokens(self, turns: Sequence[_Turn]) -> list[int]:
        logits = torch.cat(self._model.forward_batch([Feed(turn.kv, turn.pending, 1) for turn in turns]))
        temperatures = torch.tensor([turn.temperature for turn in turns])[:, None]
        drawn = torch.multinomial(
            (logits / temperatures.clamp_min(1e-6)).softmax(dim=-1), 1, generator=self._generator
        )
        tokens: list[int] = torch.where(temperatures == 0, logits.argmax(-1, keepdim=True), drawn)[
            :, 0
        ].tolist()
        return tokens

    def _text(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text.strip()


def user_turn_ids(tokenizer: Any) -> list[int]:
    """The target's chat template up to where the user's text begins."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _PLACEHOLDER}], tokenize=False)
    ids: list[int] = tokenizer(text[: text.index(_PLACEHOLDER)], add_special_tokens=False)["input_ids"]
    return ids


def read_prompts(path: Path) -> list[str]:
    """Prompts of a user's file: a line each, text as it is, or in JSON when the name ends in .jsonl, as a
    string or under `prompt`. Raises ConfigError naming the line.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        prompt: Any = line
        if path.suffix == ".jsonl":
            try:
                prompt = json.loads(line)
                prompt = prompt["prompt"] if isinstance(prompt, dict) else prompt
            except (ValueError, KeyError):
                prompt = None
        if not isinstance(prompt, str):
            raise ConfigError(
                f"line {number} of {path} is {line[:80]!r}, expected a JSON string or an object with prompt",
                field="prompts",
            )
        if prompt.strip():
            prompts.append(prompt)
    return prompts


def held_prompts(path: Path) -> list[str]:
    """Prompts of the records that a file holds; a last line that a killed process left is cut off."""
    if not path.exists():
        return []
    with path.open("rb+") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        file.truncate(end)
    return [json.loads(line)["prompt"] for line in content[:end].splitlines()]
