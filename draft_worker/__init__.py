"""The draft worker: see servicer.py for its service, __main__.py for its process."""

from splitspec import worker_environment as worker_environment  # first, as torch reads it when it loads
