"""Features go to bytes and back unchanged, and what is wrong with a message is named."""

from __future__ import annotations

import pytest
import torch

from protos.v1 import common_pb2
from splitspec.errors import InvalidRequestError
from splitspec.features import FeatureFormat
from splitspec.types import MAX_MESSAGE_BYTES

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("name", DTYPES)
def test_there_and_back(name: str) -> None:
    sent = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0)).transpose(0, 1)
    found = FeatureFormat((7, 2, 9, 1, 4), name)
    message = found.encode(12, sent)
    assert (message.start, list(message.shape), message.dtype) == (12, [2, 5, 3], name)
    assert torch.equal(found.decode(message), sent.to(DTYPES[name]))


def test_bytes_are_little_endian_in_row_major_order() -> None:
    message = FeatureFormat((0, 1), "float16").encode(0, torch.tensor([[[1.0, -2.0], [0.5, 0.0]]]))
    assert message.data == bytes.fromhex("003c 00c0 0038 0000")
    message = FeatureFormat((0,), "bfloat16").encode(0, torch.tensor([[[1.0]], [[-2.0]]]))
    assert message.data == bytes.fromhex("803f 00c0")


def test_a_message_has_room_for_so_many() -> None:
    found = FeatureFormat((2, 16, 29), "bfloat16")
    tokens = found.most_tokens(4096)
    assert tokens == 128
    message = found.encode(0, torch.zeros(tokens, 3, 4096))
    assert MAX_MESSAGE_BYTES - message.ByteSize() > 2**19
    assert found.most_tokens(2**21) == 1


def test_what_is_asked_for() -> None:
    assert FeatureFormat.from_proto(common_pb2.FeatureRequest(dtype="float16")) is None
    request = common_pb2.FeatureRequest(layers=[3, 1], dtype="float16")
    assert FeatureFormat.from_proto(request) == FeatureFormat((3, 1), "float16")
    request.dtype = "float32"
    with pytest.raises(
        InvalidRequestError, match=r"open.features.dtype is 'float32', expected one of"
    ) as caught:
        FeatureFormat.from_proto(request)
    assert caught.value.field == "open.features.dtype"


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"dtype": "bfloat16"}, "propose.features.dtype is 'bfloat16', expected float16"),
        ({"shape": [2, 3, 4]}, r"propose.features.shape is \[2, 3, 4\], expected tokens, the 2 layers"),
        ({"shape": [2, 2]}, r"propose.features.shape is \[2, 2\], expected tokens, the 2 layers"),
        (
            {"shape": [0, 2, 3], "data": b""},
            r"propose.features.shape is \[0, 2, 3\], expected .* none of them 0",
        ),
        ({"data": b"12345"}, "propose.features.data is '5 bytes', expected 24"),
    ],
)
def test_other_formats_are_refused(changes: dict[str, object], sentence: str) -> None:
    found = FeatureFormat((0, 1), "float16")
    good = {"dtype": "float16", "shape": [2, 2, 3], "data": bytes(24)}
    assert found.decode(common_pb2.Features(**good)).shape == (2, 2, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match=sentence):
        found.decode(common_pb2.Features(**(good | changes)))  # type: ignore[arg-type]
