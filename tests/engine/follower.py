"""`python -m tests.engine.follower`: another rank. It loads what a line of its input says, and follows."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from splitspec.engine.parallel import Ranks
from tests.engine import tiny


def main() -> None:
    ranks = Ranks.join(torch.device("cpu"))
    for line in sys.stdin:
        settings = json.loads(line)
        ranks.follow(tiny.load(Path(settings.pop("directory")), ranks=ranks, **settings))
    ranks.leave()


if __name__ == "__main__":
    main()
