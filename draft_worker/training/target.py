"""The target as a teacher: features and final hidden states of whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from splitspec.engine.loading import decoder_layers, library_tokenizer, load_library_model
from splitspec.engine.weights import wrong_model


@dataclass(frozen=True, slots=True)
class Teacher:
    """The frozen target.

    tokenizer: the library's, with the chat template. layers: whose outputs are its features.
    """

    name: str
    directory: Path
    model: PreTrainedModel
    tokenizer: Any
    layers: tuple[int, ...]

    @classmethod
    def load(
        cls, directory: Path, name: str, dtype: torch.dtype, device: torch.device, layers: Sequence[int]
    ) -> Teacher:
        """Raises ConfigError naming `model` for one that can't be a teacher."""
        model = load_library_model(directory, name, dtype, device, None, None).requires_grad_(False)
        tokenizer = library_tokenizer(directory, name)
        teacher = cls(name, directory, model, tokenizer, tuple(layers))
        with torch.inference_mode():
            ids = torch.arange(8, device=device)[None]
            hidden = teacher.run(ids)[1]
            if not torch.allclose(model(ids, use_cache=False).logits, teacher.head(hidden), rtol=0.05):
                raise wrong_model(name, "a model whose logits are its head's product with the last hidden")
        return teacher

    @property
    def config(self) -> Any:
        """The decoder's part of the library's config."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def embedding(self) -> nn.Module:
        module: nn.Module = self.model.get_input_embeddings()
        return module

    @property
    def head(self) -> nn.Linear:
        module: nn.Linear = self.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        return module

    def run(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Features [batch, length, layers, hidden] and final hidden states [batch, length, hidden], normed.

        token_ids: [batch, length]; what pads a text stands behind it, where nothing attends to it.
        """
        outputs: dict[int, torch.Tensor] = {}
        modules = decoder_layers(self.model, self.name)

        def keep(index: int) -> Any:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                outputs[index] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [modules[index].register_forward_hook(keep(index)) for index in self.layers]
        try:
            hidden = self.model.base_model(token_ids, use_cache=False).last_hidden_state
        finally:
            for handle in handles:
                handle.remove()
        features = hidden.new_empty(*hidden.shape[:2], len(self.layers), hidden.shape[2])
        for place, index in enumerate(self.layers):
            features[:, :, place] = outputs[index]
        return features, hidden
