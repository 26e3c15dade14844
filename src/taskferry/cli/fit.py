"""taskferry fit: the maps of a pair of base models, once, for many task vectors."""

from __future__ import annotations

from typing import Any

import typer

from taskferry.card import site_table
from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, with_settings
from taskferry.cli.screen import Screen, plain, print_json
from taskferry.pipeline import fit_alignment
from taskferry.settings import FitSettings, load_settings


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("fit")(with_settings(FitSettings)(run))


def run(
    given: dict[str, Any], config: YamlFile = None, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False
) -> None:
    """Fit the maps between two base models and save them as one alignment file."""
    settings = load_settings(FitSettings, config, given)
    screen = Screen(quiet=quiet, as_json=as_json, show_plan=dry_run)
    with screen.bars():
        alignment = fit_alignment(settings, reporter=screen, dry_run=dry_run)
    if alignment is None:
        return
    if as_json:
        print_json({"written": str(settings.out), "provenance": alignment.provenance, "sites": site_table(alignment)})
    elif not quiet:
        screen.console.print(
            f"\n[bold green]fitted[/] {len(alignment.pairs)} pairs of sites into {plain(settings.out)}"
        )
        screen.console.print(f"[bold]next[/]   taskferry apply {plain(settings.out)} my-lora --out my-lora-moved")
