"""taskferry transfer: source base + tuned source + target base + calibration → output folder."""

from __future__ import annotations

import shlex
import sys
from typing import Any

import typer

from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, example, with_settings
from taskferry.cli.terminal import waiting
from taskferry.engines.launch import rank_and_size
from taskferry.jobs.settings import TransferSettings
from taskferry.settings import load_settings


def register(app: typer.Typer, panel: str) -> None:
    """Add the verb."""
    shown = example(
        "taskferry transfer --source-base base-a --source-tuned my-lora --target-base base-b "
        "--calibration data.jsonl --out my-lora-on-b"
    )
    app.command("transfer", rich_help_panel=panel, epilog=shown)(with_settings(TransferSettings)(run))


def run(
    given: dict[str, Any], config: YamlFile = None, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False
) -> None:
    """Move a fine-tune (a full model or a LoRA) to another base model."""
    with waiting(quiet or as_json):
        settings = load_settings(TransferSettings, config, given)
        from taskferry.cli.screen import Screen, next_after
        from taskferry.jobs.transfer import transfer
    screen = Screen(quiet=quiet, as_json=as_json, show_plan=dry_run)
    with screen.bars():
        outcome = transfer(settings, command=command_line(), reporter=screen, dry_run=dry_run)
    if outcome is None or rank_and_size()[0] > 0:
        return
    screen.verdict(outcome, next_after(settings, outcome))
    if outcome.written is None:
        raise typer.Exit(3)


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["taskferry", *sys.argv[1:]])
