"""How many threads an operation gets: to wake them costs more than most operations of a small pass take."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch

#: So far, threads only pay for products of a layer, not for the steps between them.
_FEW_ROWS = 128
#: What `whole` gives back within `sparing`; 0 outside.
_spared = 0


@contextlib.contextmanager
def sparing(num_rows: int) -> Iterator[None]:
    """In a pass of few rows one thread for all operations but those `with whole`.

    Only one thread of Python may be in it at a time.
    """
    global _spared
    if num_rows > _FEW_ROWS:
        yield
        return
    _spared = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_spared)
        _spared = 0


class _Whole:
    """All threads for an operation that is worth it. Not reentrant."""

    def __enter__(self) -> None:
        if _spared > 1:
            torch.set_num_threads(_spared)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _spared > 1:
            torch.set_num_threads(1)


whole = _Whole()
