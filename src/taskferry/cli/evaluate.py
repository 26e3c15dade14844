"""taskferry evaluate: how good a model is on held-out samples."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console

from taskferry.cli.options import Json, Quiet, YamlFile, with_settings
from taskferry.cli.terminal import plain, print_json, waiting, warn
from taskferry.config import EvaluateSettings, load_settings
from taskferry.display.bars import Bar

if TYPE_CHECKING:  # torch is imported when it is used
    from taskferry.evaluation.scoring import Score


@with_settings(EvaluateSettings, positional=("model",))
def run(given: dict[str, Any], config: YamlFile = None, quiet: Quiet = False, as_json: Json = False) -> None:
    """Score a model, or a model with an adapter added, on held-out samples."""
    silent = quiet or as_json
    with waiting(silent):
        settings = load_settings(EvaluateSettings, config, given)
        from taskferry.evaluation.command import evaluate_command
    with waiting(silent, f"loading {settings.model} and {settings.test}") as done:
        bar = Bar("scoring")

        def tell(*steps: int) -> None:
            done()
            bar(*steps)

        score, head, left = evaluate_command(settings, None if silent else tell)
    if as_json:
        print_json({**asdict(score), "head": head, "warnings": left})
    if silent:
        return
    unit = "loss" if score.accuracy is None else "accuracy"
    console = Console(highlight=False)
    if score.accuracy is not None:
        console.print(f"[bold]{unit}[/]  {score.accuracy:.2f} %   [dim]loss {score.loss:.4f} per sample[/]")
    else:
        _answers(console, score)
        console.print(f"[bold]{unit}[/]  {score.loss:.4f} per token")
    console.print(f"[dim]{score.samples} samples, by {plain(head)}[/]")
    warn(console, left)


def _answers(console: Console, score: Score) -> None:
    """Print what of a language model's answers is right."""
    if score.exact is None:
        return
    generated = score.stopped is not None
    how = "generated, up to white space" if generated else "every token the likeliest at its place, not generated"
    console.print(f"[bold]exact answers[/]  {score.exact:.2f} %   [dim]{how}[/]")
    more = {
        "begins right": (score.begins, "the wanted one of the few in the data, however it goes on"),
        "valid JSON": (score.valid_json, "whatever it says"),
        "stopped": (score.stopped, "ended by the model itself"),
    }
    for name, (value, words) in more.items():
        if value is not None:
            console.print(f"[bold]{name}[/]  {value:.2f} %   [dim]{words}[/]")
