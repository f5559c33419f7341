"""Training data: what the target writes is its own, and what is read is what was written."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from draft_worker.training import cache
from draft_worker.training.cache import FeatureCache, load_batch
from draft_worker.training.commands import write_data
from draft_worker.training.data import Example, chat_ids, read_examples
from draft_worker.training.generate import TEMPERATURES, DataWriter, read_prompts, user_turn_ids
from splitspec.errors import ConfigError
from tests.engine import tiny as tiny_models
from tests.training.conftest import Tiny


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _write(tiny: Tiny, out: Path, examples: int, prompts: Path | None = None) -> list[dict[str, Any]]:
    write_data(
        str(tiny.directory),
        out,
        examples,
        prompts,
        max_prompt_tokens=6,
        max_answer_tokens=8,
        parallel=4,
        dtype="float32",
        device="cpu",
    )
    return _records(out)


def test_answers_at_temperature_zero_are_the_targets_greedy_ones(tiny: Tiny) -> None:
    greedy = [example for example in tiny.examples if example.temperature == 0][:10]
    assert len(greedy) == 10
    for example in greedy:
        with torch.inference_mode():
            logits = tiny.teacher.model(torch.tensor([example.token_ids]), use_cache=False).logits[0]
        choices = logits[example.answer_start - 1 : -1].argmax(dim=-1)
        assert choices.tolist() == example.token_ids[example.answer_start :]


def test_answers_at_temperature_one_are_drawn_from_the_target(tiny: Tiny) -> None:
    """Not its greedy ones, and of tokens that it finds as likely as a draw of its own would be."""
    surprise = expected = 0.0
    for example in (example for example in tiny.examples if example.temperature == 1):
        with torch.inference_mode():
            logits = tiny.teacher.model(torch.tensor([example.token_ids]), use_cache=False).logits[0]
        log_p = logits[example.answer_start - 1 : -1].log_softmax(dim=-1)
        answer = torch.tensor(example.token_ids[example.answer_start :])
        surprise -= float(log_p.gather(-1, answer[:, None]).sum())
        expected -= float((log_p.exp() * log_p).sum())
    assert 0.8 * expected < surprise < 1.2 * expected


def test_temperatures_come_in_their_shares(tiny: Tiny) -> None:
    counts = Counter(record["temperature"] for record in _records(tiny.data))
    assert counts.keys() == set(TEMPERATURES)
    assert counts[0.0] > counts[0.7]


def test_answers_end_with_the_end_token_or_at_their_limit(tiny: Tiny) -> None:
    for record in _records(tiny.data):
        response = record["response"]
        assert 2 not in response[:-1]
        assert response[-1] == 2 or len(response) == 24


def test_own_prompts_begin_where_the_template_puts_the_users_text(tiny: Tiny) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.directory)
    assert user_turn_ids(tokenizer) == [5]
    assert chat_ids(tokenizer, "w9 w8") == [5, 9, 8, 2, 7]
    for example in tiny.examples:
        assert example.token_ids[0] == 5
        assert example.token_ids[example.answer_start - 2 : example.answer_start] == [2, 7]


def test_a_file_grows_to_the_wanted_length(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "data.jsonl"
    first = _write(tiny, out, 5)
    assert len(first) == 5
    out.write_text(out.read_text() + '{"prompt": "w9 unfini')
    grown = _write(tiny, out, 9)
    assert len(grown) == 9
    assert grown[:5] == first
    assert not any(record in first for record in grown[5:])
    assert _write(tiny, out, 9) == grown


def test_prompts_of_a_file_are_each_answered_once(tiny: Tiny, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "data.jsonl"
    prompts.write_text("".join(f"w{index} w9\n" for index in range(10, 20)))
    assert len(_write(tiny, out, 3, prompts)) == 3
    answered = [record["prompt"] for record in _write(tiny, out, 100, prompts)]
    assert sorted(answered) == prompts.read_text().splitlines()


def test_texts_take_turns_in_a_full_batch(tiny: Tiny) -> None:
    """A text that ends makes room at once: no pass but the last ones has fewer rows than there is room."""
    model = tiny_models.load(tiny.directory, kv_memory_bytes=1 << 24)
    sizes = []
    forward_batch = model.forward_batch

    def counted(feeds: Any) -> Any:
        sizes.append(len(feeds))
        return forward_batch(feeds)

    model.forward_batch = counted  # type: ignore[method-assign]
    tokenizer = AutoTokenizer.from_pretrained(tiny.directory)
    writer = DataWriter(model, tokenizer, parallel=4, max_prompt_tokens=6, max_answer_tokens=8, seed=0)
    assert len(list(itertools.islice(writer.records(None), 8))) == 8
    assert set(sizes) == {4}


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "one\n\ntwo words\n", ["one", "two words"]),
        ("a.jsonl", '"one"\n{"prompt": "two words", "id": 3}\n', ["one", "two words"]),
    ],
)
def test_prompt_files(tmp_path: Path, name: str, text: str, expected: list[str]) -> None:
    (tmp_path / name).write_text(text)
    assert read_prompts(tmp_path / name) == expected


def test_a_line_without_a_prompt_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('"one"\n{"question": "two"}\n')
    with pytest.raises(ConfigError, match="line 2 of"):
        read_prompts(path)


@pytest.mark.parametrize(
    "line", ["{", '{"prompt": "w9"}', '{"prompt": "w9", "response": 3, "temperature": 0}']
)
def test_a_broken_line_of_data_is_refused(tiny: Tiny, tmp_path: Path, line: str) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(tiny.data.read_text().splitlines()[0] + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=r"line 2 of .* is not an example"):
        list(read_examples([path], tiny.teacher.tokenizer, 64))


def test_long_texts_are_cut_and_compressed_files_read(tiny: Tiny, tmp_path: Path) -> None:
    record = {"prompt": "w9 w8", "response": list(range(10, 40)), "temperature": 0.7}
    path = tmp_path / "data.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(record) + "\n")
        file.write(json.dumps(record | {"prompt": "w9 " * 20}) + "\n")
    examples = list(read_examples([path], tiny.teacher.tokenizer, 16))
    assert examples == [Example([5, 9, 8, 2, 7, *range(10, 21)], 5, 0.7)]


def test_the_split_is_one_in_32_and_stays_when_the_data_grows() -> None:
    examples = [Example([index, index // 7, 5, 9], 3, 0.0) for index in range(4000)]
    chosen = [example for example in examples if example.is_validation]
    assert 80 < len(chosen) < 180
    again = [Example([*example.token_ids, 11], 3, 1.0) for example in chosen]
    assert all(example.is_validation for example in again)


def test_cached_features_are_those_of_a_clean_pass(tiny: Tiny) -> None:
    rows = sorted(tiny.rows, key=lambda row: row.length)[::30]
    batch = load_batch(rows, torch.device("cpu"))
    for place, row in enumerate(rows):
        ids = batch.token_ids[place, : row.length]
        assert ids.tolist() == tiny.examples[tiny.rows.index(row)].token_ids
        with torch.inference_mode():
            states = tiny.teacher.model(ids[None], use_cache=False, output_hidden_states=True).hidden_states
        for feature, layer in enumerate(tiny.teacher.layers):
            torch.testing.assert_close(
                batch.features[place, : row.length, feature].float(),
                states[layer + 1][0],
                rtol=0.01,
                atol=0.01,
            )
        torch.testing.assert_close(
            batch.hidden[place, : row.length].float(), states[-1][0], rtol=0.01, atol=0.01
        )
        assert not batch.features[place, row.length :].any()


def test_features_are_computed_once_and_only_for_new_data(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_ROWS_PER_SHARD", 8)
    features = FeatureCache(tmp_path, "tiny")

    def names(count: int, of: FeatureCache = features) -> set[str]:
        rows = of.rows(tiny.examples[:count], tiny.teacher, 256, lambda done: None)
        assert [row.num_answer_tokens for row in rows] == [
            len(example.token_ids) - example.answer_start for example in tiny.examples[:count]
        ]
        return {path.name for path in tmp_path.iterdir()}

    first = names(16)
    times = {name: (tmp_path / name).stat().st_mtime_ns for name in first}
    assert len(first) == 2
    grown = names(24)
    assert grown > first
    assert len(grown) == 3
    assert times == {name: (tmp_path / name).stat().st_mtime_ns for name in first}
    assert len(names(16, FeatureCache(tmp_path, "another target"))) == 5
    for path in tmp_path.iterdir():
        with safe_open(path, framework="pt") as shard:
            assert set(shard.keys()) == {"token_ids", "features", "hidden"}
