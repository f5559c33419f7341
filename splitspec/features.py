"""Target features to bytes and back. The coordinator relays them as they are, and never reads them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError

_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
#: Of a message of at most MAX_MESSAGE_BYTES. A longer text's features take several rounds.
_MAX_BYTES = 3 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class FeatureFormat:
    """Which features go over the wire: outputs of the decoder layers `layers`, as elements of `dtype`."""

    layers: tuple[int, ...]
    dtype: str

    @classmethod
    def from_proto(cls, message: common_pb2.FeatureRequest) -> FeatureFormat | None:
        """None for a request that asks for none. Raises InvalidRequestError."""
        if not message.layers:
            return None
        if message.dtype not in _DTYPES:
            expected = f"one of {', '.join(_DTYPES)}"
            raise InvalidRequestError.of("open.features.dtype", message.dtype, expected)
        return cls(tuple(message.layers), message.dtype)

    def most_tokens(self, hidden_size: int) -> int:
        """How many tokens' features a message has room for, at least one."""
        return max(1, _MAX_BYTES // (len(self.layers) * hidden_size * _DTYPES[self.dtype].itemsize))

    def encode(self, start: int, features: torch.Tensor) -> common_pb2.Features:
        """features: [tokens, layers, hidden size] in any element type, of the tokens from `start` on."""
        elements = features.to(_DTYPES[self.dtype]).cpu().contiguous()
        # NumPy has no bfloat16.
        data = elements.view(torch.int16).numpy().astype("<i2", copy=False).tobytes()
        return common_pb2.Features(start=start, shape=elements.shape, dtype=self.dtype, data=data)

    def decode(self, message: common_pb2.Features) -> torch.Tensor:
        """[tokens, layers, hidden size] on the CPU. Raises InvalidRequestError for another format."""
        if message.dtype != self.dtype:
            raise InvalidRequestError.of("propose.features.dtype", message.dtype, self.dtype)
        shape = list(message.shape)
        if len(shape) != 3 or shape[1] != len(self.layers) or 0 in shape:
            expected = f"tokens, the {len(self.layers)} layers, hidden size, none of them 0"
            raise InvalidRequestError.of("propose.features.shape", shape, expected)
        size = shape[0] * shape[1] * shape[2] * 2
        if len(message.data) != size:
            raise InvalidRequestError.of(
                "propose.features.data", f"{len(message.data)} bytes", f"{size} for the shape {shape}"
            )
        # A copy, since bytes can't be written.
        return torch.frombuffer(bytearray(message.data), dtype=_DTYPES[self.dtype]).view(shape)
