"""Distillation: a draft of some of the target's layers learns, and is an ordinary model afterwards."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_worker.training.cache import load_batch
from draft_worker.training.commands import Options, parse_layers, train_distill
from draft_worker.training.distill import DistillTask
from draft_worker.training.loop import Plan, Training
from draft_worker.training.losses import DIVERGENCES
from splitspec.engine.causal_lm import CausalLM
from splitspec.engine.loading import load_library_model
from splitspec.errors import ConfigError, HandshakeError
from tests.engine import tiny as tiny_models
from tests.training import tiny_target
from tests.training.conftest import Tiny

CPU = torch.device("cpu")


def _train(tiny: Tiny, out: Path, divergence: str, on_policy_share: float) -> list[dict[str, float]]:
    student = load_library_model(tiny.directory, "tiny", torch.float32, CPU, [0, 3], None)
    task = DistillTask(student, tiny.teacher, divergence, on_policy_share)
    plan = Plan(12_000, tokens_per_batch=256, learning_rate=3e-3, warmup_steps=5, evaluate_every=10**9)
    Training(task, plan, out, tiny.rows[20:], tiny.rows[:20], "tiny", lambda figures: None).run()
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("divergence", "on_policy_share"), [*((name, 0.0) for name in DIVERGENCES), ("reverse_kl", 0.5)]
)
def test_distillation_makes_the_target_accept_more(
    tiny: Tiny, tmp_path: Path, divergence: str, on_policy_share: float
) -> None:
    before, *_, after = _train(tiny, tmp_path, divergence, on_policy_share)
    assert after["sampled_1"] > before["sampled_1"] + 0.05
    assert after["greedy_1"] > before["greedy_1"]


def test_on_policy_answers_are_the_drafts_and_judged_by_the_target(tiny: Tiny) -> None:
    student = load_library_model(tiny.directory, "tiny", torch.float32, CPU, [0, 3], None)
    batch = load_batch(tiny.rows[:6], CPU)
    torch.manual_seed(0)
    written = DistillTask(student, tiny.teacher, "reverse_kl", 1.0).rewritten(batch)
    places = torch.arange(batch.token_ids.shape[1])
    prompts = places < batch.answer_starts[:, None]
    assert torch.equal(written.token_ids[prompts], batch.token_ids[prompts])
    answers = ~prompts & (places < batch.lengths[:, None])
    assert (written.token_ids[answers] != batch.token_ids[answers]).float().mean() > 0.5
    with torch.inference_mode():
        clean = tiny.teacher.run(written.token_ids[:1, : batch.lengths[0]])[1][0]
    torch.testing.assert_close(written.hidden[0, : batch.lengths[0]].float(), clean, rtol=0.05, atol=0.05)


def test_the_draft_is_a_model_that_the_engine_loads(tiny: Tiny, tmp_path: Path) -> None:
    options = Options(str(tiny.directory), [tiny.data], tmp_path, 500, 256, 1e-3, 64, None, "cpu")
    train_distill(options, [0, 3], "forward_kl", 0.0)
    whole = tiny_models.load(tiny.directory)
    draft = CausalLM.load(tmp_path, name="draft", dtype="float32", device="cpu", kv_memory_bytes=1 << 20)
    assert draft.info.vocabulary_hash == whole.info.vocabulary_hash
    assert list(draft.info.eos_token_ids) == list(whole.info.eos_token_ids)
    assert draft.forward(draft.new_kv(), [5, 9, 8], 1).shape == (1, tiny_models.VOCABULARY)


@pytest.mark.parametrize("layers", ["", "1,2", "-1", "a"])
def test_wrong_layers_are_refused(layers: str) -> None:
    with pytest.raises(ConfigError, match="layers is"):
        parse_layers(layers)


def test_layers_that_the_target_lacks_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    options = Options(str(tiny.directory), [tiny.data], tmp_path, 500, 256, 1e-3, 64, None, "cpu")
    with pytest.raises(ConfigError, match="it has 4"):
        train_distill(options, [0, 4], "forward_kl", 0.0)


def test_a_training_for_another_target_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    options = Options(str(tiny.directory), [tiny.data], draft, 100, 256, 1e-3, 64, None, "cpu")
    train_distill(options, [0, 3], "forward_kl", 0.0)
    other = tiny_target.target(tmp_path / "other", seed=1)
    with pytest.raises(HandshakeError, match="a training for the target with the weights hash"):
        train_distill(replace(options, model=str(other)), [0, 3], "forward_kl", 0.0)
