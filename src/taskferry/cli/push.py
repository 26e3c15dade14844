"""taskferry push: an output folder → a repository on a model hub."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.settings import PushSettings, load_settings


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("push")(with_settings(PushSettings, positional=("folder", "repo"))(run))


def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Send what transfer or apply wrote to a model hub. Nothing else ever sends anything."""
    with waiting(quiet or as_json, "starting"):
        settings = load_settings(PushSettings, config, given)
        from taskferry.integrations.hub import push
    address = push(
        settings.folder,
        settings.repo,
        base_model=settings.base_model,
        private=not settings.public,
        revision=settings.revision,
    )
    if as_json:
        print_json({"repository": address, "private": not settings.public})
    elif not quiet:
        who = "everybody" if settings.public else "you alone, where it is new"
        console = Console(highlight=False)
        console.print(f"[bold green]sent[/]  {plain(address)}, seen by {who}")
