"""An EAGLE draft and what it needs of its target, from their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from draft_worker.eagle.model import EagleLM
from draft_worker.eagle.network import EagleConfig, EagleNetwork
from draft_worker.eagle.vocabulary import DraftVocabulary
from protos.v1 import common_pb2
from splitspec.engine.loading import DTYPES, library_config, max_context, parse_device, parse_dtype
from splitspec.engine.paged import BLOCK_SIZE
from splitspec.engine.weights import named, not_finite, weight_files, weights_hash, wrong_model
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
        max_context=max_context(library_config(target, target_name), target_name),
    )
    network = network.requires_grad_(False).to(place, element)
    if broken := not_finite(network):
        raise ConfigError(
            f"the EAGLE draft {name!r} has weights that aren't finite in {dtype}: {named(broken)}",
            field="drafters",
        )
    model = EagleLM(
        network,
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
    config = library_config(directory, name)
    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False)  # type: ignore[no-untyped-call]
        weight = model.get_input_embeddings().weight
        key = next(key for key, parameter in model.named_parameters() if parameter is weight)
        found: torch.Tensor = next(f.get_tensor(key) for f in _files(directory, name) if key in f.keys())  # noqa: SIM118
    except Exception as error:  # the libraries raise nothing more specific
        raise wrong_model(name, "a model with its input embedding in safetensors", error) from error
    if found.shape != weight.shape or found.dtype not in DTYPES.values():
        raise wrong_model(
            name,
            f"an input embedding of the shape {list(weight.shape)} in {', '.join(DTYPES)} (its files have "
            f"{list(found.shape)} in {found.dtype})",
        )
    return found


def _files(directory: Path, name: str) -> Iterator[Any]:
    for path in weight_files(directory, name):
        with safe_open(path, framework="pt") as file:
            yield file
