"""taskferry doctor: what is installed, which device there is, and whether a pair of models would go together."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from taskferry.checkpoints import load_model
from taskferry.cli.options import Json
from taskferry.cli.screen import plain, print_json
from taskferry.sites.discovery import find_sites
from taskferry.sites.pairing import pair_sites

EXTRAS = {
    "transformers": "hf",
    "open_clip_torch": "openclip",
    "timm": "timm",
    "peft": "peft",
    "datasets": "data",
    "scipy": "methods",
    "matplotlib": "report",
    "ray": "fleet",
}


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("doctor")(run)


def run(
    source: Annotated[str | None, typer.Argument(help="a source base model")] = None,
    target: Annotated[str | None, typer.Argument(help="a target base model")] = None,
    as_json: Json = False,
) -> None:
    """Say what is installed, what is missing, and what would move between two models."""
    report = examine(source, target)
    if as_json:
        print_json(report)
        return
    console = Console(highlight=False)
    for name, value in report.items():
        console.print(f"[cyan]{name:>14}[/]  {plain(str(value))}")


def examine(source: str | None, target: str | None) -> dict[str, Any]:
    """Facts for people and machines."""
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name()
        if torch.cuda.is_available()
        else f"cpu, {torch.get_num_threads()} threads",
    }
    for package, extra in EXTRAS.items():
        try:
            report[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            report[package] = f"missing: pip install 'taskferry[{extra}]'"
    if source is not None and target is not None:
        A, B = load_model(source), load_model(target)
        pairs, unpaired = pair_sites(find_sites(A.model), find_sites(B.model))
        report["pair"] = f"{type(A.model).__name__} to {type(B.model).__name__}: {len(pairs)} sites would move"
        report["would not move"] = dict(unpaired) or "nothing"
    return report
