"""Environment of a worker's process, as far as it isn't set already: import it before torch loads."""

from __future__ import annotations

import os

DEFAULTS = {
    # Threads that wait at OpenMP's barriers sleep instead of spinning. Where a core is shared, with another
    # worker or under a CPU limit, spinning made a pass 3 to 13 times slower.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Products of linear layers, by their number of rows, whose descriptions (torch) and code (oneDNN) are
    # kept: at most 0.7 MiB each, a millisecond to make again. By default 1,024.
    "LRU_CACHE_CAPACITY": "256",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
for name, value in DEFAULTS.items():
    os.environ.setdefault(name, value)
