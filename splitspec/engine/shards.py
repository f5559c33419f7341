"""A rank's share of a model's layers, and what ranks exchange to make them whole.

The library decides how a model is split, reads only this rank's part of the weights, and wraps each split
layer. The wrappers are taken off again: what is left are plain layers, which are packed and joined like
those of a whole model, and the exchanges of Shoeybi et al. (1909.08053, section 3).
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

from splitspec.engine.weights import wrong_model
from splitspec.errors import ConfigError

_GATHERED = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")


def loading_options(config: Any, name: str, num_ranks: int) -> dict[str, Any]:
    """What makes the library load one rank's share of a model.

    Raises ConfigError for a model that it can't split, or not between so many ranks.
    """
    text = config.get_text_config(decoder=True)
    plan = text.base_model_tp_plan
    if not plan:
        raise wrong_model(
            name, f"one that can be split between ranks (the library has no plan for {text.model_type})"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if get_kv_heads_per_rank(plan, heads, num_ranks) is None:
        raise ConfigError(
            f"torchrun's --nproc-per-node and --nnodes come to {num_ranks} ranks, expected a divisor of the "
            f"{heads} KV heads of {name!r}",
            field="nproc_per_node",
        )
    return {"distributed_config": DistributedConfig(tp_plan="auto")}


def keep_own_shards(model: PreTrainedModel, name: str, group: dist.ProcessGroup) -> None:
    """Make plain layers of the library's split ones. Raises ConfigError for a way to split unknown here."""
    for path, module in list(model.named_modules()):
        if not any(_is_split(weight) for weight in module.parameters(recurse=False)):
            continue
        style = model.tp_plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", path), "")
        whole = _whole(module, style, group)
        if whole is None:
            raise wrong_model(name, f"one whose layers can be split (those of {path} are {style or 'split'})")
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, whole)


def _is_split(weight: Any) -> bool:
    return hasattr(weight, "to_local")


def _whole(module: nn.Module, style: str, group: dist.ProcessGroup) -> nn.Module | None:
    """What stands for the whole layer on this rank; None for a way to split that isn't known."""
    if isinstance(module, nn.Embedding) and style == "embedding_rowwise":
        return SplitEmbedding(module, group)
    if type(module) is not nn.Linear:
        return None
    if style == "colwise":
        own: nn.Module = _own(module)
        return own
    if style in _GATHERED:
        return GatheredLinear(module, group)
    if style == "rowwise" or style in _SPLIT_INPUT:
        return SummedLinear(module, group, split_input=style in _SPLIT_INPUT)
    return None


def _own(module: Any) -> Any:
    """The layer with this rank's weights alone, without the library's wrapper."""
    vars(module).pop("forward", None)
    for name, weight in list(module.named_parameters(recurse=False)):
        if _is_split(weight):
            setattr(module, name, nn.Parameter(weight.to_local(), requires_grad=False))
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    return module


def _part_size(size: int, group: dist.ProcessGroup) -> int:
    """How many of `size` features each rank has but the last ones, which may have less."""
    return -(-size // group.size())


class SummedLinear(nn.Module):
    """Input features are split: [..., own share of in] to [..., out], the sum of the ranks' products.

    split_input: all input features are given; the own ones are taken from them.
    """

    def __init__(self, layer: nn.Linear, group: dist.ProcessGroup, *, split_input: bool) -> None:
        super().__init__()
        part = _part_size(layer.in_features, group)
        self.product = _own(layer)
        self._bias, layer.bias = layer.bias, None  # type: ignore[assignment]  # added once, to the sum
        self._group = group
        self._taken = slice(group.rank() * part, (group.rank() + 1) * part) if split_input else slice(None)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.product(given[..., self._taken])
        dist.all_reduce(total, group=self._group)
        return total if self._bias is None else total + self._bias


class GatheredLinear(nn.Module):
    """Output features are split: [..., in] to [..., out], all of it on every rank."""

    def __init__(self, layer: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._size = layer.out_features
        self.product = _own(layer)
        # Ranks exchange parts of one size.
        layer.out_features = _part_size(self._size, group)
        missing = layer.out_features - len(layer.weight)
        for name, weight in list(layer.named_parameters()):
            padding = [0, 0] * (weight.dim() - 1) + [0, missing]
            setattr(layer, name, nn.Parameter(nn.functional.pad(weight, padding), requires_grad=False))
        self._group = group

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        own: torch.Tensor = self.product(given)
        parts = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(parts, own, group=self._group)
        return torch.cat(parts, dim=-1)[..., : self._size]


class SplitEmbedding(nn.Module):
    """The vocabulary is split: each rank looks up its own ids, and the others' rows are zeros in the sum."""

    def __init__(self, table: nn.Embedding, group: dist.ProcessGroup) -> None:
        super().__init__()
        self._first = group.rank() * _part_size(table.num_embeddings, group)
        self.table = _own(table)
        self._count = len(table.weight)
        self._group = group

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        own = ids - self._first
        strange = (own < 0) | (own >= self._count)
        rows: torch.Tensor = self.table(own.clamp(0, self._count - 1)).masked_fill(strange[..., None], 0)
        dist.all_reduce(rows, group=self._group)
        return rows
