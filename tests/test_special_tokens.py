"""Special tokens from a model's files; the transformers library's own merge and classes are the oracle."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig
from transformers.models.auto import tokenization_auto as auto
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from splitspec.errors import ConfigError
from splitspec.special_tokens import SpecialTokens
from splitspec.tokenizer_classes import class_defaults

NAMES = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"]
#: In the tokenizer's table, and not all known to it as special.
WORDS = ["hi", "<unk>", "<s>", "</s>", "<a>", "<b>", "<image>", "<pad>"]
OBJECT = {"content": "<a>", "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
FAST = "PreTrainedTokenizerFast"


def save(directory: Path, padding: str = "", **files: Any) -> Path:
    """A model directory with these JSON files and a tokenizer that knows <s> alone as special."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<s>"])
    if padding:
        tokenizer.enable_padding(pad_token=padding, pad_id=WORDS.index(padding))
    tokenizer.save(str(directory / "tokenizer.json"))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


CASES: dict[str, dict[str, Any]] = {
    "map alone, strings": {"special_tokens_map": {"bos_token": "<s>", "eos_token": "</s>"}},
    "map alone, objects": {"special_tokens_map": {"bos_token": OBJECT}},
    "the map goes before the config": {
        "tokenizer_config": {"bos_token": "<s>", "eos_token": "</s>"},
        "special_tokens_map": {"bos_token": OBJECT, "eos_token": None},
    },
    "but not where the config describes the added tokens": {
        "tokenizer_config": {
            "bos_token": "<s>",
            "added_tokens_decoder": {"4": {**OBJECT, "special": True}, "5": {**OBJECT, "content": "<b>"}},
        },
        "special_tokens_map": {"bos_token": "<a>", "eos_token": "</s>"},
    },
    "object in the config": {"tokenizer_config": {"eos_token": {"__type": "AddedToken", **OBJECT}}},
    "null": {"tokenizer_config": {"bos_token": None, "eos_token": "</s>"}},
    "a model's own names": {
        "tokenizer_config": {"image_token": "<image>", "add_bos_token": True},
        "special_tokens_map": {"eos_token": "</s>"},
    },
    "named extras": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<image>"}}},
    "extras without a name": {
        "tokenizer_config": {"additional_special_tokens": ["<a>"]},
        "special_tokens_map": {"additional_special_tokens": ["<b>"]},
    },
    "extras in both files": {
        "tokenizer_config": {"additional_special_tokens": ["<b>"]},
        "special_tokens_map": {"extra_special_tokens": [OBJECT]},
    },
    "extras in the map alone": {"special_tokens_map": {"additional_special_tokens": ["<a>", "<b>"]}},
    "what it pads with": {"padding": "<pad>", "tokenizer_config": {}},
    "class": {"tokenizer_config": {"tokenizer_class": "GPTNeoXTokenizer", "eos_token": "</s>"}},
    "class, null": {"tokenizer_config": {"tokenizer_class": "LlamaTokenizerFast", "bos_token": None}},
    "class of the model": {"config": {"model_type": "gemma2"}},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_files_are_merged_as_the_library_merges_them(tmp_path: Path, case: dict[str, Any]) -> None:
    files = {"tokenizer_config": {}} | case
    if "config" not in files:
        files["tokenizer_config"] = {"tokenizer_class": FAST} | files["tokenizer_config"]
    directory = save(tmp_path, **files)
    tokens, oracle = SpecialTokens.load(directory), AutoTokenizer.from_pretrained(directory)
    assert tokens.named == oracle.special_tokens_map
    if files["tokenizer_config"].get("tokenizer_class") != FAST:
        return  # the library builds another tokenizer for these classes than the file holds
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokens.teach(tokenizer)
    for text in ("hi <s> hi</s><a>hi", "<b><image> <pad>"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == oracle.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_what_the_tokenizer_has_no_id_for_stays_out_of_its_table(tmp_path: Path) -> None:
    directory = save(tmp_path, special_tokens_map={"bos_token": "<new>", "eos_token": "</s>"})
    tokens, tokenizer = SpecialTokens.load(directory), Tokenizer.from_file(str(directory / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tokens.teach(tokenizer)
    assert tokenizer.get_vocab_size() == size
    assert tokens.unknown_to(tokenizer) == {"bos_token"}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "config.json"])
@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str) -> None:
    (save(tmp_path) / name).write_text(content)
    with pytest.raises(ConfigError, match="expected a JSON object") as raised:
        SpecialTokens.load(tmp_path)
    assert str(tmp_path / name) in raised.value.message


CLASSES = [
    *("CodeLlamaTokenizer", "CohereTokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "GemmaTokenizer"),
    *("LlamaTokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer", "XGLMTokenizer"),
]


@pytest.mark.parametrize("name", CLASSES)
def test_defaults_are_those_of_the_library_s_class(name: str) -> None:
    cls: Any = auto.tokenizer_class_from_name(name)
    parameters = inspect.signature(cls).parameters
    defaults = {key: parameters[key].default for key in NAMES if key in parameters}
    expected = {key: token for key, token in defaults.items() if token is not None}
    assert class_defaults(name, "", byte_level=False) == expected
    assert class_defaults(name + "Fast", "", byte_level=False) == expected


class ChosenError(Exception):
    """Tells which class the library would load."""


def chosen_class(monkeypatch: pytest.MonkeyPatch, directory: Path, config: PreTrainedConfig) -> str | None:
    """The class that the library loads; None where it refuses the model type."""

    def tell(cls: Any, /, *args: object, **kwargs: object) -> None:
        raise ChosenError(cls.__name__)

    for name in [*CLASSES, "TokenizersBackend"]:
        monkeypatch.setattr(auto.tokenizer_class_from_name(name), "from_pretrained", classmethod(tell))
    try:
        AutoTokenizer.from_pretrained(directory, config=config)
    except ChosenError as chosen:
        return str(chosen)
    except ValueError:
        return None
    pytest.fail("the library loads a class that isn't known here")


@functools.cache
def configs() -> list[PreTrainedConfig]:
    """Of causal models whose class, if the library has one, is one of those above."""
    found = []
    for model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        if auto.TOKENIZER_MAPPING_NAMES.get(model_type) in {None, "TokenizersBackend", *CLASSES}:
            with contextlib.suppress(Exception):  # some have no valid defaults
                found.append(AutoConfig.for_model(model_type))
    return found


@pytest.mark.parametrize("byte_level", [False, True])
@pytest.mark.parametrize("name", ["", "LlamaTokenizer", "GPT2TokenizerFast", FAST])
def test_the_class_is_the_one_that_the_library_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, byte_level: bool
) -> None:
    directory = save(tmp_path, tokenizer_config={"tokenizer_class": name} if name else {})
    if byte_level:
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(directory / "tokenizer.json"))
    wrong = {}
    for config in configs():
        with monkeypatch.context() as patch:
            chosen = chosen_class(patch, directory, config)
        expected = class_defaults(chosen, "", byte_level=False)
        if chosen and class_defaults(name or None, config.model_type, byte_level=byte_level) != expected:
            wrong[config.model_type] = expected
    assert not wrong


def test_an_added_token_that_is_described_as_special_is_left_out_of_text(tmp_path: Path) -> None:
    tokens = SpecialTokens({}, added=(AddedToken("<a>", special=True),))
    tokenizer = Tokenizer.from_file(str(save(tmp_path) / "tokenizer.json"))
    tokens.teach(tokenizer)
    assert tokenizer.decode([WORDS.index("hi"), WORDS.index("<a>")]) == "hi"
