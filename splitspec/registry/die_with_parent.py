"""Becomes another program that the kernel kills when its parent ends, however the parent ends.

A program of its own, run as `python die_with_parent.py PARENT_PID PROGRAM ARGUMENT...`: to do the same
between fork and exec of a parent with threads (gRPC's, torch's) could deadlock. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, program: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before that.
    if os.getppid() != parent_pid:
        sys.exit("the parent has ended")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
