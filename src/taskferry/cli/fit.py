"""taskferry fit: the maps of a pair of base models, once, for many task vectors."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.config import FitSettings, load_settings


@with_settings(FitSettings)
def run(
    given: dict[str, Any], config: YamlFile = None, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False
) -> None:
    """Fit the maps between two base models and save them as one alignment file."""
    with waiting(quiet or as_json):
        settings = load_settings(FitSettings, config, given)
        from taskferry.cli.screen import Screen
        from taskferry.jobs import fit
    screen = Screen(quiet=quiet, as_json=as_json, dry_run=dry_run)
    with screen.bars():
        alignment = fit(settings, reporter=screen, dry_run=dry_run)
    if alignment is None:
        return
    if as_json:
        print_json({"written": str(settings.out), "provenance": alignment.provenance, "sites": alignment.table()})
    elif not quiet:
        screen.console.print(f"\n[bold green]fitted[/]   {len(alignment.pairs)} pairs of layers")
        screen.console.print(f"[bold]written[/]  {plain(settings.out)}")
        screen.console.print(f"[bold]next[/]     {plain(next_after(settings))}", soft_wrap=True)


def next_after(settings: FitSettings) -> str:
    """The command that moves the fine-tune given for reference, or any adapter."""
    tuned = settings.source_tuned or "ADAPTER"
    words = ["taskferry", "apply", str(settings.out), tuned]
    if (Path(tuned) / "config.json").is_file():  # a full model is read beside its base, and written into the target
        words += ["--source-base", settings.source_base, "--target-base", settings.target_base]
    return shlex.join([*words, "--out", f"{Path(tuned).name}-moved"])
