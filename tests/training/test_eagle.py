"""EAGLE training: the unrolled network is the one that drafts step by step, and it learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from draft_worker.eagle.network import EagleConfig, EagleNetwork
from draft_worker.training.acceptance import Acceptance
from draft_worker.training.cache import load_batch
from draft_worker.training.commands import eagle_network
from draft_worker.training.eagle import EagleTask, draft_vocabulary, judged, unroll
from draft_worker.training.loop import Plan, Training
from splitspec.errors import ConfigError, HandshakeError
from tests.training import tiny_target
from tests.training.conftest import Tiny

CPU = torch.device("cpu")
_DRAFT_VOCABULARY = 64


def _network(tiny: Tiny, out: Path) -> EagleNetwork:
    return eagle_network(out, tiny.teacher, "eagle3", _DRAFT_VOCABULARY, tiny.examples, tiny.rows)


def _training(tiny: Tiny, out: Path, tokens: int) -> Training:
    plan = Plan(tokens, tokens_per_batch=256, learning_rate=3e-3, warmup_steps=5, evaluate_every=10**9)
    task = EagleTask(_network(tiny, out), tiny.teacher, depth=3)
    return Training(task, plan, out, tiny.rows[20:], tiny.rows[:20], "tiny", lambda figures: None)


def _log(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_training_makes_the_target_accept_more(tiny: Tiny, tmp_path: Path) -> None:
    _training(tiny, tmp_path, 20_000).run()
    before, *_, after = _log(tmp_path)
    assert after["greedy_1"] > before["greedy_1"] + 0.1
    assert after["sampled_1"] > before["sampled_1"] + 0.1
    assert after["greedy_length"] > before["greedy_length"] + 0.1


def test_loss_falls(tiny: Tiny, tmp_path: Path) -> None:
    training = _training(tiny, tmp_path, 20_000)
    task = EagleTask(_network(tiny, tmp_path / "new"), tiny.teacher, depth=3)
    before = task.loss(tiny.rows[:20]).item()
    training.run()
    trained = EagleNetwork.load(tmp_path, EagleConfig.load(tmp_path)).float()
    assert EagleTask(trained, tiny.teacher, depth=3).loss(tiny.rows[:20]).item() < 0.8 * before


def test_a_resumed_training_ends_with_the_same_weights(tiny: Tiny, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _training(tiny, whole, 12_000).run()
    steps = 0

    def stopped() -> bool:
        nonlocal steps
        steps += 1
        return steps % 8 == 0

    runs = 0
    while True:
        training = _training(tiny, parts, 12_000)
        training.run(stopped)
        runs += 1
        if training.progress.tokens >= 12_000:
            break
    assert runs > 2
    weights = [EagleNetwork.load(out, EagleConfig.load(out)).state_dict() for out in (whole, parts)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_each_unrolled_step_is_the_step_of_a_drafting_chain(tiny: Tiny, tmp_path: Path) -> None:
    """From one anchor: features up to it in one causal pass, then token by token on its own outputs."""
    network = _network(tiny, tmp_path)
    torch.manual_seed(1)
    for parameter in network.parameters():
        parameter.data += torch.randn_like(parameter) * 0.1
    row = max(tiny.rows, key=lambda row: row.length)
    batch = load_batch([row], CPU)
    embeddings = tiny.teacher.embedding(batch.token_ids)
    depth, anchor = 4, batch.token_ids.shape[1] - 8
    with torch.no_grad():
        unrolled = [
            output[0, anchor] for output in unroll(network, batch.features.float(), embeddings, depth)
        ]
        hidden = network.fused(batch.features[:, : anchor + 1].float())
        keys = values = torch.empty(1, 2, 0, network.config.head_dim)
        for step in range(depth):
            start = anchor + step + 1 - hidden.shape[1]
            following = embeddings[:, start + 1 : anchor + step + 2]
            cos, sin = network.rotary(torch.arange(start, anchor + step + 1))
            residual, q, k, v = network.project(following, hidden, cos, sin)
            keys, values = torch.cat([keys, k], dim=2), torch.cat([values, v], dim=2)
            attended = functional.scaled_dot_product_attention(
                q, keys, values, is_causal=step == 0, enable_gqa=True
            )
            hidden = network.finish(residual, attended)[:, -1:]
            torch.testing.assert_close(unrolled[step], hidden[0, 0], rtol=1e-4, atol=1e-5)


def test_positions_judged_are_those_of_the_answer(tiny: Tiny) -> None:
    row = next(row for row in tiny.rows if row.num_answer_tokens >= 8)
    batch = load_batch([row], CPU)
    length = row.length
    for step, depth in ((0, 1), (2, 1), (0, 5)):
        _, anchors = judged(batch, step, depth)
        first_drafted = anchors + step + 2
        assert first_drafted[0] == row.answer_start
        # Behind the last token the target's distribution is known, if not a token.
        assert first_drafted[-1] + depth - 1 == length


def test_the_draft_vocabulary_has_the_most_frequent_ids_and_the_end() -> None:
    ids = draft_vocabulary([[9, 9, 9, 4], [4, 7, 9]], 3, [2])
    assert ids.tolist() == [2, 4, 9]
    assert ids.dtype == torch.int32


def test_draft_of_another_target_is_refused(tiny: Tiny, tmp_path: Path) -> None:
    _training(tiny, tmp_path, 256).run()
    other = tiny_target.teacher(tiny_target.target(tmp_path / "other", seed=1))
    with pytest.raises(HandshakeError, match=r"weights hash .*trained for"):
        eagle_network(tmp_path, other, "eagle3", _DRAFT_VOCABULARY, tiny.examples, tiny.rows)
    config = EagleConfig.load(tmp_path)
    with pytest.raises(HandshakeError, match="vocabulary hash"):
        config.check_target("words", config.target.weights_hash, "0" * 64)
    with pytest.raises(ConfigError, match=r"expected \(3,\)"):
        eagle_network(
            tmp_path,
            tiny_target.teacher(tiny.directory, (3,)),
            "eagle",
            _DRAFT_VOCABULARY,
            tiny.examples,
            tiny.rows,
        )


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"model_type": "llama"}, "model_type is not splitspec_eagle"),
        ({"feature_set": "eagle9"}, "a feature set out of eagle, eagle3"),
        ({"unknown": 1}, "config.json of an EAGLE draft"),
    ],
)
def test_wrong_config_is_refused(
    tiny: Tiny, tmp_path: Path, change: dict[str, object], expected: str
) -> None:
    _network(tiny, tmp_path / "new").save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=expected):
        EagleConfig.load(tmp_path)


def test_weights_of_another_shape_are_refused(tiny: Tiny, tmp_path: Path) -> None:
    network = _network(tiny, tmp_path / "new")
    network.save(tmp_path)
    config = EagleConfig.load(tmp_path)
    assert config == network.config
    fields = json.loads((tmp_path / "config.json").read_text()) | {"draft_vocabulary_size": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="the weights that its config"):
        EagleNetwork.load(tmp_path, EagleConfig.load(tmp_path))


def test_acceptance_counts_first_choices_and_shared_mass() -> None:
    """Two anchors, depth 2, a draft that knows the target's ids 1 and 3."""
    known = torch.tensor([1, 3])
    target = torch.log(torch.tensor([[[0.1, 0.6, 0.1, 0.2]] * 2, [[0.1, 0.2, 0.1, 0.6]] * 2]))
    draft = torch.log(torch.tensor([[[0.9, 0.1], [0.4, 0.6]], [[0.3, 0.7], [0.1, 0.9]]]))
    acceptance = Acceptance(2)
    acceptance.add(list(target), list(draft), known, greedy=True)
    acceptance.add(list(target), list(draft), known, greedy=False)
    figures = acceptance.figures()
    # The first anchor's choices are 1 and 3, as the target's; the second one's first is 3.
    assert figures["greedy_1"] == figures["greedy_2"] == 0.5
    assert figures["greedy_length"] == 2.0
    first = ((0.6 + 0.1) + (0.4 + 0.2)) / 2
    second = ((0.6 + 0.1) * (0.2 + 0.6) + (0.4 + 0.2) * (0.1 + 0.6)) / 2
    assert figures["sampled_1"] == pytest.approx(first)
    assert figures["sampled_2"] == pytest.approx(second)
    assert figures["sampled_length"] == pytest.approx(1 + first + second)
