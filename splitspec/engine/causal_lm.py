"""A causal language model with rewindable KV: the seam between workers and the library that runs models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from protos.v1 import common_pb2
from splitspec.engine.kv import KV
from splitspec.engine.loading import (
    fingerprint,
    load_library_model,
    max_context,
    parse_device,
    parse_dtype,
)
from splitspec.vocabulary import Vocabulary


class CausalLM:
    """Any causal language model of the transformers library whose KV is attention's alone.

    Not thread-safe: one thread runs all passes.

    Many heads are padded to a round size beyond the tokenizer's table. Their last logits stand for no
    token and are cut off: the target is the library's model given that a real token comes next. Greedy
    text is the library's as long as no such id is its argmax.
    """

    def __init__(self, model: PreTrainedModel, info: common_pb2.ModelInfo) -> None:
        self.info = info
        self._model = model
        self._num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        name: str,
        dtype: str,
        device: str,
        keep_layers: Sequence[int] | None = None,
    ) -> CausalLM:
        """The model in `directory` (config.json, safetensors, tokenizer.json).

        name: what the user calls it. dtype: "float32", "bfloat16" or "float16". device: "cpu", "cuda"
        or "cuda:N". keep_layers: indices of the decoder layers to keep, in order; None keeps all.
        Raises ConfigError that names the wrong setting.
        """
        element, place = parse_dtype(dtype), parse_device(device)
        vocabulary = Vocabulary.load(directory)
        model = load_library_model(directory, name, element, place, keep_layers)
        text = model.config.get_text_config(decoder=True)
        info = common_pb2.ModelInfo(
            name=name,
            fingerprint=fingerprint(directory, element, place, keep_layers),
            dtype=dtype,
            device=place.type,
            vocabulary_hash=vocabulary.hash,
            # A table may also hold more ids than the model has embeddings for: those it can't be fed.
            vocabulary_size=min(vocabulary.size, text.vocab_size),
            max_context=max_context(model.config, name),
            eos_token_ids=_eos_token_ids(model),
        )
        return cls(model, info)

    def new_kv(self) -> KV:
        return KV(self._num_layers)

    @torch.inference_mode()
    def forward(self, kv: KV, token_ids: Sequence[int], num_rows: int) -> torch.Tensor:
        """Feed tokens behind those that `kv` holds; logits of the last `num_rows` of them.

        Returns [num_rows, vocabulary] float32; row i conditions on all tokens up to its own. num_rows 0
        only feeds: the head doesn't run. Raises ValueError for no tokens, more rows than tokens, ids
        outside the vocabulary, or a length beyond the context; the KV is then as before.
        """
        self._check(kv, token_ids, num_rows)
        count = len(token_ids)
        ids = torch.tensor([token_ids], dtype=torch.long, device=self._model.device)
        rows = torch.arange(count - num_rows, count, device=self._model.device)
        logits = self._model(ids, cache=kv.rewound(), use_cache=True, logits_to_keep=rows).logits
        kv.length += count
        return logits[0, :, : self.info.vocabulary_size].float()  # type: ignore[no-any-return]

    def truncate(self, kv: KV, length: int) -> None:
        """Keep the first `length` tokens. Raises ValueError when there are fewer."""
        if not 0 <= length <= kv.length:
            raise ValueError(f"can't truncate the KV of {kv.length} tokens to {length}")
        kv.length = length

    def kv_bytes(self, kv: KV) -> int:
        """Bytes that the KV occupies."""
        return kv.num_bytes

    def _check(self, kv: KV, token_ids: Sequence[int], num_rows: int) -> None:
        if not token_ids:
            raise ValueError("no tokens to feed, expected at least one")
        if not 0 <= num_rows <= len(token_ids):
            raise ValueError(f"num_rows is {num_rows}, expected 0 to the {len(token_ids)} tokens fed")
        if min(token_ids) < 0 or max(token_ids) >= self.info.vocabulary_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.info.vocabulary_size)
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.info.vocabulary_size}")
        if kv.length + len(token_ids) > self.info.max_context:
            raise ValueError(
                f"{len(token_ids)} tokens on top of {kv.length} don't fit the context "
                f"of {self.info.max_context}"
            )


def _eos_token_ids(model: PreTrainedModel) -> list[int]:
    """Ids that end a generation: generation_config.json's, else config.json's."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config(decoder=True).eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])
