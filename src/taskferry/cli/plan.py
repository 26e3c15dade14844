"""taskferry plan: what a transfer will cost here, before it is done."""

from __future__ import annotations

from typing import Any

import typer

from taskferry.cli.options import Json, YamlFile, with_settings
from taskferry.cli.terminal import waiting
from taskferry.jobs.settings import PlanSettings
from taskferry.settings import load_settings


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("plan")(with_settings(PlanSettings)(run))


def run(given: dict[str, Any], config: YamlFile = None, as_json: Json = False) -> None:
    """Time and memory of a transfer on this machine, from the sizes and a few seconds of trial."""
    with waiting(as_json):
        settings = load_settings(PlanSettings, config, given)
        from taskferry.cli.screen import Screen
        from taskferry.jobs.fit import plan_transfer
    screen = Screen(as_json=as_json, show_plan=True)
    with screen.bars():
        plan_transfer(settings, screen)
