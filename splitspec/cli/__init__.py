"""The command line, `splitspec ...`."""


def main() -> None:
    """The console script. Imported late, so that `splitspec.cli.stack` is had without the commands."""
    from splitspec.cli.app import run

    run()
