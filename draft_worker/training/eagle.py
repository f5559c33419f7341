"""Training of EAGLE drafts with the training-time test of EAGLE-3 (2503.01840, section 3.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch.nn import functional

from draft_worker.eagle.network import EagleConfig, EagleNetwork, TargetIdentity
from draft_worker.training.acceptance import Acceptance
from draft_worker.training.cache import Batch, Row, load_batch
from draft_worker.training.losses import head_cross_entropy
from draft_worker.training.target import Teacher
from splitspec.engine.weights import weights_hash
from splitspec.vocabulary import Vocabulary

#: Draft tokens of the chains that acceptance is judged over.
JUDGED_DEPTH = 5
#: A step's share of the loss falls by this factor with its depth: a deeper token counts only when all
#: before it were accepted.
_DEPTH_DISCOUNT = 0.8
_STD = 0.02
#: Where weights of a decoder layer and the final norm are found in checkpoints.
_SOURCES = {
    "feature_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
    "final_norm": "norm.weight",
}


class EagleTask:
    """A draft in training (see `loop.Task`): against the target's distribution over its vocabulary."""

    def __init__(self, network: EagleNetwork, teacher: Teacher, depth: int) -> None:
        self._network = network
        self._teacher = teacher
        self._depth = depth
        self._ids = network.draft_token_ids.long()
        self._teacher_head = teacher.head.weight[self._ids]

    @property
    def module(self) -> EagleNetwork:
        return self._network

    def save(self, directory: Path) -> None:
        self._network.save(directory)

    def loss(self, rows: Sequence[Row]) -> torch.Tensor:
        """Cross-entropy over the answers' positions, summed over depths, each with its weight."""
        batch = load_batch(rows, self._device)
        outputs, targets, weights = [], [], []
        with self._autocast:
            embeddings = self._teacher.embedding(batch.token_ids)
            teacher = functional.linear(batch.hidden, self._teacher_head).softmax(dim=-1)
            for step, output in enumerate(unroll(self._network, batch.features, embeddings, self._depth)):
                texts, anchors = judged(batch, step, 1)
                outputs.append(self._network.final_norm(output[texts, anchors]))
                targets.append(teacher[texts, anchors + step + 1])
                share = _DEPTH_DISCOUNT**step / max(1, len(texts))
                weights.append(torch.full((len(texts),), share, device=self._device))
            return head_cross_entropy(
                torch.cat(outputs), self._network.head.weight, torch.cat(targets), torch.cat(weights)
            )

    @torch.no_grad()
    def evaluate(self, rows: Sequence[Row]) -> dict[str, float]:
        """Acceptance over chains of JUDGED_DEPTH draft tokens from every position of the answers."""
        acceptance = Acceptance(JUDGED_DEPTH)
        for row in rows:
            batch = load_batch([row], self._device)
            with self._autocast:
                embeddings = self._teacher.embedding(batch.token_ids)
                texts, anchors = judged(batch, 0, JUDGED_DEPTH)
                target = self._teacher.head(batch.hidden[0]).float()
                rows_of_depth = []
                for output in unroll(self._network, batch.features, embeddings, JUDGED_DEPTH):
                    draft = self._network.head(self._network.final_norm(output[texts, anchors])).float()
                    rows_of_depth.append(draft)
            acceptance.add(
                [target[anchors + step + 1] for step in range(JUDGED_DEPTH)],
                rows_of_depth,
                self._ids,
                greedy=row.temperature == 0,
            )
        return acceptance.figures()

    @property
    def _device(self) -> torch.device:
        return self._network.head.weight.device

    @property
    def _autocast(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16)


