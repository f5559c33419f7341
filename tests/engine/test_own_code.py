"""Code that comes with a model is never run, and nobody is asked whether it may: one sentence says so."""

from __future__ import annotations

import builtins
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from draft_worker.drafters import DrafterSpec, Loading, build_drafter
from draft_worker.eagle.loading import load_eagle, load_embedding
from draft_worker.training.commands import write_data
from draft_worker.training.target import Teacher
from splitspec.engine.loading import count_layers, library_tokenizer
from splitspec.errors import ConfigError
from tests.draft_worker import eagles
from tests.engine import tiny

SENTENCE = r"one that the library has the code for \(what comes with it is never run\)$"
CODE = """
from pathlib import Path
Path(__file__).with_name("ran").touch()
from transformers import PretrainedConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(PretrainedConfig):
    model_type = "own"
class Model(LlamaForCausalLM):
    config_class = Config
class Own(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def _nobody_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Somebody at the terminal would agree."""
    questions: list[str] = []

    def agree(question: str = "") -> str:
        questions.append(question)
        return "y"

    monkeypatch.setattr(builtins, "input", agree)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    yield
    assert not questions


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A model whose config.json asks for code beside it."""
    directory = tiny.checkpoint(tmp_path / "model", tiny.CONFIGS["llama"])
    (directory / "own.py").write_text(CODE)
    asked = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    edit(directory / "config.json", model_type="own", architectures=["Model"], auto_map=asked)
    return directory


def edit(path: Path, **values: object) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(fields | values))


def draft_of(directory: Path) -> object:
    """Load an EAGLE draft of it, trained when it was a model as any other."""
    plain = directory.with_name("plain")
    tiny.checkpoint(plain, tiny.CONFIGS["llama"])
    draft = eagles.checkpoint(directory.with_name("draft"), plain)
    return load_eagle(draft, "draft", directory, "target", dtype="float32", device="cpu")


def data_of(directory: Path) -> None:
    out = directory.with_name("data.jsonl")
    settings = {"max_prompt_tokens": 4, "max_answer_tokens": 4, "parallel": 1}
    write_data(str(directory), out, 1, None, dtype="float32", device="cpu", **settings)


@pytest.mark.parametrize(
    "entry",
    [
        tiny.load,
        lambda directory: build_drafter(DrafterSpec.parse(f"model={directory}"), Loading("float32", "cpu")),
        lambda directory: build_drafter(
            DrafterSpec.parse(f"layer_skip={directory}"), Loading("float32", "cpu")
        ),
        draft_of,
        lambda directory: load_embedding(directory, "tiny"),
        lambda directory: count_layers(directory, "tiny"),
        lambda directory: Teacher.load(directory, "tiny", torch.float32, torch.device("cpu"), (1,)),
        data_of,
    ],
)
def test_of_a_config(directory: Path, entry: Callable[[Path], object]) -> None:
    with pytest.raises(ConfigError, match=SENTENCE) as caught:
        entry(directory)
    assert caught.value.field == "model"
    assert not (directory / "ran").exists()


def test_of_a_model(directory: Path) -> None:
    """The library knows the config, but no language model of it."""
    edit(directory / "config.json", model_type="clip_text_model", architectures=["Model"])
    with pytest.raises(ConfigError, match=SENTENCE):
        tiny.load(directory)
    assert not (directory / "ran").exists()


def test_of_a_tokenizer(directory: Path) -> None:
    edit(
        directory / "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": [None, "own.Own"]},
    )
    with pytest.raises(ConfigError, match=SENTENCE):
        library_tokenizer(directory, "tiny")
    assert not (directory / "ran").exists()


def test_a_model_that_the_library_has_needs_none(directory: Path) -> None:
    """Many publishers add code for older libraries."""
    edit(directory / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    (directory / "custom_generate").mkdir()
    (directory / "custom_generate" / "generate.py").write_text(CODE)
    assert tiny.load(directory).info.vocabulary_size == tiny.VOCABULARY
    assert not list(directory.rglob("ran"))
