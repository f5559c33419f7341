"""The target worker: see servicer.py for its service, __main__.py for its process."""

import os

# Threads that wait at OpenMP's barriers sleep instead of spinning. Where a core is shared, with another
# worker or under a CPU limit, spinning made a pass 3 to 13 times slower; it has to be set before torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
