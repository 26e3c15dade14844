"""taskferry example: two small base models, a LoRA of the first, and text, to try every command on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from taskferry.cli.options import Json, Quiet
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.example import write_example


def run(
    folder: Annotated[Path, typer.Argument(help="a new folder")], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Write two small models, a LoRA and data into a new folder: every command of the documentation runs in it."""
    with waiting(quiet or as_json, f"writing {folder}"):
        parts = write_example(folder)
    if as_json:
        print_json({"folder": str(folder), "parts": parts})
        return
    if quiet:
        return
    console = Console(highlight=False)
    for name, what in parts.items():
        console.print(f"[cyan]{name:>12}[/]  {plain(what)}")
    console.print(
        f"[bold]next[/]  cd {plain(folder)}, then\n"
        "      taskferry transfer --source-tuned my-lora --target-base base-b --calibration data.jsonl",
        soft_wrap=True,
    )
