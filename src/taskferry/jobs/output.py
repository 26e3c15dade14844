"""In which form a moved task vector is written: a full model, a LoRA adapter, or the task vector alone.

What was written is loaded again and compared with what was meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from taskferry.choices import TEMPLATE, WRITTEN
from taskferry.collect.device import wide
from taskferry.disk.inputs import Inputs
from taskferry.disk.staging import staged_folder
from taskferry.engines.lazy import LazyModel
from taskferry.errors import TaskferryError
from taskferry.integrations.hub import hub_id
from taskferry.jobs.record import Reporter, finish
from taskferry.jobs.settings import TransferSettings
from taskferry.layers.discovery import block_paths, find_sites
from taskferry.models import Adapter, Loaded, Skeleton, load_model, read_adapter, write_adapter, write_model
from taskferry.models.lowrank import compress
from taskferry.objectives.generation import Drawn
from taskferry.settings import ApplySettings, OutputSettings
from taskferry.taskvector import Delta, LowRank, TaskVector, as_dense, match_names

SLICE = 2**20  # numbers at a time
ROUNDING = 0.1  # of ‖τ‖²: more than this is told
FORMS = {"lora": "a LoRA adapter", "model": "a full model", "task-vector": "a task vector"}


def output_kind(settings: OutputSettings, adapter: Adapter | None) -> str:
    """Which form the settings and the input ask for: a LoRA in gives a LoRA out."""
    if settings.as_task_vector:
        return "task-vector"
    if settings.as_model:
        return "model"
    if adapter is not None and settings.rank is not None:
        raise TaskferryError("a LoRA keeps its rank exactly: leave --rank out")
    if settings.as_lora and adapter is None and settings.rank is None:
        raise TaskferryError("--as-lora of a full fine-tune needs a rank: --rank 32")
    return "lora" if adapter is not None or settings.as_lora else "model"


def in_form(settings: OutputSettings, kind: str, tau: TaskVector) -> tuple[TaskVector, dict[str, Any]]:
    """The task vector in that form, with what a cut to a LoRA loses."""
    if kind != "lora" or settings.rank is None:
        return tau, {}
    low, errors, lost = compress(tau, settings.rank)
    return low, {"truncation": errors, "not_in_the_lora": lost}


def dequantised(kind: str, target: Loaded | LazyModel | Skeleton) -> str:
    """A sentence where a model is written in other numbers than its target is stored in."""
    stored = None if isinstance(target, Skeleton) else target.extra.get("quantised")
    if kind != "model" or isinstance(target, Skeleton) or stored is None:
        return ""
    precision = str(target.extra["dtype"]).removeprefix("torch.")
    return f" The target is stored in {stored}: the model is written dequantised, in {precision}."


def rounded(kind: str, target: Loaded | LazyModel | Skeleton, tau: TaskVector) -> str:
    """A sentence where the digits that a model is stored in have no room for much of a change."""
    if kind != "model" or isinstance(target, Skeleton):
        return ""
    lost, total, name = 0.0, 0.0, ""
    for before, delta in _changed(target, tau):
        if before.itemsize >= 4:  # room for any change that counts
            continue
        changes, rows = as_dense(delta), max(1, SLICE // max(1, before[:1].numel()))
        name = str(before.dtype).removeprefix("torch.")
        for start in range(0, len(before), rows):
            own = wide(before[start : start + rows])
            change = changes[start : start + rows].to(own)
            lost += float(((own + change).to(before.dtype).to(own) - own - change).square().sum())
            total += float(change.square().sum())
    if lost <= ROUNDING * total:
        return ""
    return (
        f" Rounding to {name}, in which the target is stored, loses {min(1.0, lost / total):.0%} of the change (‖τ‖²): "
        f"give a target in float32{'' if isinstance(target, LazyModel) else ', or --as-task-vector'}."
    )


def _changed(target: Loaded | LazyModel, tau: TaskVector) -> Iterator[tuple[Tensor, Delta]]:
    """The target's own numbers as they are written, with the change of each."""
    if isinstance(target, LazyModel):
        for name, delta in tau.deltas.items():
            yield next(target.read([name], dtype=None))[1], delta
        return
    base = dict(target.model.named_parameters())
    names = match_names(tau.deltas, base)
    for name, delta in tau.deltas.items():
        value = base[names[name]].detach()
        yield value.to(target.extra.get("dtype", value.dtype)), delta


