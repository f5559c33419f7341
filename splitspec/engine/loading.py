"""A checkpoint directory to a library model, with every start condition checked by name."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as library_logging

from splitspec.engine.weights import (
    check_files,
    check_finite,
    check_report,
    named,
    weights_hash,
    wrong_model,
)
from splitspec.errors import ConfigError

if TYPE_CHECKING:
    from splitspec.engine.parallel import Ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_UNCONVERTED = re.compile(r"^(\S+) *\|[^|]*CONVERSION", re.MULTILINE)


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
    count: int = library_config(directory, name).get_text_config(decoder=True).num_hidden_layers
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
    config = library_config(directory, name)
    if config.is_encoder_decoder or (kinds := _unrewindable(config)):
        what = "an encoder" if config.is_encoder_decoder else ", ".join(kinds)
        raise wrong_model(name, f"a model whose KV can be rewound ({config.model_type} has {what})")
    _check_quantization(config, name)
    check_files(directory, config, name)
    split = {} if ranks is None else ranks.loading_options(config, name)
    model: Any
    report: dict[str, Any]
    # The library raises all sorts of errors for broken weights; each means that this model can't be used.
    try:
        with _report_kept() as unconverted:
            model, report = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                attn_implementation=None,  # config.json could name a kernel to download
                ignore_mismatched_sizes=True,  # reported, and refused below
                output_loading_info=True,
                **split,
            )  # type: ignore[misc]
    except Exception as error:
        if unconverted:
            expected = "tensors that the model's parameters can be made of"
            raise wrong_model(name, f"{expected} (not so: {named(unconverted)})") from error
        raise _unreadable(name, "a causal language model with safetensors weights", error) from error
    check_report(report, name)
    if model._is_stateful:
        raise wrong_model(name, f"a model whose KV can be rewound ({config.model_type} has other state)")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise wrong_model(name, f"a model that can leave out logits ({config.model_type} can't)")
    if ranks is not None:
        ranks.keep_own_shards(model, name)
    if keep_layers is not None:
        _keep_layers(model, name, keep_layers)
    loaded: PreTrainedModel = model.to(device).eval()
    check_finite(loaded, dtype, name)
    return loaded


def library_tokenizer(directory: Path, name: str) -> Any:
    """The library's tokenizer with its chat template. Raises ConfigError naming `model`."""
    try:
        return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises nothing more specific
        raise _unreadable(name, "a model whose tokenizer can be read", error) from error


def _unreadable(name: str, expected: str, error: Exception) -> ConfigError:
    """The refusal of a model that the library raised `error` for. Code that comes with one is never run."""
    if "trust_remote_code" in str(error):
        return wrong_model(name, "one that the library has the code for (what comes with it is never run)")
    return wrong_model(name, expected, error)


@contextmanager
def _report_kept() -> Iterator[list[str]]:
    """Holds back the tables that the library logs of a model's weights. Gives the parameters that it could
    not make of their tensors, which stand nowhere else.
    """
    unconverted: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        unconverted.extend(_UNCONVERTED.findall(text))
        return "LOAD REPORT" not in text

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield unconverted
    finally:
        logger.removeFilter(keep)


def _check_quantization(config: Any, name: str) -> None:
    """Raises ConfigError for a kind that the library doesn't know: it would take its integers for weights."""
    text = config.get_text_config(decoder=True)
    found = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if found is None:
        return
    try:
        known = AutoHfQuantizer.supports_quant_method(found)  # type: ignore[no-untyped-call]
    except Exception:  # a value that says nothing
        known = False
    if not known:
        method = found.get("quant_method") if isinstance(found, dict) else found
        raise wrong_model(
            name, f"no quantization, or one that the library knows (its config.json says {method!r})"
        )


def _unrewindable(config: Any) -> list[str]:
    """Kinds of the library's cache layers for this model that the paged pool can't stand in for.

    Full attention and sliding or chunked windows differ by their mask alone. Recurrent states,
    convolutions, layers that share KV and sparse indexers hold other state.
    """
    kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    return sorted(kind.__name__ for kind in kinds - {DynamicLayer, DynamicSlidingWindowLayer})


def library_config(directory: Path, name: str) -> Any:
    """The library's config of a model. Raises ConfigError naming `model`."""
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a wrong value raises whatever its check or its use does
        raise _unreadable(name, "a model with a readable config.json", error) from error


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
