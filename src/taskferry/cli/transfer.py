"""taskferry transfer: a tuned source, a target base and samples → an output folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from taskferry.choices import GENERATE, is_language_class
from taskferry.cli.options import DryRun, Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import command_line, waiting
from taskferry.config import TransferSettings, load_settings, read_yaml
from taskferry.errors import MissingSettings, TaskferryError

EXAMPLE = "Example: taskferry transfer --source-tuned my-lora --target-base base-b --calibration data.jsonl"


@with_settings(TransferSettings)
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
        from taskferry.jobs import transfer
    screen = Screen(quiet=quiet, as_json=as_json, dry_run=dry_run)
    with screen.bars():
        result = transfer(settings, command=command_line(), reporter=screen, dry_run=dry_run)
    if result is None:
        return
    screen.verdict(result, next_after(settings, result))
    if result.folder is None:
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
    """True for a language model, as far as its folder says; of a hub's nothing is known yet."""
    from taskferry.disk.files import read_json

    config = Path(base) / "config.json"
    named = read_json(config).get("architectures") if config.is_file() else None
    unknown = not Path(base).exists() and not base.startswith("openclip:")
    return unknown or (isinstance(named, list) and any(is_language_class(str(name)) for name in named))
