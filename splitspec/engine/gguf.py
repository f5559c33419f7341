"""`python -m splitspec.engine.gguf FILE DIRECTORY`: a GGUF file to bfloat16 safetensors and a tokenizer.

A process of its own: the conversion needs torch, which not every process that names a model has, several
times the file's memory, and process-wide settings of the library.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Tokenizer, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as library_logging

#: GGUF names of byte-level vocabularies whose digits stand alone. The library doesn't know these names and
#: would split as GPT-2 does, which gives other ids for digits after two spaces.
SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})


def convert(gguf: Path, directory: Path) -> None:
    """Write config.json, safetensors, tokenizer and chat template. Raises whatever the library raises."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain tensors now; the library would refuse to save them as quantised ones.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    splitting = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    if splitting is not None and splitting.contents() in SINGLE_DIGITS:
        _split_digits(directory / "tokenizer.json")


def _split_digits(path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(path))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), byte_level])
    tokenizer.save(str(path))


if __name__ == "__main__":
    # Its bars, and its advice about running the quantised weights, which isn't what happens here.
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    library_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
