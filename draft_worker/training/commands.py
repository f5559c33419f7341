"""The training commands, flags parsed: from a target and its data to a draft on disk."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from draft_worker.eagle.network import EagleConfig, EagleNetwork
from draft_worker.training.cache import FeatureCache, Row, load_batch
from draft_worker.training.data import Example, read_examples
from draft_worker.training.distill import DistillTask
from draft_worker.training.eagle import EagleTask, draft_vocabulary, eagle_config, initialise
from draft_worker.training.generate import DataWriter, held_prompts, read_prompts
from draft_worker.training.loop import Plan, Task, Training
from draft_worker.training.progress import Rate
from draft_worker.training.target import Teacher
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.features import parse_feature_layers
from splitspec.engine.loading import count_layers, library_tokenizer, load_library_model, parse_device
from splitspec.engine.weights import weights_hash
from splitspec.errors import ConfigError
from splitspec.models import fetch_demo_model, resolve_model

err = Console(highlight=False, stderr=True)
_TOKENS_PER_PASS = 2048
_SCALE_ROWS = 16


@dataclass(frozen=True, slots=True)
class Options:
    """What all trainings have in common; see the flags."""

    model: str
    data: Sequence[Path]
    out: Path
    tokens: int
    tokens_per_batch: int
    learning_rate: float
    max_length: int
    cache: Path | None
    device: str


def find_target(name: str) -> tuple[Path, str]:
    """The directory of a target, and its name for people; "demo" is the demo model, fetched once."""
    if name == "demo":
        return fetch_demo_model(), "SmolLM2-135M-Instruct"
    return resolve_model(name), name


def set_threads(threads: int) -> None:
    if threads:
        torch.set_num_threads(threads)


def write_data(
    model_name: str,
    out: Path,
    examples: int,
    prompts: Path | None,
    *,
    max_prompt_tokens: int,
    max_answer_tokens: int,
    parallel: int,
    dtype: str,
    device: str,
) -> None:
    """Bring `out` to so many lines, or to an answer of each prompt. Raises ConfigError for a wrong option."""
    directory, name = find_target(model_name)
    model = CausalLM.load(directory, name=name, dtype=dtype, device=device, deterministic=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    answered = held_prompts(out)
    begun = len(answered)
    writer = DataWriter(
        model,
        library_tokenizer(directory, name),
        parallel=parallel,
        max_prompt_tokens=max_prompt_tokens,
        max_answer_tokens=max_answer_tokens,
        # What was drawn for the lines that are there is not drawn again.
        seed=begun,
    )
    wanted = None
    missing = max(0, examples - begun)
    if prompts is not None:
        wanted = [prompt for prompt in read_prompts(prompts) if prompt not in answered]
        missing = min(missing, len(wanted))
    rate = Rate(err, "examples", begun, begun + missing)
    with out.open("a", encoding="utf-8") as file:
        for record in itertools.islice(writer.records(wanted), missing):
            file.write(json.dumps(record) + "\n")
            file.flush()
            rate.advance(1, tokens=len(record["response"]))


def train_eagle(options: Options, feature_set: str, draft_vocabulary_size: int, depth: int) -> None:
    """Raises ConfigError for a wrong option, HandshakeError when `out` has a draft of another target."""
    device = parse_device(options.device)
    directory, name = find_target(options.model)
    count = count_layers(directory, name)
    layers = parse_feature_layers("auto", count) if feature_set == "eagle3" else (count - 1,)
    teacher = Teacher.load(directory, name, torch.bfloat16, device, layers)
    examples = list(read_examples(options.data, teacher.tokenizer, options.max_length))
    rows = cached(options, teacher, examples)
    network = eagle_network(options.out, teacher, feature_set, draft_vocabulary_size, examples, rows)
    train(options, EagleTask(network.to(device), teacher, depth), rows, weights_hash(directory))


def eagle_network(
    out: Path,
    teacher: Teacher,
    feature_set: str,
    draft_vocabulary_size: int,
    examples: Sequence[Example],
    rows: Sequence[Row],
) -> EagleNetwork:
    """The draft that is being trained in `out`, else a new one, in float32."""
    answers = (example.token_ids[example.answer_start :] for example in examples)
    ids = draft_vocabulary(answers, draft_vocabulary_size, [teacher.tokenizer.eos_token_id])
    config = eagle_config(teacher, feature_set, len(ids))
    if not (out / "config.json").exists():
        torch.manual_seed(0)
        network = EagleNetwork(config)
        features = load_batch(rows[:_SCALE_ROWS], torch.device("cpu")).features[..., -1, :]
        sizes = features.float().square().mean(dim=-1).sqrt()
        initialise(network, teacher, ids, scale=float(sizes[sizes > 0].median()))
        return network
    found = EagleConfig.load(out)
    found.check_target(teacher.name, config.target.weights_hash, config.target.vocabulary_hash)
    if found.feature_layers != config.feature_layers:
        raise ConfigError(
            f"out has a draft of the layers {found.feature_layers}, expected {config.feature_layers}",
            field="out",
        )
    return EagleNetwork.load(out, found).float()


def parse_layers(text: str) -> list[int]:
    """Raises ConfigError for anything but numbers joined by +."""
    parts = text.split("+")
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"layers is {text!r}, expected layers such as 0+1+28+29", field="layers")
    return [int(part) for part in parts]


def train_distill(options: Options, layers: Sequence[int], divergence: str, on_policy_share: float) -> None:
    """Raises ConfigError for a wrong option."""
    device = parse_device(options.device)
    directory, name = find_target(options.model)
    teacher = Teacher.load(directory, name, torch.bfloat16, device, ())
    examples = list(read_examples(options.data, teacher.tokenizer, options.max_length))
    rows = cached(options, teacher, examples)
    resumed = (options.out / "config.json").exists()
    student = load_library_model(
        options.out if resumed else directory,
        name,
        torch.float32,
        device,
        None if resumed else layers,
        None,
    )
    task = DistillTask(student, teacher, divergence, on_policy_share)
    train(options, task, rows, weights_hash(directory))


def cached(options: Options, teacher: Teacher, examples: Sequence[Example]) -> list[Row]:
    identity = f"{weights_hash(teacher.directory)} {teacher.layers}"
    cache = FeatureCache(options.cache or options.out / "features", identity)

    def progress(done: int) -> None:
        err.print(f"features: {done} of {len(examples)} examples")

    return cache.rows(examples, teacher, _TOKENS_PER_PASS, progress)


def train(options: Options, task: Task, rows: Sequence[Row], target_hash: str) -> None:
    """Train to the end, or until SIGINT or SIGTERM."""
    signals: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, frame: signals.append(received))
    plan = Plan(options.tokens, options.tokens_per_batch, options.learning_rate)
    training = [row for row in rows if not row.is_validation]
    validation = [row for row in rows if row.is_validation]

    def report(figures: dict[str, float]) -> None:
        err.print("  ".join(f"{name} {value:g}" for name, value in figures.items()), soft_wrap=True)

    loop = Training(task, plan, options.out, training, validation, target_hash, report)
    loop.run(lambda: bool(signals))
