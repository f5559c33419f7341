"""One short pass at load that finds out what a model asks of attention, and refuses what can't be given.

Nothing that the library's models pass to their attention may be ignored: it would change the text in
silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from splitspec.engine.blocks import LayerShape
from splitspec.engine.weights import wrong_model
from splitspec.errors import ConfigError, SplitspecError

NAME = "splitspec_probe"
_NUM_TOKENS = 4
#: Attention arguments that are implemented, or that say nothing that the pass doesn't know.
_UNDERSTOOD = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "position_ids", "use_cache"})


@dataclass
class Probe:
    """layers: by index. siblings: linear layers of one module that were given the same input, in order.
    read: linear layers whose weights the model reads by itself, so that they have to stay what they are.
    """

    layers: dict[int, LayerShape] = field(default_factory=dict)
    siblings: list[list[tuple[nn.Module, str]]] = field(default_factory=list)
    read: set[nn.Module] = field(default_factory=set)


def unsupported(name: str, what: str) -> ConfigError:
    """The refusal of a model for what it has and the engine hasn't."""
    return wrong_model(name, f"one that the engine can run (this one has {what})")


@contextmanager
def refused(name: str) -> Iterator[None]:
    """What fails when a model is tried means that it can't be used, unless there is no room for it."""
    try:
        yield
    except (SplitspecError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = RuntimeError(f"tried, it fails with {type(error).__name__}: {error}")
        raise wrong_model(name, "one that the engine can run", reason) from error


@torch.inference_mode()
def probe(model: PreTrainedModel, name: str, max_context: int) -> Probe:
    """Raises ConfigError naming `model` for one that needs more than the engine has."""
    if not model._supports_attention_backend:
        raise unsupported(name, "an attention that can't be replaced")
    found = Probe()
    seen = _Seen(found, name, max_context)
    with refused(name):
        inputs = _try(model, seen)
        count = model.config.get_text_config(decoder=True).num_hidden_layers
    if sorted(found.layers) != list(range(count)):
        raise unsupported(name, f"{count} layers but attention in {len(found.layers)}")
    groups: dict[tuple[int, int], list[tuple[nn.Module, str]]] = {}
    for parent, child, given in inputs:
        if getattr(parent, child) not in found.read:
            groups.setdefault((id(parent), id(given)), []).append((parent, child))
    found.siblings = [group for group in groups.values() if len(group) > 1]
    return found


def _try(model: PreTrainedModel, seen: _Seen) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """The pass. Returns each linear layer's parent, its name there, and its input."""
    config = model.config.get_text_config(decoder=True)
    config._attn_implementation = NAME
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    hooks, inputs = _watch_linears(model)
    ids = torch.arange(_NUM_TOKENS, device=model.device)[None]
    for linear in linears:
        linear.__class__ = _Watched
    try:
        model(ids, position_ids=ids, use_cache=False, probed=seen)
    finally:
        for hook in hooks:
            hook.remove()
        for linear in linears:
            linear.__class__ = nn.Linear
            if vars(linear).pop("read", False):
                seen.found.read.add(linear)
    return inputs


class _Watched(nn.Linear):
    """A linear layer's class during the pass: it notes whether anything but the layer reads its weights."""

    def __getattr__(self, name: str) -> Any:
        if name in ("weight", "bias"):
            vars(self)["read"] = True
        return super().__getattr__(name)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        weight = self._parameters["weight"]
        assert weight is not None
        return functional.linear(given, weight, self._parameters["bias"])


@dataclass
class _Seen:
    found: Probe
    name: str
    max_context: int


def _watch_linears(model: nn.Module) -> tuple[list[Any], list[tuple[nn.Module, str, torch.Tensor]]]:
    """Hooks that note each linear layer's parent, its name there, and its input."""
    hooks = []
    inputs: list[tuple[nn.Module, str, torch.Tensor]] = []
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:

                def note(_: nn.Module, args: Any, parent: nn.Module = parent, name: str = name) -> None:
                    inputs.append((parent, name, args[0]))

                hooks.append(child.register_forward_pre_hook(note))
    return hooks, inputs


def _probed_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    probed: _Seen | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Notes shapes and checks arguments; returns zeros, as nothing depends on the result."""
    if probed is None:
        raise TypeError("its attention isn't passed what a pass tells it")
    unknown = sorted(
        name for name in kwargs.keys() - _UNDERSTOOD if kwargs[name] is not None and kwargs[name] is not False
    )
    if unknown:
        raise unsupported(probed.name, f"attention with {', '.join(unknown)}")
    if dropout or not getattr(module, "is_causal", True):
        raise unsupported(probed.name, "attention that isn't causal, or drops at random")
    window = kwargs.get("sliding_window")
    if not _is_causal(attention_mask, window, probed.max_context, query.device):
        raise unsupported(probed.name, "a mask that isn't causal with an optional sliding window")
    if (sinks := kwargs.get("s_aux")) is not None and sinks.shape != query.shape[1:2]:
        raise unsupported(probed.name, f"attention sinks of the shape {list(sinks.shape)}")
    found = probed.found
    if module.layer_idx in found.layers:
        raise unsupported(probed.name, "several attentions in one layer")
    _, num_kv_heads, _, key_size = key.shape
    found.layers[module.layer_idx] = LayerShape(num_kv_heads, key_size, value.shape[-1])
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


def _is_causal(mask: Any, window: int | None, max_context: int, device: torch.device) -> bool:
    """Compare the library's mask function with ours, for the last query of the context and around it."""
    zero = torch.zeros((), dtype=torch.long, device=device)
    keys = torch.arange(max_context, device=device)
    edge = window or max_context
    for query in sorted({0, edge - 1, edge, edge + 1, max_context - 1}):
        if query >= max_context:
            continue
        place = torch.tensor(query, device=device)
        expected = keys <= query
        if window is not None:
            expected &= keys > query - window
        if not callable(mask) or not torch.equal(mask(zero, zero, place, keys).expand_as(keys), expected):
            return False
    return True


def _mask_function(*, mask_function: Any, **kwargs: Any) -> Any:
    """In place of a mask the rule that it would be made by, for `_is_causal`."""
    return mask_function


AttentionInterface.register(NAME, _probed_attention)
AttentionMaskInterface.register(NAME, _mask_function)
