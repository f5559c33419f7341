"""How many threads an operation gets: to wake them costs more than most operations of a small pass take.

For threads that sleep between operations, as OMP_WAIT_POLICY=PASSIVE has it. Where they spin, a pass is
faster on cores of its own, and takes twice as long where others need those cores, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

import torch

#: Up to here, threads don't pay for the steps between a layer's products.
_FEW_ROWS = 128
#: Measured: one thread reads 10 GB/s, and to wake a second one takes 80 us.
_WORTH_BYTES = 3 << 20
#: What `worth` gives back within `sparing`; 0 outside.
_spared = 0


@contextlib.contextmanager
def sparing(num_rows: int) -> Iterator[None]:
    """In a pass of few rows one thread for all operations but those that are `worth` more.

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


class worth:  # noqa: N801 - a context manager
    """All threads for an operation, where it reads enough that they pay; num_bytes: so many, for few rows."""

    def __init__(self, num_bytes: int, num_rows: int) -> None:
        # More rows take longer than to read what they are multiplied with.
        self._woken = _spared > 1 and num_bytes * max(1, num_rows // 16) >= _WORTH_BYTES

    def __enter__(self) -> None:
        if self._woken:
            torch.set_num_threads(_spared)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._woken:
            torch.set_num_threads(1)
