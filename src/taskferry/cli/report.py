"""taskferry report: one page that shows what was moved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from taskferry.cli.options import Json, Quiet
from taskferry.cli.terminal import plain, print_json, waiting


def run(
    folder: Annotated[Path, typer.Argument(help="an output folder of transfer or apply")],
    out: Annotated[Path | None, typer.Option(help="where to write the page (default: beside what it shows)")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write the page of a transfer, for people: one HTML file that needs nothing else."""
    with waiting(quiet or as_json):
        from taskferry.output.report import write_report
    path, verdict = write_report(folder, out)
    if as_json:
        print_json({"written": str(path), "verdict": verdict})
    elif not quiet:
        console = Console(highlight=False, soft_wrap=True)
        console.print(plain(verdict))
        console.print(f"[bold]next[/]   open {plain(path)} in a browser")
