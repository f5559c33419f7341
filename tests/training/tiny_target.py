"""A tiny random target with a chat template, and answers of it to train on."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_worker.training.data import Example, read_examples
from draft_worker.training.generate import DataWriter
from draft_worker.training.target import Teacher
from tests.engine import tiny

TEMPLATE = (
    "{% for message in messages %}w5 {{ message['content'] }} w2 {% endfor %}"
    "{% if add_generation_prompt %}w7{% endif %}"
)

_LAYER_SCALE = 0.3


def target(directory: Path, seed: int = 0) -> Path:
    """A Llama of four layers whose next token hangs mostly on the last one, so that much can be learned
    from few texts; w2 ends its texts.
    """
    tiny.checkpoint(directory, tiny.CONFIGS["llama"], seed=seed)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            if parameter.ndim == 2:
                parameter *= _LAYER_SCALE
    model.save_pretrained(directory)
    settings = {"eos_token": "w2", "tokenizer_class": "TokenizersBackend"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory


def teacher(directory: Path, layers: tuple[int, ...] = (1, 2)) -> Teacher:
    return Teacher.load(directory, "tiny", torch.float32, torch.device("cpu"), layers)


def write_data(directory: Path, path: Path, count: int) -> Path:
    """`count` answers of the target to prompts of its own."""
    model = tiny.load(directory, kv_memory_bytes=1 << 24)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    writer = DataWriter(model, tokenizer, parallel=16, max_prompt_tokens=6, max_answer_tokens=24, seed=0)
    with path.open("w") as file:
        for record in itertools.islice(writer.records(None), count):
            file.write(json.dumps(record) + "\n")
    return path


def examples(directory: Path, path: Path) -> list[Example]:
    return list(read_examples([path], AutoTokenizer.from_pretrained(directory), tiny.CONTEXT))
