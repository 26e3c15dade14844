"""taskferry evaluate: how good a model is on held-out samples."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import plain, print_json, waiting, warn
from taskferry.display.bars import Bar
from taskferry.settings import EvaluateSettings, load_settings


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("evaluate")(with_settings(EvaluateSettings, positional=("model",))(run))


def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Score a model, or a model with an adapter added, on held-out samples."""
    silent = quiet or as_json
    with waiting(silent):
        settings = load_settings(EvaluateSettings, config, given)
        from taskferry.evaluation.command import evaluate_command
        from taskferry.integrations.hub import add_score, read_card
    if settings.card is not None:
        read_card(settings.card)  # before the work
    with waiting(silent, f"loading {settings.model} and {settings.test}") as done:
        bar = Bar("scoring")

        def tell(*steps: int) -> None:
            done()
            bar(*steps)

        score, head, left = evaluate_command(settings, None if silent else tell)
    if settings.card is not None:
        metric = "loss" if score.accuracy is None else "accuracy"
        add_score(settings.card, data=settings.test, metric=metric, value=score.value, samples=score.samples, how=head)
    if as_json:
        print_json({**asdict(score), "head": head, "warnings": left})
    if silent:
        return
    unit = "loss" if score.accuracy is None else "accuracy"
    console = Console(highlight=False)
    if score.accuracy is not None:
        console.print(f"[bold]{unit}[/]  {score.accuracy:.2f} %   [dim]loss {score.loss:.4f} per sample[/]")
    else:
        if score.right is not None:
            console.print(f"[bold]right answers[/]  {score.right:.2f} %   [dim]the likeliest of those in the data[/]")
        if score.exact is not None:
            console.print(f"[bold]exact answers[/]  {score.exact:.2f} %   [dim]word for word, greedily[/]")
        console.print(f"[bold]{unit}[/]  {score.loss:.4f} per token")
    console.print(f"[dim]{score.samples} samples, by {plain(head)}[/]")
    warn(console, left)
