"""taskferry apply: a saved alignment and a tuned source → an output folder."""

from __future__ import annotations

from typing import Any

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import command_line, waiting
from taskferry.config import ApplySettings, load_settings


@with_settings(ApplySettings, positional=("alignment", "source_tuned"))
def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Move a LoRA, a task vector or a tuned model by a saved alignment."""
    with waiting(quiet or as_json):
        settings = load_settings(ApplySettings, config, given)
        from taskferry.cli.screen import Screen, scored
        from taskferry.jobs import apply
    result = apply(settings, command=command_line())
    screen = Screen(quiet=quiet, as_json=as_json)
    screen.verdict(result, f"taskferry evaluate {scored(settings, result)} --test TEST_DATA")
