"""Whether a model's weights are those of its files: none invented, none left out, all of them numbers.

The library starts a parameter that it finds no tensor for at random, and passes over a tensor that it finds
no parameter for; both would change the text in silence.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from splitspec.errors import ConfigError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SAMPLE_BYTES = 4096
_SAMPLE_STRIDE = 1024 * 1024
_MOST_NAMED = 3
_LAYER = re.compile(r"^model\.(?:language_model\.)?layers\.(\d+)\.")
#: What only a layer that predicts a token further on has. Such layers follow the decoder's, and aren't run.
_MULTI_TOKEN = ".eh_proj."


def wrong_model(name: str, expected: str, error: Exception | None = None) -> ConfigError:
    """What every model gets that can't be used."""
    reason = f": {' '.join(str(error).split())[:300]}" if error else ""
    return ConfigError(f"model is {name!r}, expected {expected}{reason}", field="model")


def named(names: Iterable[str]) -> str:
    """A few of the names, and how many there are."""
    ordered = sorted(names)
    more = len(ordered) - _MOST_NAMED
    return ", ".join(ordered[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def weight_files(directory: Path, name: str) -> list[Path]:
    """The safetensors files that the library loads. Raises ConfigError naming `model` for missing ones."""
    if (directory / _SINGLE).is_file():
        return [directory / _SINGLE]
    try:
        index = json.loads((directory / _INDEX).read_text(encoding="utf-8"))
        files = sorted({directory / file for file in index["weight_map"].values()})
    except FileNotFoundError:
        raise wrong_model(name, f"a model with safetensors weights ({_SINGLE} or {_INDEX})") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise wrong_model(name, f"a model with a readable {_INDEX}", error) from error
    if missing := [file.name for file in files if not file.is_file()]:
        raise wrong_model(name, f"all files that its {_INDEX} lists (it lacks {named(missing)})")
    return files


def check_files(directory: Path, config: Any, name: str) -> None:
    """Raises ConfigError naming `model` for tensors that the library would pass over in silence: one that is
    there twice, or that belongs to a layer beyond those that the config has.
    """
    tensors = [tensor for file in weight_files(directory, name) for tensor in _header(file, name)[0]]
    if twice := [tensor for tensor, count in Counter(tensors).items() if count > 1]:
        raise wrong_model(name, f"each tensor in one file ({named(twice)} are in several)")
    count = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    if count is None:
        return
    layers: dict[int, list[str]] = {}
    for tensor in tensors:
        if (found := _LAYER.match(tensor)) and int(found[1]) >= count:
            layers.setdefault(int(found[1]), []).append(tensor)
    strange = [t for own in layers.values() if not any(_MULTI_TOKEN in t for t in own) for t in own]
    if strange:
        raise wrong_model(
            name, f"weights of the {count} layers that its config.json has (beyond them: {named(strange)})"
        )


def check_report(report: dict[str, Any], name: str) -> None:
    """report: the library's, of what it found for a model's parameters. Raises ConfigError naming `model`."""
    if wrong := wrong_weights(report):
        expected = "a tensor in its files for each parameter, and a parameter for each tensor"
        raise wrong_model(name, f"{expected} ({wrong})")


def wrong_weights(report: dict[str, Any]) -> str:
    """What the library's report says against a model; "" for nothing."""
    wrong = []
    if missing := report["missing_keys"]:
        wrong.append(f"missing: {named(missing)}")
    if unused := report["unexpected_keys"]:
        wrong.append(f"not used: {named(unused)}")
    if shapes := report["mismatched_keys"]:
        wrong.append(f"of another shape: {named(f'{key} {list(a)} for {list(b)}' for key, a, b in shapes)}")
    return "; ".join(wrong)


def not_finite(module: nn.Module) -> list[str]:
    """Parameters that hold something else than numbers."""
    return [
        path
        for path, weight in module.named_parameters()
        # What has a byte is a quantization's, and has no extremes on all devices.
        if weight.is_floating_point() and weight.element_size() > 1 and weight.numel() and not _finite(weight)
    ]


def _finite(weight: torch.Tensor) -> bool:
    return bool(torch.isfinite(torch.stack(torch.aminmax(weight.detach()))).all())


def check_finite(model: nn.Module, dtype: torch.dtype, name: str) -> None:
    """Raises ConfigError naming `model`."""
    if broken := not_finite(model):
        raise wrong_model(name, f"weights that are finite in {dtype} (not so: {named(broken)})")


def weights_hash(directory: Path) -> str:
    """Hash of a checkpoint's weights, however they are cut into files and whatever they are served as.

    Of each tensor it takes the name, shape and type, and 4 KiB of every MiB of content: a hash of 140 GB
    would take minutes at each start, and any training step changes nearly every weight. Raises ConfigError
    naming `model` for a directory without weights or with broken ones.
    """
    name = str(directory)
    tensors: list[tuple[str, str, list[int], str]] = []
    for path in weight_files(directory, name):
        header, start = _header(path, name)
        try:
            with path.open("rb") as file:
                for tensor, entry in header.items():
                    first, last = entry["data_offsets"]
                    content = hashlib.sha256()
                    for offset in range(start + first, start + last, _SAMPLE_STRIDE):
                        file.seek(offset)
                        content.update(file.read(min(_SAMPLE_BYTES, start + last - offset)))
                    tensors.append((tensor, entry["dtype"], entry["shape"], content.hexdigest()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _broken(name, path, error) from error
    return hashlib.sha256(json.dumps(sorted(tensors)).encode()).hexdigest()


def _header(path: Path, name: str) -> tuple[dict[str, Any], int]:
    """What a safetensors file says of each tensor, and where the first one begins."""
    try:
        with path.open("rb") as file:
            start = 8 + struct.unpack("<Q", file.read(8))[0]
            header: dict[str, Any] = json.loads(file.read(start - 8))
            header.pop("__metadata__", None)
            return header, start
    except Exception as error:  # any eight bytes are a length, and any text a header
        raise _broken(name, path, error) from error


def _broken(name: str, path: Path, error: Exception) -> ConfigError:
    return wrong_model(name, f"a model with intact safetensors weights ({path.name} is broken)", error)
