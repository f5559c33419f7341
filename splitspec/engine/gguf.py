"""`python -m splitspec.engine.gguf DIRECTORY FILE...`: a GGUF file, or all parts of one in order, to bfloat16
safetensors and a tokenizer.

A process of its own: the conversion needs torch, which not every process that names a model has, several
times the file's memory, and process-wide settings of the library. What is wrong it says in one line.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)
from transformers.utils import logging as library_logging

from splitspec.engine.gguf_parts import WrongGGUFError, join, metadata
from splitspec.engine.weights import wrong_weights

#: GGUF names of byte-level vocabularies whose digits stand alone. The library doesn't know these names and
#: would split as GPT-2 does, which gives other ids for digits after two spaces.
SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_ROPE_FACTORS = "rope_freqs.weight"
#: Halves of one parameter, of which the library would take one without the other.
_HALVES = ("ffn_gate_exps.weight", "ffn_up_exps.weight")


def convert(parts: Sequence[Path], directory: Path) -> None:
    """Write config.json, safetensors, tokenizer and chat template. Raises WrongGGUFError for weights that
    aren't all there, or that the library leaves out, and whatever the library raises.
    """
    # In a directory of its own: the library takes other files beside it for the model's.
    source = directory.parent / "source"
    source.mkdir(parents=True)
    gguf = join(parts, source / "model.gguf")
    options: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True, "trust_remote_code": False}
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    model: Any
    report: dict[str, Any]
    model, report = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.bfloat16, output_loading_info=True, ignore_mismatched_sizes=True, **options
    )  # type: ignore[misc]
    reader = GGUFReader(gguf)
    _check(reader, model, report)
    # The weights are plain tensors now; the library would refuse to save them as quantised ones.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if metadata(reader, "tokenizer.ggml.pre") in SINGLE_DIGITS:
        _split_digits(directory / "tokenizer.json")


def _check(reader: GGUFReader, model: Any, report: dict[str, Any]) -> None:
    """See `convert`."""
    architecture = metadata(reader, "general.architecture")
    held = {tensor.name: tensor for tensor in reader.tensors}
    if not is_gguf_arch_supported(architecture):
        report["unexpected_keys"] |= held.keys() - _known(architecture, model)
    if _ROPE_FACTORS in report["unexpected_keys"] and _scale_rope(model.config, held[_ROPE_FACTORS].data):
        report["unexpected_keys"].remove(_ROPE_FACTORS)
    for block in {name.rsplit(".", 2)[0] for name in held if name.endswith(_HALVES)}:
        report["missing_keys"] |= {f"{block}.{half}" for half in _HALVES} - held.keys()
    if wrong := wrong_weights(report):
        raise WrongGGUFError(wrong)
    if ignored := _ignored(reader, architecture, model.config):
        raise WrongGGUFError(f"the library would leave out its {', '.join(ignored)}")


def _known(architecture: str, model: Any) -> set[str]:
    """Names of tensors that the library has a place for; experts' are without their ending."""
    kind: Any = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
    names = get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
    return {known for name in names for known in (name, f"{name}.weight")}


def _ignored(reader: GGUFReader, architecture: str, config: Any) -> list[str]:
    """Metadata that change what the model computes, and that the library has no place for."""
    taken: Any = GGUF_CONFIG_MAPPING.get(config.model_type, GGUF_CONFIG_MAPPING.get(architecture, {}))
    found = []
    if metadata(reader, f"{architecture}.rope.scaling.type") not in (None, "none"):
        found.append("rope.scaling.type")
    window = metadata(reader, f"{architecture}.attention.sliding_window")
    if window and "attention.sliding_window" not in taken and window < config.max_position_embeddings:
        found.append("attention.sliding_window")
    return found


def _scale_rope(config: Any, factors: Any) -> bool:
    """Llama 3's scaling of rotary frequencies, which a file has as the factors that come of it. Whether these
    are such factors; the config then says so.
    """
    factor = float(factors.max())
    theta = config.rope_parameters["rope_theta"]
    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    half = torch.arange(len(factors), dtype=torch.float32) / len(factors)
    turns = 8192 / (2 * torch.pi * theta**half)  # of each frequency in the original context
    smooth = ((turns - 1.0) / (4.0 - 1.0)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(torch.from_numpy(factors.copy()).float(), expected, rtol=1e-3):
        return False
    if factor > 1:
        config.rope_parameters = scaling
    return True


def _split_digits(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    tokenizer.save(str(path))


if __name__ == "__main__":
    # Its bars, and its advice about running the quantised weights, which isn't what happens here.
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    library_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        convert([Path(part) for part in sys.argv[2:]], Path(sys.argv[1]))
    except WrongGGUFError as error:
        sys.exit(str(error))
