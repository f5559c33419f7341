"""Random EAGLE drafts of tiny targets, and the same network without pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from draft_worker.drafters.eagle import EagleDrafter, Grow
from draft_worker.eagle.model import EagleLM
from draft_worker.eagle.network import EagleConfig, EagleNetwork, TargetIdentity
from draft_worker.eagle.vocabulary import DraftVocabulary
from protos.v1 import common_pb2
from splitspec.engine.scheduler import Steps
from splitspec.engine.weights import weights_hash
from splitspec.vocabulary import Vocabulary
from splitspec.wire import Draft
from tests.engine import tiny

LAYERS = (0, 2)
HIDDEN = 32
#: Some of the target's ids, in gaps.
IDS = [token for token in range(tiny.VOCABULARY) if token % 3]


def config(
    target: TargetIdentity,
    draft_vocabulary_size: int = len(IDS),
    hidden_size: int = HIDDEN,
    layers: Sequence[int] = LAYERS,
) -> EagleConfig:
    return EagleConfig(
        feature_set="eagle3",
        feature_layers=tuple(layers),
        hidden_size=hidden_size,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        draft_vocabulary_size=draft_vocabulary_size,
        target=target,
    )


def network(config: EagleConfig, ids: Sequence[int] = IDS, seed: int = 0) -> EagleNetwork:
    """Weights so large that outputs depend on the whole text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = EagleNetwork(config).requires_grad_(False)
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.4 if parameter.dim() > 1 else 1.0))
    made.draft_token_ids.copy_(torch.tensor(ids))
    return made.bfloat16()


def checkpoint(
    directory: Path,
    target: Path,
    hidden_size: int = HIDDEN,
    layers: Sequence[int] = LAYERS,
    ids: Sequence[int] = IDS,
) -> Path:
    """A draft of the target in another directory; hidden_size: the target's."""
    directory.mkdir()
    identity = TargetIdentity(str(target), weights_hash(target), Vocabulary.load(target).hash)
    network(config(identity, len(ids), hidden_size, layers), ids).save(directory)
    return directory


def small_drafter(grow: Grow, vocabulary_size: int, ids: Sequence[int]) -> EagleDrafter:
    """Of a random network and embedding, in float32."""
    identity = TargetIdentity("made up", "", "")
    made = network(config(identity, len(ids)), ids).float()
    embedding = torch.randn(vocabulary_size, HIDDEN, generator=torch.Generator().manual_seed(5))
    info = common_pb2.ModelInfo(name="small", vocabulary_size=vocabulary_size, max_context=tiny.CONTEXT)
    model = EagleLM(made, embedding, info, kv_memory_bytes=2**20, block_size=tiny.BLOCK_SIZE)
    return EagleDrafter(model, DraftVocabulary(np.array(ids), vocabulary_size), "small", grow)


def embedding(target: Path) -> torch.Tensor:
    """[vocabulary, hidden size], as the library loads it."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    weight: Any = model.get_input_embeddings().weight
    found: torch.Tensor = weight.detach()
    return found


def features(token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, layers, hidden size]: made up, of each token and those before it."""
    table = torch.randn(tiny.VOCABULARY, len(LAYERS), HIDDEN, generator=torch.Generator().manual_seed(3))
    return table[list(token_ids)].cumsum(0)


def run_together(jobs: Sequence[Steps[Draft]]) -> list[Draft]:
    """Results of jobs whose passes are joined, as the scheduler joins them."""
    results: dict[int, Draft] = {}
    answers: dict[int, torch.Tensor | None] = dict.fromkeys(range(len(jobs)))
    while answers:
        wanted = {}
        for index, answer in answers.items():
            try:
                wanted[index] = jobs[index].send(answer)  # type: ignore[arg-type]  # None starts it
            except StopIteration as end:
                results[index] = end.value
        if not wanted:
            break
        model = next(iter(wanted.values())).model
        passed = model.forward_batch([each.feed for each in wanted.values()])
        answers = dict(zip(wanted, passed, strict=True))
    return [results[index] for index in range(len(jobs))]


def assert_same_proposal(actual: Draft, expected: Draft) -> None:
    """The same tokens, and distributions that differ by rounding alone."""
    assert (actual.token_ids, actual.parents) == (expected.token_ids, expected.parents)
    for a, b in zip(actual.distributions, expected.distributions, strict=True):
        if a is not None and b is not None:
            for token in set(a.ids.tolist()) | set(b.ids.tolist()):
                assert a.probability(token) == pytest.approx(b.probability(token), abs=1e-3)
        else:
            assert a is b


class Dense:
    """Logits of the network over whole sequences, nothing kept from one call to the next."""

    def __init__(self, network: EagleNetwork, embedding: torch.Tensor) -> None:
        self.network = network
        self.embedding = embedding

    def rows(self, token_ids: Sequence[int], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and logits of rows that read hidden[i] and the embedding of token i + 1."""
        network = self.network
        cos, sin = network.rotary(torch.arange(len(hidden)))
        residual, q, k, v = network.project(
            self.embedding[torch.tensor(token_ids[1:])][None], hidden[None], cos, sin
        )
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output = network.finish(residual, attended)[0]
        return output, network.head(network.final_norm(output)).float()

    def after(self, token_ids: Sequence[int], features: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """[draft vocabulary]: logits behind committed tokens, and draft tokens behind those."""
        hidden = self.network.fused(features)
        text = list(token_ids)
        outputs, logits = self.rows(text, hidden)
        for token in path:
            text.append(token)
            hidden = torch.cat([hidden, outputs[-1:]])
            outputs, logits = self.rows(text, hidden)
        return logits[-1]
