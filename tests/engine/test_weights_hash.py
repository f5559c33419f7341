"""The hash that says whether two checkpoints hold the same weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from splitspec.engine.loading import fingerprint
from splitspec.engine.weights import weights_hash
from splitspec.errors import ConfigError
from tests.engine import tiny


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tiny.checkpoint(tmp_path / "model", tiny.CONFIGS["llama"])


def test_files_and_their_metadata_dont_count(directory: Path) -> None:
    before = weights_hash(directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, chosen in (("a", names[::2]), ("b", names[1::2])):
        own = {name: tensors[name] for name in chosen}
        save_file(own, directory / f"{part}.safetensors", metadata={"format": "pt", "part": part})
    index = {name: f"{'ab'[place % 2]}.safetensors" for place, name in enumerate(names)}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert weights_hash(directory) == before


def test_element_type_and_device_that_it_is_served_with_dont_count(directory: Path) -> None:
    before = weights_hash(directory)
    cpu = torch.device("cpu")
    served = {fingerprint(directory, dtype, cpu, None) for dtype in (torch.float32, torch.bfloat16)}
    assert len(served) == 2
    assert weights_hash(directory) == before


@pytest.mark.parametrize("change", ["value", "name", "shape", "dtype"])
def test_other_weights_have_another_hash(directory: Path, change: str) -> None:
    before, path = weights_hash(directory), directory / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensor = tensors.pop(name)
    if change == "value":
        tensor[0, 0] += 1
    elif change == "shape":
        tensor = tensor.reshape(-1, 2).contiguous()
    elif change == "dtype":
        tensor = tensor.view(torch.int32)
    tensors[name + ".renamed" if change == "name" else name] = tensor
    save_file(tensors, path)
    assert weights_hash(directory) != before


def test_no_weights_and_broken_ones_are_refused(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model with safetensors weights"):
        weights_hash(tmp_path)
    (directory / "model.safetensors").write_bytes(b"\x07")
    with pytest.raises(ConfigError, match="expected a model with intact safetensors weights"):
        weights_hash(directory)
