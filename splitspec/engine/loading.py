"""A checkpoint directory to a library model, with every start condition checked by name."""

from __future__ import annotations

import hashlib
import inspect
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils import logging as library_logging

from splitspec.errors import ConfigError

if TYPE_CHECKING:
    from splitspec.engine.parallel import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAMPLE_BYTES = 4096
_SAMPLE_STRIDE = 1024 * 1024


def parse_dtype(name: str) -> torch.dtype:
    """Raises ConfigError for anything but the three element types."""
    if name not in DTYPES:
        raise ConfigError(f"dtype is {name!r}, expected one of {', '.join(DTYPES)}", field="dtype")
    return DTYPES[name]


def parse_attention(name: str) -> bool | None:
    """Whether one kernel attends to all sessions of a pass; None where that depends on the device. Raises
    ConfigError for another name.
    """
    known = {"auto": None, "flex": True, "sdpa": False}
    if name not in known:
        raise ConfigError(f"attention is {name!r}, expected one of {', '.join(known)}", field="attention")
    return known[name]


def parse_device(name: str) -> torch.device:
    """Raises ConfigError unless it is "cpu", or "cuda" or "cuda:N" and there."""
    expected = ConfigError(
        f"device is {name!r}, expected cpu, or cuda or cuda:N with such a GPU", field="device"
    )
    try:
        device = torch.device(name)
    except RuntimeError:
        raise expected from None
    if device.type == "cuda" and (device.index or 0) < torch.cuda.device_count():
        return device
    if device != torch.device("cpu"):
        raise expected
    return device


def count_layers(directory: Path, name: str) -> int:
    """Decoder layers of a checkpoint, without loading it. Raises ConfigError naming `model`."""
    count: int = _config(directory, name).get_text_config(decoder=True).num_hidden_layers
    return count


def load_library_model(
    directory: Path,
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    keep_layers: Sequence[int] | None,
    ranks: Ranks | None,
) -> PreTrainedModel:
    """The library's model, in eval mode on the device; of several ranks this one's share of it.

    Raises ConfigError naming `model` for an architecture that the library doesn't know, that can't be
    rewound, that always gives logits of all positions, or that can't be split between ranks; for missing
    or broken weights; and for a layer that doesn't exist.
    """
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    config = _config(directory, name)
    if config.is_encoder_decoder or (kinds := _unrewindable(config)):
        what = "an encoder" if config.is_encoder_decoder else ", ".join(kinds)
        raise wrong_model(name, f"a model whose KV can be rewound ({config.model_type} has {what})")
    split = {} if ranks is None else ranks.loading_options(config, name)
    model: Any
    report: dict[str, Any]
    # The library raises all sorts of errors for broken weights; each means that this model can't be used.
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **split,
        )  # type: ignore[misc]
    except Exception as error:
        raise wrong_model(name, "a causal language model with safetensors weights", error) from error
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise wrong_model(
            name, f"weights for every parameter ({len(missing)} are missing, such as {missing[0]})"
        )
    if model._is_stateful:
        raise wrong_model(name, f"a model whose KV can be rewound ({config.model_type} has other state)")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise wrong_model(name, f"a model that can leave out logits ({config.model_type} can't)")
    if ranks is not None:
        ranks.keep_own_shards(model, name)
    if keep_layers is not None:
        _keep_layers(model, name, keep_layers)
    loaded: PreTrainedModel = model.to(device).eval()
    return loaded


def _unrewindable(config: Any) -> list[str]:
    """Kinds of the library's cache layers for this model that the paged pool can't stand in for.

    Full attention and sliding or chunked windows differ by their mask alone. Recurrent states,
    convolutions, layers that share KV and sparse indexers hold other state.
    """
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})


def _config(directory: Path, name: str) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise wrong_model(name, "a model with a readable config.json", error) from error


def decoder_layers(model: PreTrainedModel, name: str) -> nn.ModuleList:
    """The decoder's layers. Raises ConfigError naming `model` for a model without a list of them."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    if layers is None:
        raise wrong_model(name, f"a model with one list of its {count} layers, so that they can be chosen")
    return layers


def _keep_layers(model: PreTrainedModel, name: str, keep_layers: Sequence[int]) -> None:
    """Leave out all other decoder layers and renumber the kept ones, so that their cache is dense."""
    config = model.config.get_text_config(decoder=True)
    count = config.num_hidden_layers
    if not keep_layers or not all(0 <= index < count for index in keep_layers):
        raise wrong_model(name, f"to have the layers {list(keep_layers)} (it has {count}, counted from 0)")
    layers = decoder_layers(model, name)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in keep_layers]
    config.num_hidden_layers = len(keep_layers)
    kept = [layers[index] for index in keep_layers]
    del layers[:]
    layers.extend(kept)
    for index, layer in enumerate(kept):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = index  # type: ignore[assignment]


def max_context(config: Any, name: str) -> int:
    """Most tokens that positions are exact for.

    "longrope" changes the rotation of all positions once a text passes the original length: tokens
    verified in one pass and one by one would then see different keys. Such a model is served up to there.
    """
    text = config.get_text_config(decoder=True)
    longest = getattr(text, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise wrong_model(name, "max_position_embeddings in its config.json")
    rope = getattr(text, "rope_parameters", None) or {}
    for parameters in [rope, *(value for value in rope.values() if isinstance(value, dict))]:
        if parameters.get("rope_type") == "longrope":
            longest = min(longest, parameters["original_max_position_embeddings"])
    return longest


def fingerprint(
    directory: Path, dtype: torch.dtype, device: torch.device, keep_layers: Sequence[int] | None
) -> str:
    """Hash of what the model computes: config.json, weights, kept layers, element type and device class."""
    kept = None if keep_layers is None else list(keep_layers)
    digest = hashlib.sha256((directory / "config.json").read_bytes())
    digest.update(json.dumps([str(dtype), device.type, kept, weights_hash(directory)]).encode())
    return digest.hexdigest()


def weights_hash(directory: Path) -> str:
    """Hash of a checkpoint's weights, however they are cut into files and whatever they are served as.

    Of each tensor it takes the name, shape and type, and 4 KiB of every MiB of content: a hash of 140 GB
    would take minutes at each start, and any training step changes nearly every weight. Raises ConfigError
    naming `model` for a directory without weights or with broken ones.
    """
    tensors: list[tuple[str, str, list[int], str]] = []
    try:
        for path in directory.glob("*.safetensors"):
            with path.open("rb") as file:
                start = 8 + struct.unpack("<Q", file.read(8))[0]
                header = json.loads(file.read(start - 8))
                header.pop("__metadata__", None)
                for tensor, entry in header.items():
                    first, last = entry["data_offsets"]
                    content = hashlib.sha256()
                    for offset in range(start + first, start + last, _SAMPLE_STRIDE):
                        file.seek(offset)
                        content.update(file.read(min(_SAMPLE_BYTES, start + last - offset)))
                    tensors.append((tensor, entry["dtype"], entry["shape"], content.hexdigest()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise wrong_model(str(directory), "a model with intact safetensors weights", error) from error
    if not tensors:
        raise wrong_model(str(directory), "a model with safetensors weights")
    return hashlib.sha256(json.dumps(sorted(tensors)).encode()).hexdigest()


def wrong_model(name: str, expected: str, error: Exception | None = None) -> ConfigError:
    """What every model gets that can't be used."""
    reason = f": {' '.join(str(error).split())[:300]}" if error else ""
    return ConfigError(f"model is {name!r}, expected {expected}{reason}", field="model")
