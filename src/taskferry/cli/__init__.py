"""The command `taskferry`: one file a verb, and each only wires. What a verb needs is imported when it runs."""

from __future__ import annotations

import sys

from taskferry.version import __version__


def main() -> None:
    """Run the command line."""
    if sys.argv[1:] == ["--version"]:  # not worth the import of anything
        print(__version__)
        return
    from taskferry.cli.app import run

    run()


__all__ = ["main"]
