"""Linear layers with weights in the order that oneDNN reads them in, siblings joined into one product."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from splitspec.engine import threads
from splitspec.engine.feed import LONGEST_SHORT_FEED
from splitspec.engine.probe import Probe

_linear = torch.ops.mkldnn._linear_pointwise.default


class Slabs:
    """How the rows of a pass are cut into products, so that a row's bits depend on its own feed alone.

    Long feeds are products of their own, the rows of short ones are cut into slabs of no more. Where the
    number of rows makes no difference (`needed` False) each pass is one product.
    """

    def __init__(self, *, needed: bool) -> None:
        self._needed = needed
        self._sizes: list[int] = []

    def begin(self, feed_sizes: Sequence[int]) -> None:
        """The rows of the next pass, feed by feed."""
        self._sizes = []
        short = 0
        for size in feed_sizes:
            if size > LONGEST_SHORT_FEED:
                self._sizes += [*_cut(short), size]
                short = 0
            else:
                short += size
        self._sizes += _cut(short)

    def of(self, num_rows: int) -> list[int]:
        """The sizes for a layer that is given so many rows: all of the pass, or only those of the head."""
        if num_rows <= LONGEST_SHORT_FEED or not self._needed:
            return [num_rows] * (num_rows > 0)
        return self._sizes if num_rows == sum(self._sizes) else _cut(num_rows)


def _cut(num_rows: int) -> list[int]:
    full, rest = divmod(num_rows, LONGEST_SHORT_FEED)
    return [LONGEST_SHORT_FEED] * full + [rest] * (rest > 0)


class PackedLinear(nn.Module):
    """A linear layer on a CPU, its weights reordered once. [..., in] to [..., out]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, slabs: Slabs) -> None:
        super().__init__()
        self.out_features = len(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), LONGEST_SHORT_FEED)
        self._bias = None if bias is None else bias.detach()
        self._num_bytes = weight.nbytes
        self._slabs = slabs

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        sizes = self._slabs.of(given.shape[:-1].numel())
        if len(sizes) == 1 and sizes[0] > 1:
            return self._product(given)
        rows = given.reshape(-1, given.shape[-1])
        if not sizes:
            result = rows.new_empty(0, self.out_features)
        elif sizes == [1]:
            # A single row takes a kernel that adds in another order.
            result = self._product(rows.expand(2, -1).contiguous())[:1]
        else:
            result = torch.cat([self._product(slab) for slab in torch.split(rows, sizes)])
        return result.view(*given.shape[:-1], self.out_features)

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        with threads.worth(self._num_bytes, rows.shape[:-1].numel()):
            result: torch.Tensor = _linear(rows, self._weight, self._bias, "none", [], "")
        return result


class _Joined:
    """One product for several layers that are given the same tensor, one after the other."""

    def __init__(self, whole: PackedLinear) -> None:
        self._whole = whole
        self._given: torch.Tensor | None = None
        self._result: torch.Tensor | None = None

    def part(self, given: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Columns start to stop of the product; it is let go of with the last ones."""
        if self._given is not given or self._result is None:
            self._given, self._result = given, self._whole(given)
        columns = self._result.narrow(-1, start, stop - start)
        if stop == self._whole.out_features:
            self._given = self._result = None
        return columns


class JoinedLinear(nn.Module):
    """One of the layers of a joined product."""

    def __init__(self, joined: _Joined, start: int, stop: int) -> None:
        super().__init__()
        self._joined, self._start, self._stop = joined, start, stop

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self._joined.part(given, self._start, self._stop)


def has_tile_registers() -> bool:
    """Whether this processor takes other kernels in bfloat16 for many rows."""
    supported: bool = torch.cpu._is_amx_tile_supported()
    return supported


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether oneDNN has fast products for this element type here."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


@torch.inference_mode()
def pack_linears(model: nn.Module, found: Probe, slabs: Slabs) -> None:
    """Replace all linear layers but those in found.read; the weights in their first order are freed, but for
    a tied embedding's.
    """
    for siblings in found.siblings:
        layers: list[Any] = [getattr(parent, name) for parent, name in siblings]
        if len({layer.bias is None for layer in layers}) == 1:
            _join(siblings, layers, slabs)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child not in found.read:
                setattr(parent, name, PackedLinear(child.weight, child.bias, slabs))


def _join(places: Sequence[tuple[nn.Module, str]], layers: Sequence[Any], slabs: Slabs) -> None:
    weight = torch.cat([layer.weight for layer in layers])
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    joined = _Joined(PackedLinear(weight, bias, slabs))
    start = 0
    for (parent, name), layer in zip(places, layers, strict=True):
        setattr(parent, name, JoinedLinear(joined, start, start + layer.out_features))
        start += layer.out_features
