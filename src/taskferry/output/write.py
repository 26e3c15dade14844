"""Write a moved change as a LoRA adapter, a full model, or a task vector; load it again and compare.

>>> with staged_folder(out) as folder:
...     write_form(folder, "lora", change, target, base="base-b", like=adapter)
...     check_written(folder, "lora", change, target)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taskferry.collect.device import wide
from taskferry.config import Form
from taskferry.engines.lazy import LazyModel
from taskferry.errors import TaskferryError
from taskferry.integrations.hub import hub_id
from taskferry.layers.discovery import block_paths, find_sites
from taskferry.models import Adapter, Loaded, Skeleton, load_model, read_adapter, write_adapter
from taskferry.models.lowrank import compress
from taskferry.taskvector import Delta, LowRank, TaskVector, as_dense, match_names

FORMS: dict[Form, str] = {"lora": "a LoRA adapter", "model": "a full model", "task-vector": "a task vector"}
TASK_VECTOR = "task_vector.safetensors"
SLICE = 2**20  # numbers at a time
ROUNDING = 0.1  # of ‖τ‖²: more than this is told
Target = Loaded | LazyModel | Skeleton


def form_of(asked: Form | None, adapter: Adapter | None) -> Form:
    """The form that was asked for; unless told, a LoRA in gives a LoRA out."""
    return asked or ("model" if adapter is None else "lora")


def truncate(
    change: TaskVector, form: Form, rank: int | None, adapter: Adapter | None
) -> tuple[TaskVector, dict[str, Any]]:
    """The change in the form that is written, and what a cut to a LoRA loses.

    A low-rank change stays as it is, unless a rank is given; a dense one is cut to the rank of the LoRA that came in.
    """
    if form != "lora" or (rank is None and change.low_rank):
        return change, {}
    rank = rank or (None if adapter is None else rank_of(adapter.tau))
    if rank is None:
        raise TaskferryError("a LoRA of a full fine-tune needs a rank: give --rank 32")
    wider = {name: delta for name, delta in change.deltas.items() if isinstance(delta, LowRank) and delta.rank > rank}
    dense = {name: as_dense(delta) for name, delta in wider.items()}
    low, errors, lost = compress(TaskVector({**change.deltas, **dense}, change.coverage), rank)
    return low, {"truncation": errors, "not_in_the_lora": lost}


def rank_of(change: TaskVector) -> int | None:
    """The largest rank of its low-rank parts."""
    return max((delta.rank for delta in change.deltas.values() if isinstance(delta, LowRank)), default=None)


def write_form(
    folder: Path, form: Form, change: TaskVector, target: Target, *, base: str = "", like: Adapter | None = None
) -> None:
    """Write it; a full model needs the target itself, an adapter only its skeleton."""
    if form == "lora":
        skeleton = target if isinstance(target, Skeleton) else Skeleton.of(target.model)
        name, revision = _named(base, target)
        write_adapter(folder, change, skeleton, base_name=name, revision=revision, like=like)
    elif form == "task-vector":
        change.save(folder / TASK_VECTOR)
    elif isinstance(target, Loaded):
        target.format.write(target, change, folder)
    elif isinstance(target, LazyModel):
        blocks = list(block_paths(find_sites(target.model)).values())
        target.write(change, folder, [*map(target.under, blocks), target.outside(blocks)])
    else:
        raise TaskferryError("a full model needs its base: give --target-base, or --as task-vector")


def _named(base: str, target: Target) -> tuple[str, str | None]:
    """Name and revision of a base, for the configuration of an adapter: a folder by its absolute path.

    The revision of a hub's model is the given one, or the commit that was read.
    """
    if hub_id(base) is None:
        return str(Path(base).absolute()) if base and Path(base).exists() else base, None
    name, _, revision = base.partition("@")
    folder = None if isinstance(target, Skeleton) else target.folder
    if not revision and folder is not None and folder.parent.name == "snapshots":
        revision = folder.name
    return name, revision or None


def check_written(folder: Path, form: Form, change: TaskVector, target: Target) -> None:
    """Load what was written and compare it with what was meant, up to the rounding of its precision."""
    if isinstance(target, Skeleton):
        return
    if form == "task-vector":
        _compare(TaskVector.load(folder / TASK_VECTOR).dense().deltas, change.dense().deltas, 0.0)
        return
    if form == "lora":
        adapter = read_adapter(folder, Skeleton.of(target.model))
        _compare(adapter.tau.dense().deltas, change.dense().deltas, 16 * torch.finfo(adapter.dtype).eps)
        return
    if isinstance(target, LazyModel):
        target.check(folder, change)
        return
    written = dict(load_model(str(folder), like=target.model).model.named_parameters())
    base = dict(target.model.named_parameters())
    names = match_names(change.deltas, base)
    meant: dict[str, Delta] = {}
    precision = torch.finfo(target.extra.get("dtype", torch.float32)).eps
    for name, delta in change.deltas.items():
        start = base[names[name]].detach()
        meant[names[name]] = wide(start) + as_dense(delta).to(wide(start))
        precision = max(precision, torch.finfo(start.dtype).eps)
    _compare({name: written[name].detach() for name in meant}, meant, 2 * precision)


def _compare(written: Mapping[str, Delta], meant: Mapping[str, Delta], precision: float) -> None:
    for name, value in meant.items():
        found = written.get(name)
        if not isinstance(found, Tensor) or not isinstance(value, Tensor) or found.shape != value.shape:
            raise TaskferryError(f"{name} was not written as it was meant: nothing was kept")
        error = float((found - value.to(found)).abs().max())
        if not error <= precision * float(value.abs().max()) + 1e-7:
            raise TaskferryError(f"{name} was written with an error of {error:.3g}: nothing was kept")


def remarks(form: Form, change: TaskVector, target: Target, adapter: Adapter | None) -> list[str]:
    """Sentences on the form: other numbers than the target's, digits without room for a change, a larger rank."""
    if form == "lora":
        came, left = 0 if adapter is None else rank_of(adapter.tau) or 0, rank_of(change) or 0
        if 0 < came < left:
            return [f"Rank {left} (it came with {came}) where several matrices meet in one: servers need to know."]
        return []
    if form == "task-vector" or isinstance(target, Skeleton):
        return []
    told = []
    if stored := target.extra.get("quantised"):
        precision = str(target.extra["dtype"]).removeprefix("torch.")
        told.append(f"The target is stored in {stored}: the model is written dequantised, in {precision}.")
    lost, total, name = 0.0, 0.0, ""
    for before, delta in _changed(target, change):
        if before.itemsize >= 4:  # room for any change that counts
            continue
        changes, rows = as_dense(delta), max(1, SLICE // max(1, before[:1].numel()))
        name = str(before.dtype).removeprefix("torch.")
        for start in range(0, len(before), rows):
            own = wide(before[start : start + rows])
            part = changes[start : start + rows].to(own)
            lost += float(((own + part).to(before.dtype).to(own) - own - part).square().sum())
            total += float(part.square().sum())
    if lost > ROUNDING * total:
        other = "" if isinstance(target, LazyModel) else ", or --as task-vector"
        told.append(
            f"Rounding to {name}, in which the target is stored, loses {min(1.0, lost / total):.0%} of the change "
            f"(‖τ‖²): give a target in float32{other}."
        )
    return told


def _changed(target: Loaded | LazyModel, change: TaskVector) -> Iterator[tuple[Tensor, Delta]]:
    """The target's own numbers as they are written, with the change of each."""
    if isinstance(target, LazyModel):
        for name, delta in change.deltas.items():
            yield next(target.read([name], dtype=None))[1], delta
        return
    base = dict(target.model.named_parameters())
    names = match_names(change.deltas, base)
    for name, delta in change.deltas.items():
        value = base[names[name]].detach()
        yield value.to(target.extra.get("dtype", value.dtype)), delta
