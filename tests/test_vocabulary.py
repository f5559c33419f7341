"""The table from ids to tokens: its hash, and the refusal of another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from splitspec.errors import ConfigError, HandshakeError
from splitspec.vocabulary import Vocabulary, check_same_vocabulary


def vocabulary(*tokens: str, added: tuple[str, ...] = ()) -> Vocabulary:
    table = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(table, unk_token=tokens[0]))
    tokenizer.add_special_tokens(list(added))
    return Vocabulary.of(tokenizer)


def test_the_hash_depends_on_the_table_alone() -> None:
    shuffled = Tokenizer(models.WordLevel({"c": 2, "a": 0, "b": 1}, unk_token="b"))
    assert Vocabulary.of(shuffled).hash == vocabulary("a", "b", "c").hash
    assert vocabulary("a", "b", added=("c",)).hash == vocabulary("a", "b", "c").hash


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(vocabulary("a", "b", "d"), id="another token"),
        pytest.param(vocabulary("a", "c", "b"), id="another order"),
        pytest.param(vocabulary("ab", "", "c"), id="the same characters"),
        pytest.param(vocabulary("a", "b", added=("<|c|>",)), id="another added token"),
        pytest.param(vocabulary("a", "b", "c", "d"), id="one more"),
    ],
)
def test_other_tables_are_refused_with_both_sides_named(other: Vocabulary) -> None:
    ours = vocabulary("a", "b", "c")
    assert other.hash != ours.hash
    with pytest.raises(HandshakeError) as raised:
        check_same_vocabulary("target big", ours, "draft small", other.hash, other.size)
    for part in ("target big", ours.hash, str(ours.size), "draft small", other.hash, str(other.size)):
        assert part in raised.value.message


def test_the_same_table_is_accepted() -> None:
    ours, theirs = vocabulary("a", "b"), vocabulary("a", "b")
    check_same_vocabulary("target", ours, "draft", theirs.hash, theirs.size)


def test_every_id_is_below_the_size() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 7}, unk_token="a"))
    assert Vocabulary.of(tokenizer).size == 8


def test_load_reads_a_model_directory(tmp_path: Path) -> None:
    saved = vocabulary("a", "b", added=("<s>",))
    saved.tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Vocabulary.load(tmp_path)
    assert (loaded.hash, loaded.size) == (saved.hash, 3)


def test_prompts_are_never_truncated_or_padded(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.enable_truncation(1)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Vocabulary.load(tmp_path).tokenizer
    assert loaded.truncation is None
    assert loaded.padding is None


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe", b"[]", b'{"version": "1.0"}'])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="expected a tokenizer") as raised:
        Vocabulary.load(tmp_path)
    assert str(path) in raised.value.message
