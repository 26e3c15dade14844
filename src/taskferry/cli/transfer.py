"""taskferry transfer: source base + tuned source + target base + calibration → output folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from taskferry.choices import GENERATE, is_language_class
from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, example, with_settings
from taskferry.cli.terminal import waiting
from taskferry.disk.files import read_json
from taskferry.errors import MissingSettings, TaskferryError
from taskferry.jobs.settings import TransferSettings
from taskferry.settings import load_settings, read_yaml


def register(app: typer.Typer) -> None:
    """Add the verb."""
    shown = example(
        "taskferry transfer --source-base base-a --source-tuned my-lora --target-base base-b "
        "--calibration data.jsonl --out my-lora-on-b"
    )
    app.command("transfer", epilog=shown)(with_settings(TransferSettings)(run))


def run(
    given: dict[str, Any], config: YamlFile = None, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False
) -> None:
    """Move a fine-tune (a full model or a LoRA) to another base model."""
    with waiting(quiet or as_json):
        try:
            settings = load_settings(TransferSettings, config, given)
        except MissingSettings as error:
            if error.names != ("calibration",):
                raise
            known = given if config is None else {**read_yaml(config), **given}
            raise TaskferryError(f"{error.sentence}: {samples_to_give(known)}") from error
        from taskferry.cli.screen import Screen, next_after
        from taskferry.jobs.transfer import transfer
    screen = Screen(quiet=quiet, as_json=as_json, dry_run=dry_run)
    with screen.bars():
        outcome = transfer(settings, command=command_line(), reporter=screen, dry_run=dry_run)
    if outcome is None:
        return
    screen.verdict(outcome, next_after(settings, outcome))
    if outcome.written is None:
        raise typer.Exit(3)


def samples_to_give(given: Mapping[str, Any]) -> str:
    """Where nothing but samples is missing: what they can be, and the next command to type."""
    forms = "give JSONL, CSV, Parquet, an image folder or a hub dataset"
    if _may_write(str(given.get("source_base") or given.get("target_base", ""))):
        return (
            f"{forms}, or let the tuned source of a language model write samples itself: "
            f"{command_line()} --calibration {GENERATE}"
        )
    return (
        f"{forms}, of which labels may be missing, for the tuned source gives them: "
        f"{command_line()} --calibration my-samples --labels teacher"
    )


def _may_write(base: str) -> bool:
    """Whether a model is a language model, as far as its folder says; of a hub's nothing is known yet."""
    config = Path(base) / "config.json"
    named = read_json(config).get("architectures") if config.is_file() else None
    unknown = not Path(base).exists() and not base.startswith("openclip:")
    return unknown or (isinstance(named, list) and any(is_language_class(str(name)) for name in named))


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["taskferry", *sys.argv[1:]])
