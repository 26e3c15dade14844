"""taskferry methods: which ways to move a change there are, with their settings."""

from __future__ import annotations

from typing import Literal, get_args, get_origin

import typer
from rich.console import Console
from rich.table import Table

from taskferry.cli.options import Json
from taskferry.cli.terminal import plain, print_json, waiting


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("methods")(run)


def run(as_json: Json = False) -> None:
    """List the methods with their settings."""
    with waiting(as_json):
        from taskferry.methods import methods

        known = methods()
    if as_json:
        told = {
            name: {
                setting: {
                    "default": default,
                    "help": text,
                    **({"choices": get_args(kind)} if get_origin(kind) is Literal else {}),
                }
                for setting, (kind, default, text) in found.settings.items()
            }
            for name, found in known.items()
        }
        print_json(told)
        return
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for column in ("method", "setting", "default", "what it does"):
        table.add_column(column)
    for name, found in known.items():
        table.add_row(f"[bold]{name}[/]", "", "", plain(found.summary))
        for setting, (_, default, text) in found.settings.items():
            table.add_row("", setting, plain(str(default)), plain(text))
    Console(highlight=False).print(table)
