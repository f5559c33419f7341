"""A causal language model with rewindable KV: the seam between workers and the library that runs models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import structlog
import torch
from transformers import PreTrainedModel

from protos.v1 import common_pb2
from splitspec.engine import threads
from splitspec.engine.attention import NAME, RaggedPass
from splitspec.engine.batch import Batch
from splitspec.engine.blocks import BlockPool
from splitspec.engine.features import keep_outputs
from splitspec.engine.huge_pages import use_huge_pages
from splitspec.engine.linear import Slabs, can_pack, has_tile_registers, pack_linears
from splitspec.engine.loading import (
    decoder_layers,
    fingerprint,
    load_library_model,
    max_context,
    parse_attention,
    parse_device,
    parse_dtype,
)
from splitspec.engine.memory import quarter_of_free_memory
from splitspec.engine.paged import BLOCK_SIZE, PagedLM
from splitspec.engine.plan import to_device, twice_if_single
from splitspec.engine.probe import Probe, probe, refused
from splitspec.engine.selftest import rows_are_independent
from splitspec.special_tokens import SpecialTokens
from splitspec.vocabulary import Vocabulary

if TYPE_CHECKING:
    from splitspec.engine.parallel import Ranks

log = structlog.get_logger()


class CausalLM(PagedLM):
    """Any causal language model of the transformers library whose KV is attention's alone.

    info.deterministic: whether the load's self-test found a row's logits to have the same bits whatever
    else is in the pass, provided that feeds of more than LONGEST_SHORT_FEED tokens (prompts) are fed in the
    same pieces. Not thread-safe: one thread runs all passes.

    Many heads are padded to a round size beyond the tokenizer's table. Their last logits stand for no
    token and are cut off: the target is the library's model given that a real token comes next. Greedy
    text is the library's as long as no such id is its argmax.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        found: Probe,
        info: common_pb2.ModelInfo,
        slabs: Slabs,
        *,
        kv_memory_bytes: int | None,
        block_size: int,
        ranks: Ranks | None,
        flex: bool | None,
    ) -> None:
        make_pool = BlockPool if ranks is None else ranks.make_pool
        pool = make_pool(
            [found.layers[index] for index in range(len(found.layers))],
            memory_bytes=quarter_of_free_memory(model.device) if kv_memory_bytes is None else kv_memory_bytes,
            block_size=block_size,
            dtype=model.dtype,
            device=model.device,
            feature_layers=len(info.feature_layers),
            hidden_size=model.config.get_text_config(decoder=True).hidden_size,
        )
        super().__init__(info, pool)
        if flex and pool.device.type == "cpu":  # without a kernel blocks that nobody holds are read, too
            for held in (*pool.keys, *pool.values):
                held.zero_()
        self._model = model
        self._slabs = slabs
        self._ranks = ranks
        self._flex = flex
        if ranks is None or ranks.is_first:
            with refused(info.name):
                info.deterministic = rows_are_independent(self)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        name: str,
        dtype: str,
        device: str,
        keep_layers: Sequence[int] | None = None,
        kv_memory_bytes: int | None = None,
        block_size: int = BLOCK_SIZE,
        deterministic: bool = True,
        ranks: Ranks | None = None,
        feature_layers: Sequence[int] = (),
        attention: str = "auto",
    ) -> CausalLM:
        """The model in `directory` (config.json, safetensors, tokenizer.json).

        name: what the user calls it. dtype: "float32", "bfloat16" or "float16". device: "cpu", "cuda"
        or "cuda:N". keep_layers: indices of the decoder layers to keep, in order; None keeps all.
        kv_memory_bytes: room for the KV of all sessions; None for a quarter of what is free on the device.
        block_size: tokens that share a block of it. deterministic: False lets a processor with tile
        registers run large batches in one product, faster in bfloat16, but then a row's last bits depend
        on what else is in the pass. feature_layers: those whose outputs are kept for `features`, counted
        from 0. attention: "flex" for all sessions of a pass in one kernel, "sdpa" for one after the other,
        "auto" for flex on GPUs alone. Raises ConfigError that names the wrong setting.
        """
        element = parse_dtype(dtype)
        place = parse_device(device) if ranks is None else ranks.device
        vocabulary = Vocabulary.load(directory)
        model = load_library_model(directory, name, element, place, keep_layers, ranks)
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
            eos_token_ids=_eos_token_ids(model, directory, vocabulary),
        )
        found = probe(model, name, info.max_context)
        tiled = element != torch.float32 and has_tile_registers()
        slabs = Slabs(needed=deterministic and tiled)
        if can_pack(element, place):
            pack_linears(model, found, slabs)
            log.info("weights in huge pages", model=name, mib=use_huge_pages() >> 20)
        text._attn_implementation = NAME
        if feature_layers:
            keep_outputs(decoder_layers(model, name), feature_layers)
            info.feature_layers.extend(feature_layers)
        loaded = cls(
            model,
            found,
            info,
            slabs,
            kv_memory_bytes=kv_memory_bytes,
            block_size=block_size,
            ranks=ranks,
            flex=parse_attention(attention),
        )
        # What the self-test's short passes show is no promise for long ones that go in one product.
        info.deterministic &= deterministic or not tiled
        return loaded

    def lead(self, batch: Batch) -> torch.Tensor:
        return self.run(batch) if self._ranks is None else self._ranks.lead(self, batch)

    def run(self, batch: Batch) -> torch.Tensor:
        device = self._model.device
        self._slabs.begin(batch.sizes)
        ragged = RaggedPass(self.pool, batch.spans, flex=self._flex)

        def tensor(rows: list[int]) -> torch.Tensor:
            return to_device(twice_if_single(np.array(rows, dtype=np.int64)), device)

        with threads.sparing(len(batch.token_ids)):
            output = self._model(
                tensor(batch.token_ids)[None],
                position_ids=tensor(batch.positions)[None],
                use_cache=False,
                logits_to_keep=tensor(batch.wanted),
                ragged=ragged,
            )
        logits: torch.Tensor = output.logits[0, : len(batch.wanted), : self.info.vocabulary_size]
        return logits.float()


def _eos_token_ids(model: PreTrainedModel, directory: Path, vocabulary: Vocabulary) -> list[int]:
    """Ids that end a generation: generation_config.json's, else config.json's, and the tokenizer's own."""
    generation = getattr(model, "generation_config", None)
    ids = getattr(generation, "eos_token_id", None)
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    ends = [ids] if isinstance(ids, int) else list(ids or [])
    named = SpecialTokens.load(directory).named.get("eos_token")
    own = vocabulary.tokenizer.token_to_id(named) if named else None
    return ends if own is None or own in ends else [*ends, own]
