"""taskferry report: one page that shows what was done."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from taskferry.cli.options import Json, Quiet
from taskferry.cli.terminal import plain, print_json, waiting


class Form(str, Enum):
    """What a report can be written as."""

    html = "html"
    md = "md"


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("report")(run)


def run(
    given: Annotated[Path, typer.Argument(metavar="PATH", help="an output folder of transfer")],
    form: Annotated[
        Form, typer.Option("--format", help="one HTML page that needs nothing else, or Markdown")
    ] = Form.html,
    out: Annotated[Path | None, typer.Option(help="where to write it (default: beside what it shows)")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Write a page that shows a transfer."""
    with waiting(quiet or as_json, "drawing"):
        from taskferry.report.command import write_report

        path, shown = write_report(given, out, form.value)
    if as_json:
        print_json({"written": str(path), "kind": shown.kind, "title": shown.title})
    elif not quiet:
        console = Console(highlight=False, soft_wrap=True)
        console.print(f"{plain(shown.lead)}")
        console.print(f"[bold]next[/]   open {plain(path)} in a browser" if form is Form.html else f"in {plain(path)}")