def judged(batch: Batch, step: int, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts and anchors i whose steps `step` to `step` + depth - 1 draft tokens of the answer.

    Step s at anchor i drafts token i + s + 2; the target's own distribution of it stands at i + s + 1.
    """
    places = torch.arange(batch.token_ids.shape[1], device=batch.token_ids.device) + step + 1
    inside = (places >= batch.answer_starts[:, None] - 1) & (places + depth <= batch.lengths[:, None])
    texts, anchors = inside.nonzero(as_tuple=True)
    return texts, anchors


def unroll(
    network: EagleNetwork, features: torch.Tensor, embeddings: torch.Tensor, depth: int
) -> Iterator[torch.Tensor]:
    """Outputs [batch, length, hidden] of `depth` successive draft steps from each position at once.

    features: [batch, length, layers, hidden]. embeddings: [batch, length, hidden], of the texts' own tokens.
    Step s at index i stands for position i + s: it reads the embedding of token i + s + 1 and, for s > 0,
    the output of step s - 1 at index i; it attends to what step 0 made of positions up to i, and to its own
    line of steps behind that.
    """
    length = features.shape[1]
    hidden = network.fused(features)
    cos, sin = network.rotary(torch.arange(length + depth, device=features.device))
    base: tuple[torch.Tensor, torch.Tensor] | None = None
    line: list[tuple[torch.Tensor, torch.Tensor]] = []
    for step in range(depth):
        following = functional.pad(embeddings[:, step + 1 :], (0, 0, 0, min(step + 1, length)))
        here = slice(step, step + length)
        residual, q, k, v = network.project(following, hidden, cos[here], sin[here])
        if base is None:
            base = (k, v)
        else:
            line.append((k, v))
        hidden = network.finish(residual, _attend(q, base, line))
        yield hidden


def _attend(
    q: torch.Tensor, base: tuple[torch.Tensor, torch.Tensor], line: list[tuple[torch.Tensor, torch.Tensor]]
) -> torch.Tensor:
    """Causal attention to `base`, and at each index to the same index of every entry of `line`.

    q: [batch, heads, length, head_dim]; keys and values: [batch, key-value heads, length, head_dim].
    """
    batch, heads, length, dim = q.shape
    groups = base[0].shape[1]
    grouped = q.reshape(batch, groups, -1, dim) * dim**-0.5
    scores = (grouped @ base[0].transpose(-1, -2)).view(batch, groups, -1, length, length)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(future, float("-inf"))
    per_head = grouped.view(batch, groups, -1, length, dim)
    own = [(per_head * k[:, :, None]).sum(dim=-1, keepdim=True) for k, _ in line]
    weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1, dtype=torch.float32).to(q.dtype)
    attended = weights[..., :length].reshape(batch, groups, -1, length) @ base[1]
    attended = attended.view(batch, groups, -1, length, dim)
    for index, (_, v) in enumerate(line):
        attended = attended + weights[..., length + index, None] * v[:, :, None]
    return attended.reshape(batch, heads, length, dim)


def draft_vocabulary(answers: Iterable[list[int]], size: int, must: Iterable[int]) -> torch.Tensor:
    """Ids of the draft's vocabulary: `must`, then the most frequent ids of the answers; ascending."""
    counts: Counter[int] = Counter()
    for answer in answers:
        counts.update(answer)
    chosen = dict.fromkeys(must)
    chosen.update(dict.fromkeys(index for index, _ in counts.most_common(size)))
    return torch.tensor(sorted(list(chosen)[:size]), dtype=torch.int32)


def eagle_config(teacher: Teacher, feature_set: str, draft_vocabulary_size: int) -> EagleConfig:
    """A draft whose layer has the shape of the target's own layers."""
    config = teacher.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", None) or {}
    return EagleConfig(
        feature_set=feature_set,
        feature_layers=teacher.layers,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope_theta=rope.get("rope_theta", 10_000.0),
        draft_vocabulary_size=draft_vocabulary_size,
        target=TargetIdentity(
            name=teacher.name,
            weights_hash=weights_hash(teacher.directory),
            vocabulary_hash=Vocabulary.load(teacher.directory).hash,
        ),
    )


def initialise(network: EagleNetwork, teacher: Teacher, draft_token_ids: torch.Tensor, scale: float) -> None:
    """Begin where the target ends: its last layer, final norm and head, if it has them in the same shape.

    The last feature layer passes through `fuse` at unit size; what the layer adds to it is divided by
    `scale`, the size that the target's own layer adds it to. What is new begins at small random weights.
    """
    last = f"layers.{teacher.config.num_hidden_layers - 1}."
    state = teacher.model.state_dict()
    found = {name.split(last)[1]: tensor for name, tensor in state.items() if last in name}
    if "model.norm.weight" in state:
        found["norm.weight"] = state["model.norm.weight"]
    hidden = network.config.hidden_size
    with torch.no_grad():
        for name, source in _SOURCES.items():
            weight = network.get_parameter(f"{name}.weight")
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=_STD)
            part = weight[:, -hidden:] if name in ("q_proj", "k_proj", "v_proj") else weight
            if source in found and found[source].shape == part.shape:
                part.copy_(found[source])
        torch.nn.init.normal_(network.fuse.weight, std=_STD)
        network.fuse.weight[:, -hidden:] += torch.eye(hidden)
        network.o_proj.weight /= scale
        network.down_proj.weight /= scale
        network.draft_token_ids.copy_(draft_token_ids)
        network.head.weight.copy_(teacher.head.weight[draft_token_ids.long()])
