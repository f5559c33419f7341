"""An EAGLE draft and what it needs of its target, from their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from draft_worker.eagle.model import EagleLM
from draft_worker.eagle.network import EagleConfig, EagleNetwork
from draft_worker.eagle.vocabulary import DraftVocabulary
from protos.v1 import common_pb2
from splitspec.engine.loading import max_context, parse_device, parse_dtype, weights_hash, wrong_model
from splitspec.engine.paged import BLOCK_SIZE
from splitspec.errors import ConfigError
from splitspec.vocabulary import Vocabulary


def load_eagle(
    directory: Path,
    name: str,
    target: Path,
    target_name: str,
    *,
    dtype: str,
    device: str,
    kv_memory_bytes: int | None = None,
    block_size: int = BLOCK_SIZE,
    attention: str = "auto",
) -> tuple[EagleLM, DraftVocabulary]:
    """The draft in `directory` for the target in another one; each with what the user calls it.

    dtype, device, kv_memory_bytes, block_size, attention: see `CausalLM.load`. Raises ConfigError for a
    broken checkpoint, and HandshakeError for one that was trained for another target.
    """
    element, place = parse_dtype(dtype), parse_device(device)
    config = EagleConfig.load(directory)
    vocabulary = Vocabulary.load(target)
    config.check_target(target_name, weights_hash(target), vocabulary.hash)
    network = EagleNetwork.load(directory, config)
    embedding = load_embedding(target, target_name)
    size = min(vocabulary.size, len(embedding))
    try:
        draft_vocabulary = DraftVocabulary(network.draft_token_ids.numpy(), size)
    except ValueError as error:
        raise ConfigError(f"the EAGLE draft {name!r} has {error}", field="drafters") from error
    info = common_pb2.ModelInfo(
        name=name,
        fingerprint=weights_hash(directory),
        dtype=dtype,
        device=place.type,
        vocabulary_hash=vocabulary.hash,
        vocabulary_size=size,
        max_context=max_context(_library_config(target), target_name),
    )
    model = EagleLM(
        network.requires_grad_(False).to(place, element),
        embedding.to(place, element),
        info,
        kv_memory_bytes=kv_memory_bytes,
        block_size=block_size,
        attention=attention,
    )
    return model, draft_vocabulary


def load_embedding(directory: Path, name: str) -> torch.Tensor:
    """[vocabulary, hidden size]: the input embedding of a model, the rest of which isn't read.

    name: what the user calls the model. Raises ConfigError naming `model`.
    """
    try:
        with torch.device("meta"):
            config = _library_config(directory)
            model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        weight = model.get_input_embeddings().weight
        key = next(key for key, parameter in model.named_parameters() if parameter is weight)
        found: torch.Tensor = next(f.get_tensor(key) for f in _files(directory) if key in f.keys())  # noqa: SIM118
        return found
    except Exception as error:  # the libraries raise nothing more specific
        raise wrong_model(name, "a model with its input embedding in safetensors", error) from error


def _files(directory: Path) -> Iterator[Any]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            yield file


def _library_config(directory: Path) -> Any:
    return AutoConfig.from_pretrained(directory, local_files_only=True)
