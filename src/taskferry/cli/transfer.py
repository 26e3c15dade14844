"""taskferry transfer: source base + tuned source + target base + calibration → output folder."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from taskferry.calibration.choices import GENERATE
from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, with_settings
from taskferry.cli.screen import Screen
from taskferry.disk.files import read_json
from taskferry.engines.ranks import rank_and_size
from taskferry.errors import TaskferryError
from taskferry.fitting.language import is_language_class
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.transfer import transfer
from taskferry.methods.registry import FEW
from taskferry.settings import load_settings, read_yaml


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("transfer")(with_settings(TransferSettings)(run))


def run(
    given: dict[str, Any], config: YamlFile = None, dry_run: DryRun = False, quiet: Quiet = False, as_json: Json = False
) -> None:
    """Move a fine-tune (a full model or a LoRA) to another base model."""
    try:
        settings = load_settings(TransferSettings, config, given)
    except TaskferryError as error:
        raise TaskferryError(
            with_samples(str(error), given if config is None else {**read_yaml(config), **given})
        ) from error
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


def with_samples(sentence: str, given: Mapping[str, Any]) -> str:
    """Where nothing but samples is missing: what they can be, and the next command to type."""
    if not sentence.endswith(": --calibration is missing"):
        return sentence
    forms = "give JSONL, CSV, Parquet, an image folder or a hub dataset"
    if _may_write(str(given.get("source_base", ""))):
        return (
            f"{sentence}: {forms}, or let the tuned source of a language model write samples itself: "
            f"{command_line()} --calibration {GENERATE}"
        )
    return (
        f"{sentence}: {forms}, of which labels may be missing, for the tuned source gives them: "
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
