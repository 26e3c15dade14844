"""taskferry inspect: what a model, task vector, adapter, alignment or output holds; how near two bases are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from taskferry.cli.options import Json
from taskferry.cli.terminal import plain, print_json, waiting
from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError

if TYPE_CHECKING:
    from taskferry.taskvector import TaskVector


def run(
    path: Annotated[str, typer.Argument(help="a model, task vector, alignment, or output folder")],
    other: Annotated[str | None, typer.Argument(help="another base: how near the two are")] = None,
    tuned: Annotated[str | None, typer.Option(help="a fine-tune of the first base, to hold that against")] = None,
    every: Annotated[bool, typer.Option("--all", help="every parameter, not one line a reason or kind")] = False,
    as_json: Json = False,
) -> None:
    """Show what a model, an adapter, an alignment or an output holds, or how near two bases are."""
    if tuned and not other:
        raise TaskferryError("--tuned is held against the distance of two bases: give the other base too")
    with waiting(as_json):
        title, rows = compare(path, other, tuned, every or as_json) if other else describe(path)
    if as_json:
        print_json({"what": title, "rows": rows})
        return
    console = Console(highlight=False)
    console.print(f"[bold]{plain(title)}[/]")
    if rows and "status" in rows[0] and not every:
        rows = by_reason(rows)
    table = Table(box=None, pad_edge=False, header_style="cyan")
    for column in rows[0] if rows else ():
        table.add_column(column.replace("_", " "))
    for row in rows:
        table.add_row(*(plain("" if value is None else str(value)) for value in row.values()))
    console.print(table)


def by_reason(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for all parameters that moved, or stayed for the same reason, with the first of them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        groups.setdefault((row["status"], row["reason"]), []).append(row["parameter"])
    return [
        {"parameters": len(names), "status": status, "reason": reason, "such_as": names[0]}
        for (status, reason), names in groups.items()
    ]


def compare(given: str, other: str, tuned: str | None, every: bool) -> tuple[str, list[dict[str, Any]]]:
    """How near two bases are, in a sentence; and by layer, or by kind of layer."""
    from taskferry.models.models import resolve
    from taskferry.nearness import NUMBER, change_norms, figures, nearness

    A, B = (Path(resolve(name)) for name in (given, other))
    found = nearness(A, B, change_norms(Path(resolve(tuned)), A) if tuned else None)
    kinds: dict[str, list[tuple[float, ...]]] = {}
    for name, sums in found.layers.items():
        kinds.setdefault(name if every else NUMBER.sub("*", name), []).append(sums)
    columns = ["distance", "cosine", *(["to_change"] if tuned else [])]
    rows: list[dict[str, Any]] = []
    for name, some in kinds.items():
        shown = figures(some)
        rounded = {key: None if (value := shown[key]) is None else round(value, 6) for key in columns}
        rows.append({"layers": name, "count": len(some), **rounded})
    return found.sentence, rows + [{"layers": name, "count": why} for name, why in found.differ.items() if every]


def describe(given: str) -> tuple[str, list[dict[str, Any]]]:
    """A title and a table."""
    path = Path(given)
    if (path / "taskferry.json").is_file():
        try:
            record = read_json(path / "taskferry.json")
            rows = [{k: row[k] for k in ("parameter", "status", "reason")} for row in record["coverage"]["rows"]]
            return str(record["verdict"]["sentence"]), rows
        except (KeyError, TypeError) as error:
            raise TaskferryError(f"{path / 'taskferry.json'} is no record of taskferry: {error!r}") from error
    from taskferry.alignment import Alignment, is_alignment  # a record needs no torch
    from taskferry.layers.discovery import find_sites
    from taskferry.models import is_adapter, load_model
    from taskferry.models.models import resolve
    from taskferry.taskvector import TaskVector, is_task_vector

    if path.is_file():
        if is_task_vector(path):
            tau = TaskVector.load(path)
            return f"task vector: {len(tau)} changed parameters, norm {tau.norm():.4g}", _changes(tau)
        if is_alignment(path):
            found = Alignment.load(path)
            models = (found.model("source")["class"], found.model("target")["class"])
            return (
                f"alignment from {models[0]} to {models[1]}: {len(found.pairs)} pairs of linear layers",
                found.table(),
            )
        raise TaskferryError(f"{given} is neither an alignment nor a task vector of taskferry")
    if is_adapter(folder := Path(resolve(given))):
        return _adapter(folder)
    loaded = load_model(given)
    sites = find_sites(loaded.model)
    columns = ("name", "stack", "block", "role", "shape", "fixed")
    stored = loaded.extra.get("quantised")
    title = f"{type(loaded.model).__name__}: {len(sites)} linear layers{f', stored in {stored}' if stored else ''}"
    return title, [{c: getattr(site, c) for c in columns} for site in sites]


def _adapter(path: Path) -> tuple[str, list[dict[str, Any]]]:
    """An adapter by itself: its settings, and the shapes of its factors."""
    from taskferry.models.peft import weights_of
    from taskferry.models.states import read_state

    config = read_json(path / "adapter_config.json")
    state = read_state(weights_of(path))
    title = f"{config.get('peft_type')} adapter of rank {config.get('r')} for {config.get('base_model_name_or_path')}"
    return title, [{"tensor": name, "shape": tuple(tensor.shape)} for name, tensor in state.items()]


def _changes(tau: TaskVector) -> list[dict[str, Any]]:
    from taskferry.taskvector import LowRank

    return [
        {
            "parameter": name,
            "shape": tuple(delta.shape),
            "rank": delta.rank if isinstance(delta, LowRank) else None,
            "norm": round(delta.norm() if isinstance(delta, LowRank) else float(delta.norm()), 6),
        }
        for name, delta in tau.deltas.items()
    ]
