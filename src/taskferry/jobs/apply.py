"""taskferry apply, file to file: a LoRA needs no model at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from taskferry.alignment import Alignment
from taskferry.disk.files import hash_parameters
from taskferry.disk.inputs import Inputs
from taskferry.disk.staging import check_free
from taskferry.errors import TaskferryError
from taskferry.jobs.output import dequantised, in_form, output_kind, packed, rounded, write_output
from taskferry.jobs.record import Outcome, make_record, summary
from taskferry.jobs.verdict import applied, change_by_place
from taskferry.models import (
    Adapter,
    Loaded,
    Skeleton,
    Tuned,
    huggingface,
    is_adapter,
    load_model,
    load_tuned,
    read_adapter,
)
from taskferry.models.models import resolve
from taskferry.settings import ApplySettings
from taskferry.taskvector import TaskVector, match_names


def apply_alignment(settings: ApplySettings, *, command: str = "") -> Outcome:
    """A saved alignment and a tuned source into an output."""
    check_free(settings.out)
    bases = {side: getattr(settings, side) for side in ("source_base", "target_base")}
    # The name of a base in an adapter need not be there.
    there = {side: given for side, given in bases.items() if given is not None and Path(given).exists()}
    found = Path(resolve(settings.source_tuned))
    inputs = Inputs(alignment=settings.alignment, source_tuned=found, **there)
    alignment = Alignment.load(settings.alignment)
    tuned = _tuned_for(settings, found, alignment)
    kind = output_kind(settings, tuned.adapter)
    target: Loaded | Skeleton
    if kind == "model":
        if settings.target_base is None:
            raise TaskferryError("a full model needs its base: give --target-base, or --as-task-vector")
        target = _base(alignment, "target", settings.target_base)
    else:
        target = target_skeleton(alignment)
        check_fits(settings.alignment, settings.target_base)
    moved = alignment.apply(tuned.tau)
    if not len(moved):
        raise TaskferryError(f"nothing of {settings.source_tuned} moved: {summary(moved)}")
    final, cut = in_form(settings, kind, settings.scale * moved)
    table = alignment.table()
    record = apply_record(command, settings, inputs.hashes(), alignment, table, final, tuned, **cut)
    record["verdict"]["sentence"] += dequantised(kind, target) + rounded(kind, target, final)
    write_output(settings, kind, final, target, tuned.adapter, record, inputs)
    return Outcome(record, settings.out)


def apply_record(
    command: str,
    settings: ApplySettings,
    inputs: Mapping[str, Mapping[str, str]],
    alignment: Alignment,
    table: Sequence[Mapping[str, Any]],
    moved: TaskVector,
    tuned: Tuned | Adapter,
    **more: Any,
) -> dict[str, Any]:
    """The record of one applied change, alone or in a fleet; `table` is the alignment's, made once for all."""
    adapter = tuned if isinstance(tuned, Adapter) else tuned.adapter
    ignored = {**tuned.ignored, **more.get("not_in_the_lora", {})}
    verdict = applied(moved, settings.scale, change_by_place(tuned.tau, moved), ignored)
    verdict["sentence"] += packed(output_kind(settings, adapter), moved, adapter)
    return make_record(
        command,
        settings,
        inputs,
        moved,
        verdict=verdict,
        provenance=alignment.provenance,
        sites=table,
        ignored=tuned.ignored,
        **more,
    )


def source_skeleton(alignment: Alignment) -> Skeleton:
    """What an adapter must fit to pass through an alignment."""
    prefix = alignment.model("source").get("prefix", "")
    sites = [pair.source for pair in alignment.pairs]
    known = Skeleton.from_sites(alignment.source_parameters, sites, prefix).in_all_blocks()
    return replace(known, older=huggingface.older_names_of(alignment.model("source")["class"]))


def target_skeleton(alignment: Alignment) -> Skeleton:
    """What it will fit then."""
    prefix = alignment.model("target").get("prefix", "")
    return Skeleton.from_sites(alignment.target_parameters, [pair.target for pair in alignment.pairs], prefix)


def check_fits(alignment: Path | str, target_base: str | None) -> None:
    """Refuse a folder whose layers are not those that the maps of a file lead to; no weights and no maps are read."""
    if target_base is None or not Path(target_base).is_dir() or not huggingface.owns(target_base):
        return  # a name that is written into the adapter
    model, _ = huggingface.skeleton(Path(target_base), weights=False)
    there = {name: tuple(p.shape) for name, p in model.named_parameters()}
    weights, same_names = Alignment.weights_to(alignment), dict[str, str]()
    with suppress(TaskferryError):  # all at once; one by one where some have older names, or are not there
        same_names = match_names(weights, there)  # a body with or without a head around it
    newer = huggingface.older_names(model) or str
    for name, wanted in weights.items():
        same = same_names.get(name) or _spelled(name, there) or _spelled(newer(name), there)
        if same is None or there[same] != wanted:
            found = "not there" if same is None else f"there of shape {there[same]}"
            raise TaskferryError(
                f"{target_base} is not the target that this alignment was fitted on: {name} of shape {wanted} is "
                f"{found}; give the base that it was fitted on, or fit an alignment for this one"
            )


def _spelled(name: str, known: Mapping[str, Any]) -> str | None:
    """A parameter's name as another model has it, with or without a prefix."""
    with suppress(TaskferryError):
        return match_names([name], known)[name]
    return None


def _tuned_for(settings: ApplySettings, path: Path, alignment: Alignment) -> Tuned:
    if is_adapter(path):
        adapter = read_adapter(path, source_skeleton(alignment))
        return Tuned(adapter.tau, adapter, adapter.ignored)
    if path.is_file() and settings.source_base is None:
        return Tuned(TaskVector.load(path))
    if settings.source_base is None:
        raise TaskferryError(f"{settings.source_tuned} is a full model: give its base with --source-base")
    return load_tuned(settings.source_tuned, _base(alignment, "source", settings.source_base))


def _base(alignment: Alignment, side: str, given: str) -> Loaded:
    """A base in the precision that it was fitted in, by which it is known."""
    precision = alignment.model(side).get("dtype", "float32")
    loaded = load_model(given, dtype=precision if precision in ("float32", "bfloat16", "float16") else "auto")
    if hash_parameters(loaded.model) != alignment.model(side)["sha256"]:
        raise TaskferryError(f"{loaded.given} is not the {side} that this alignment was fitted on: fit one for it")
    return loaded
