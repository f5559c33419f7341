"""The command line, `splitspec ...`."""

import os
import sys


def main() -> None:
    """The console script. Imported late, so that `splitspec.cli.stack` is had without the commands."""
    if os.environ.get("COLUMNS") == "0":  # of a terminal that doesn't know: nothing would be shown
        del os.environ["COLUMNS"]
    try:
        from splitspec.cli.app import run

        run()
    except KeyboardInterrupt:  # while it was imported
        print("interrupted", file=sys.stderr)  # noqa: T201
        sys.exit(130)
