"""taskferry apply: a saved alignment and a tuned source → output folder."""

from __future__ import annotations

from typing import Any

import typer

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import waiting
from taskferry.cli.transfer import command_line
from taskferry.settings import ApplySettings, load_settings


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("apply")(with_settings(ApplySettings, positional=("alignment", "source_tuned"))(run))


def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Move a LoRA, a task vector or a tuned model by a saved alignment."""
    with waiting(quiet or as_json):
        settings = load_settings(ApplySettings, config, given)
        from taskferry.cli.screen import Screen
        from taskferry.jobs.apply import apply_alignment
    outcome = apply_alignment(settings, command=command_line())
    screen = Screen(quiet=quiet, as_json=as_json)
    added = (settings.out / "adapter_config.json").exists() or settings.as_task_vector
    what = f"{settings.target_base or 'BASE'} --add {settings.out}" if added else str(settings.out)
    what += "/task_vector.safetensors" if settings.as_task_vector else ""
    screen.verdict(outcome, f"taskferry evaluate {what} --test TEST_DATA")
