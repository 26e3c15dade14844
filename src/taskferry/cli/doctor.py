"""taskferry doctor: what is installed, which device there is, and whether a pair of models would go together."""

from __future__ import annotations

import importlib.metadata
import platform
from collections import Counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from taskferry.cli.options import Json
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.errors import TaskferryError

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
    tuned: Annotated[
        str | None, typer.Option("--source-tuned", help="a fine-tune of the source: what of it would move")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what is installed, what is missing, and what would move between two models."""
    if tuned is not None and target is None:
        raise TaskferryError("--source-tuned moves between two models: give the source and the target before it")
    with waiting(as_json):
        report = installed()
        if source is not None:
            report |= one(source) if target is None else pair(source, target, tuned)
    if as_json:
        print_json(report)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in report.items():
        lines = [f"{count} {reason}" for reason, count in value.items()] if isinstance(value, dict) else [str(value)]
        table.add_row(name, plain("\n".join(lines)))
    Console(highlight=False).print(table)


def installed() -> dict[str, Any]:
    """Versions and the device."""
    import torch

    cuda = torch.cuda.is_available()
    report: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else f"cpu, {torch.get_num_threads()} threads",
    }
    for package, extra in EXTRAS.items():
        try:
            report[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            report[package] = f"missing: pip install 'taskferry[{extra}]'"
    return report


def one(model: str) -> dict[str, Any]:
    """What there is to move in a model."""
    from taskferry.layers.discovery import find_sites
    from taskferry.models import load_model

    loaded = load_model(model)
    layers = f"{len(find_sites(loaded.model))} linear layers; a second model says what would move between the two"
    return {"model": type(loaded.model).__name__, "has": layers}


def pair(source: str, target: str, tuned: str | None = None) -> dict[str, Any]:
    """Count what moves between two models, or of a fine-tune; what stays and why; or why `transfer` refuses them."""
    from taskferry.coverage import reasons_to_keep
    from taskferry.engines.whole import unchanged
    from taskferry.layers.discovery import find_sites
    from taskferry.layers.pairing import pair_sites
    from taskferry.models import load_model, load_tuned
    from taskferry.objectives.preparation import language_kind

    A, B = load_model(source), load_model(target)
    report: dict[str, Any] = {"pair": f"{type(A.model).__name__} to {type(B.model).__name__}"}
    try:
        language_kind(A, B)
    except TaskferryError as error:
        return {**report, "would move": f"nothing, transfer refuses this pair: {error}"}
    sites = find_sites(B.model)
    pairs, unpaired = pair_sites(find_sites(A.model), sites)
    linear = {name for site in sites for name in (site.weight, site.bias) if name}
    others = [reason for name, reason in reasons_to_keep(B.model).items() if name not in linear]
    if tuned is None:
        still = {}
        report["could move"] = (
            f"into {len(pairs)} of the {len(sites)} linear layers of {target}, as far as a fine-tune changes those of "
            f"{source}: --source-tuned counts them"
        )
    else:
        still = unchanged(pairs, load_tuned(tuned, A).tau.deltas.keys())
        report["would move"] = f"into {len(pairs) - len(still)} of the {len(sites)} linear layers of {target}"
    stays = Counter([*unpaired.values(), *still.values(), *others])
    report["would stay"] = dict(stays.most_common()) or "nothing"
    return report
