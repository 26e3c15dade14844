"""taskferry fleet: thousands of adapters to new bases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from taskferry.cli.options import Json, Quiet
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.config import FleetSettings, load_settings

PlanFile = Annotated[Path, typer.Argument(help="a YAML file: adapters, out, and moves with their alignments")]
FAILED = 4  # some adapters could not be moved; the others were


def run(plan: PlanFile, quiet: Quiet = False, as_json: Json = False) -> None:
    """Move every adapter of a folder to one or more new bases, in parallel; rerun to resume."""
    with waiting(quiet or as_json):
        settings = load_settings(FleetSettings, plan, {})
        from taskferry.fleet import run_fleet
    console = Console(highlight=False)
    if quiet or as_json:
        summary = run_fleet(settings)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bars:
            task = bars.add_task("adapters", total=None)

            def progress(counts: Mapping[str, int], total: int, rate: float) -> None:
                text = f"{counts['done']} done, {counts['failed']} failed, {rate:.0f} a second"
                bars.update(task, description=text, completed=sum(counts.values()), total=total)

            summary = run_fleet(settings, progress)
    if as_json:
        print_json(summary)
    elif not quiet:
        console.print(
            f"[bold green]moved[/]  {summary['done']} of {summary['of']}, {summary['failed']} failed, "
            f"{summary['pending']} pending; {summary['adapters_a_second']} a second"
        )
        for reason, count in list(summary["reasons"].items())[:5]:
            console.print(f"[dim]  {count} failed: {plain(reason)}[/]")
        if len(summary["bases"]) > 1:
            told = ", ".join(f"{plain(base)} ({count})" for base, count in list(summary["bases"].items())[:5])
            console.print(f"[yellow]  adapters were made on {len(summary['bases'])} bases: {told}[/]")
        console.print(f"[dim]  what became of each: {plain(summary['manifest'])}[/]")
        console.print(f"[bold]next[/]   open {plain(settings.out)}/summary.html; fix what failed and run it again")
    if summary["failed"]:
        raise typer.Exit(FAILED)