def packed(kind: str, tau: TaskVector, adapter: Adapter | None) -> str:
    """A sentence where a LoRA has a larger rank than it came with: side by side stand the factors of what is packed."""
    if kind != "lora" or adapter is None:
        return ""
    came, left = (
        max((delta.rank for delta in each.deltas.values() if isinstance(delta, LowRank)), default=0)
        for each in (adapter.tau, tau)
    )
    if left <= came:
        return ""
    return f" Rank {left} (it came with {came}) where several matrices of the source meet in one: servers need to know."


def write_output(
    settings: TransferSettings | ApplySettings,
    kind: str,
    tau: TaskVector,
    target: Loaded | LazyModel | Skeleton,
    adapter: Adapter | None,
    record: Mapping[str, Any],
    inputs: Inputs,
    reporter: Reporter | None = None,
    drawn: Drawn | None = None,
    template: str | None = None,
) -> None:
    """The folder with weights, record, settings and card; loaded again and checked, whole or not at all."""
    with staged_folder(settings.out) as folder:
        write_form(kind, tau, folder, target=target, adapter=adapter, base=settings.target_base or "")
        finish(folder, record, settings, adapter=kind == "lora")
        if drawn is not None:
            (folder / WRITTEN).write_text(drawn.lines(), encoding="utf-8")
        if template is not None:
            (folder / TEMPLATE).write_text(template, encoding="utf-8")
        reporter = reporter or Reporter()
        reporter.step("check", 0, 1)
        if not isinstance(target, Skeleton):
            check_output(folder, kind, tau, target)
        inputs.check()
        reporter.step("check", 1, 1)


def write_form(
    kind: str,
    tau: TaskVector,
    folder: Path,
    *,
    target: Loaded | LazyModel | Skeleton,
    adapter: Adapter | None,
    base: str,
) -> None:
    """Write it; a full model needs the target itself, an adapter only its skeleton."""
    if kind == "lora":
        skeleton = target if isinstance(target, Skeleton) else Skeleton.of(target.model)
        name, revision = _named(base, target)
        write_adapter(folder, tau, skeleton, base_name=name, revision=revision, like=adapter)
    elif kind == "task-vector":
        tau.save(folder / "task_vector.safetensors")
    elif isinstance(target, Loaded):
        write_model(target, tau, folder)
    elif isinstance(target, LazyModel):
        blocks = list(block_paths(find_sites(target.model)).values())
        target.write(tau, folder, [*map(target.under, blocks), target.outside(blocks)])
    else:
        raise TaskferryError("a full model needs its base: give --target-base, or --as-task-vector")


def _named(base: str, target: Loaded | LazyModel | Skeleton) -> tuple[str, str | None]:
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


def check_output(folder: Path, kind: str, final: TaskVector, target: Loaded | LazyModel) -> None:
    """Load what was written and compare it with what was meant, up to the rounding of its precision."""
    if kind == "task-vector":
        _compare(TaskVector.load(folder / "task_vector.safetensors").dense().deltas, final.dense().deltas, 0.0)
        return
    if kind == "lora":
        adapter = read_adapter(folder, Skeleton.of(target.model))
        _compare(adapter.tau.dense().deltas, final.dense().deltas, 16 * torch.finfo(adapter.dtype).eps)
        return
    if isinstance(target, LazyModel):
        target.check(folder, final)
        return
    written = dict(load_model(str(folder), like=target.model).model.named_parameters())
    base = dict(target.model.named_parameters())
    names = match_names(final.deltas, base)
    meant: dict[str, Delta] = {}
    precision = torch.finfo(target.extra.get("dtype", torch.float32)).eps
    for name, delta in final.deltas.items():
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
