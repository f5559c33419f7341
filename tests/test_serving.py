from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from splitspec.serving import CHANNEL_OPTIONS, SERVER_OPTIONS


@pytest.mark.parametrize("name", sorted({name for name, _ in [*CHANNEL_OPTIONS, *SERVER_OPTIONS]}))
def test_grpc_knows_the_option(name: str) -> None:
    # A name that gRPC doesn't know is ignored without a word.
    spec = importlib.util.find_spec("grpc._cython.cygrpc")
    assert spec is not None
    assert spec.origin is not None
    assert name.encode() in Path(spec.origin).read_bytes()
