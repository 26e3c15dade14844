"""taskferry diff: a tuned model minus its base, as one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from taskferry.cli.options import Json
from taskferry.cli.terminal import plain, print_json, waiting, warn


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("diff")(run)


def run(
    base: Annotated[str, typer.Argument(help="the base model")],
    tuned: Annotated[str, typer.Argument(help="the tuned model, LoRA or state file")],
    out: Annotated[Path, typer.Option(help="the task vector file to write")],
    as_json: Json = False,
) -> None:
    """Write the task vector of a fine-tune."""
    with waiting(as_json):
        from taskferry.jobs.apply import difference
        from taskferry.models import by_reason
    with waiting(as_json, f"loading {base} and {tuned}"):
        found = difference(base, tuned, out)
    tau, left = found.tau, by_reason(found.ignored, "is not in the file")
    if as_json:
        print_json({"written": str(out), "parameters": len(tau), "norm": tau.norm(), "warnings": left})
        return
    console = Console(highlight=False)
    console.print(f"{len(tau)} changed parameters, norm {tau.norm():.4g}, in {plain(out)}")
    warn(console, left)
