"""taskferry transfer: source base + tuned source + target base + calibration → output folder."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import typer

from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, with_settings
from taskferry.cli.screen import Screen
from taskferry.engines.ranks import rank_and_size
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.transfer import transfer
from taskferry.methods.registry import FEW
from taskferry.settings import load_settings


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("transfer")(with_settings(TransferSettings)(run))


def run(
    given: dict[str, Any], config: YamlFile = None, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False
) -> None:
    """Move a fine-tune (a full model or a LoRA) to another base model."""
    settings = load_settings(TransferSettings, config, given)
    screen = Screen(quiet=quiet, as_json=as_json, show_plan=dry_run)
    with screen.bars():
        outcome = transfer(settings, command=command_line(), reporter=screen, dry_run=dry_run)
    if outcome is None or rank_and_size()[0] > 0:
        return
    if outcome.written is None:
        screen.verdict(outcome, "try more samples, another objective, or --scale 1 to write it all the same")
        raise typer.Exit(3)
    after = f"evaluate {settings.out} on your own data before you use it"
    if not settings.refine and settings.engine_name == "whole" and len(outcome.record["calibration"]["indices"]) >= FEW:
        after += "; --refine 100 would train it on, towards the tuned source and without labels"
    screen.verdict(outcome, after)


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["taskferry", *sys.argv[1:]])
