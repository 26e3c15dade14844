"""The command `taskferry`: one file a verb, and each only wires."""

from taskferry.cli.app import main

__all__ = ["main"]
