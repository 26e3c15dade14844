"""Move a fine-tune, fit the maps of a pair once, and apply them: file to file. Nothing here prints.

>>> result = transfer(TransferSettings(source_tuned="my-lora", target_base="base-b", calibration="data.jsonl"))
>>> result.verdict, result.folder
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from taskferry.alignment import Alignment
from taskferry.collect.scale import EVALUATIONS, ScaleCurve
from taskferry.config import LEARNING, ApplySettings, FitSettings, TransferSettings
from taskferry.disk.files import hash_parameters, write_text
from taskferry.disk.inputs import Inputs
from taskferry.disk.staging import check_free, staged_folder
from taskferry.engines.pair import Moved
from taskferry.errors import TaskferryError
from taskferry.estimate import BACKWARD, Estimate, estimate
from taskferry.methods import Job, Method, find
from taskferry.models import (
    Adapter,
    Loaded,
    Skeleton,
    Tuned,
    by_reason,
    huggingface,
    is_adapter,
    load_model,
    load_tuned,
    read_adapter,
)
from taskferry.models.models import resolve
from taskferry.nearness import Nearness, nearness
from taskferry.objectives.generation import HALF, beside
from taskferry.objectives.heads import solved_head
from taskferry.objectives.teacher import Likeness, check_whole, kind_of
from taskferry.opening import Opened, Reporter, opened
from taskferry.output.record import Result, make_record, write_record
from taskferry.output.verdict import FEW, HARMS, Verdict, change_by_place, judge, stayed_behind, what_moved
from taskferry.output.write import FORMS, Target, check_written, form_of, rank_of, remarks, truncate, write_form
from taskferry.source import SourceLosses, resolved, source_losses, with_base
from taskferry.taskvector import TaskVector, match_names

GENERATED = "All of this is on samples that the tuned source wrote, which is no evidence on real ones: evaluate it."
TAUGHT = "The answers are those of the tuned source: evaluate it on true ones."
SOLVED = (
    "The head {layer} was solved from the tuned source's scores: it gives the same class on {agreement:.0%} of samples."
)
STEP = 16  # samples in one step of distil
MOST = 2**24  # numbers of a tensor that two bases are compared by


def transfer(
    config: TransferSettings,
    *,
    data: Any = None,
    command: str = "",
    reporter: Reporter | None = None,
    dry_run: bool = False,
) -> Result | None:
    """Move a fine-tune to another base model and write it to `config.out`.

    Args:
        config: Models, samples, method and form.
        data: Samples in memory in place of `config.calibration`: a `datasets.Dataset`, or a list of rows or of texts.
        command: As it was typed, for the record.
        reporter: Told what happens.
        dry_run: Load and estimate, and write nothing.

    Returns:
        The result, whose folder is None where the change does not help; None for a dry run.

    Raises:
        TaskferryError: Something in the inputs is wrong; the message says how to fix it.
    """
    reporter, started, named = reporter or Reporter(), time.perf_counter(), bool(config.source_base)
    method = find(config.method)
    method.checked(config.set)
    method.refuse(config.engine)
    config = with_base(config)
    out = config.out or Path(f"{_name(config.source_tuned)}-on-{_name(config.target_base)}")
    config = config.model_copy(update={"out": out})
    check_free(out)
    reporter.say(_first_lines(config, named))
    with opened(config, out, data, reporter, trial=dry_run) as models:  # the samples are split: fit, and held out
        form = form_of(config.as_, models.tuned.adapter)
        _check(config, models, form)
        job = Job(models.pair, models.tuned.tau, models.held_out)
        near = _nearness(config, models)
        lines = {**({} if near is None else {"bases": near.sentence}), **models.lines()}
        reporter.say(lines, _estimate(config, job, method) if dry_run else None)
        if dry_run:
            return None
        source = _losses_of_source(config, models, reporter)  # the fine-tune must lower its own base's loss

        moved = method.move(job, config.set)
        if not len(moved.tau):
            why = "" if moved.tau.coverage is None else moved.tau.coverage.summary()
            raise TaskferryError(f"nothing of {config.source_tuned} moved: {why}")
        change, cut = truncate(moved.tau, form, config.rank, models.tuned.adapter)
        change, curve = _scaled(config, job, moved, change, models)
        answers = models.answers(change, reporter) if curve.helps else None
        verdict = judge(
            curve, job.pair.objectives[1].unit, samples=job.judging.samples, held_out=models.held_out is not None,
            answers=answers,
        )  # fmt: skip

        adapter, ignored, head = models.tuned.adapter, models.tuned.ignored, dict[str, Any]()
        if form == "lora" and adapter is not None and models.both is not None:
            tensors, head = solved_head(models.tuned, *models.both, change, job.calibration, job.judging)
            adapter = replace(adapter, head=tensors)
            ignored = {name: why for name, why in ignored.items() if name not in tensors}
        left = {**ignored, **cut.get("not_in_the_lora", {})}
        verdict = _completed(verdict, config, models, source, change, left)
        notes = [
            *verdict.notes,
            *([SOLVED.format(**head)] if head else []),
            *remarks(form, change, models.target, adapter),
        ]
        verdict = replace(verdict, notes=tuple(notes))
        record = make_record(
            command,
            config,
            models.inputs.hashes(),
            change,
            verdict,
            provenance=moved.provenance,
            sites=moved.sites,
            ignored=ignored,
            source=None if source is None else source.record(),
            nearness=None if near is None else near.record(),
            calibration={**models.samples_record(), **moved.provenance["calibration"]},
            scale_curve=[point for point in curve.points if math.isfinite(point[1])],  # JSON has no other numbers
            head=head,
            placement=models.pair.placement(),
            form=form,
            rank=rank_of(change) if form == "lora" else None,
            seconds=round(time.perf_counter() - started, 1),
            **cut,
        )
        worse = answers is not None and verdict.state == HARMS and config.scale == "auto"
        if (not curve.helps or worse) and not config.force:
            return Result(record, None, change)

        with staged_folder(out) as folder:
            write_form(folder, form, change, models.target, base=config.target_base, like=adapter)
            write_record(folder, record, config, adapter=form == "lora")
            for name, text in models.texts().items():
                (folder / name).write_text(text, encoding="utf-8")
            reporter.note("loading the output again, to check it")
            check_written(folder, form, change, models.target)
            models.inputs.check()
        return Result(record, out, change)


def _name(given: str) -> str:
    """The last part of a path or of a name on a hub, without the ending of a file."""
    name = Path(given.rpartition(":")[2].partition("@")[0]).name
    return Path(name).stem if name.endswith((".safetensors", ".pt", ".bin")) else name


def _first_lines(config: TransferSettings, named: bool) -> dict[str, str]:
    """Say what will be done, as far as settings tell: models are not loaded yet."""
    base = config.source_base if named else f"{config.source_base}, the base that its adapter_config.json names"
    lines = {"from": f"{config.source_tuned} on {base}", "to": config.target_base}
    if config.source_base == config.target_base:
        lines["note"] = "both bases are the same: what was tuned on one fits it as it is"
    if not config.generates:
        lines["samples"] = f"up to {config.samples} of {config.calibration}, seed {config.seed}"
    lines["method"] = " ".join([config.method, *(f"{name}={value}" for name, value in config.set.items())])
    if config.engine == "blockwise":
        lines["method"] += ", one block of each model at a time"
    adapter = is_adapter(Path(resolved("source_tuned", config.source_tuned)))
    lines["output"] = f"{FORMS[config.as_ or ('lora' if adapter else 'model')]} in {config.out}"
    return lines


def _nearness(config: TransferSettings, models: Opened) -> Nearness | None:
    """How near the two bases are, by their files; None where those are no safetensors."""
    A, B = (Path(resolved(name, getattr(config, name))) for name in ("source_base", "target_base"))
    tau = models.tuned.tau if config.engine == "whole" or models.tuned.tau.low_rank else TaskVector({})
    with suppress(TaskferryError):
        return nearness(A, B, {name: float(delta.norm()) for name, delta in tau.deltas.items()}, most=MOST)
    return None


def _check(config: TransferSettings, models: Opened, form: str) -> None:
    """Refuse what could only fail after the whole move."""
    if config.method in LEARNING:  # the tuned source is asked
        lesson = kind_of(models.pair.objectives)
        check_whole(models.tuned, "give --method bico", heads=lesson is not Likeness)  # features need no head
    if form == "lora" and models.tuned.adapter is None and config.rank is None:
        raise TaskferryError("a LoRA of a full fine-tune needs a rank: give --rank 32")


def _estimate(config: TransferSettings, job: Job, method: Method) -> Estimate:
    """Sizes and a rough time."""
    passes = BACKWARD if method.needs.gradients else 1.0
    looks = (EVALUATIONS if config.scale == "auto" else 2) * job.judging.samples / job.calibration.samples
    steps = method.checked(config.set).get("steps", 0)
    learning = 2 * BACKWARD * steps if config.method == "natural" else BACKWARD * steps * STEP / job.calibration.samples
    target = passes + looks + learning
    return estimate(job.pair, job.wanted, source_passes=passes, target_passes=target, maps=method.needs.maps)


def _losses_of_source(config: TransferSettings, models: Opened, reporter: Reporter) -> SourceLosses | None:
    """Losses of the source without and with the fine-tune; refused where it does nothing."""
    reporter.note(f"measuring {config.source_tuned} on the samples")
    losses = source_losses(models.pair, models.tuned)
    if losses is not None and not losses.acts and not config.force:
        raise TaskferryError(f"{losses.sentence(config)}; --force goes on anyway")
    return losses


def _scaled(
    config: TransferSettings, job: Job, moved: Moved, change: TaskVector, models: Opened
) -> tuple[TaskVector, ScaleCurve]:
    """The change at the scale that is given, or that helps most on held-out samples; with the losses, in their unit.

    Where no scale helps it is 0, or 1 by force.
    """
    if config.scale != "auto":
        scales = list(dict.fromkeys((0.0, float(config.scale))))
        curve = ScaleCurve(tuple(zip(scales, job.losses(change, scales), strict=True)), scales[-1])
    elif moved.curve is None:
        curve = job.best_scale(change)
    else:  # the method has chosen the size itself
        before, after = job.losses(change, [0.0, 1.0])
        curve = ScaleCurve(((0.0, before), (1.0, after)), float(moved.curve.helps and after < before))
    searched = config.scale == "auto" and moved.curve is None and curve.helps
    if searched and models.drawn is not None and models.drawn.whole:
        # Whole texts that a small model writes are met by a larger change than real ones (docs/how-to/no-data.md).
        half = HALF * curve.best
        after = job.losses(change, [half])[0]
        points = tuple(sorted({**dict(curve.points), half: after}.items()))
        curve = ScaleCurve(points, half if after < curve.loss(0.0) else 0.0)
    if config.force and not curve.helps:
        curve = replace(curve, best=1.0)
    factor = curve.best
    units = job.judging.samples / max(1, job.pair.objectives[1].units(job.target, job.judging.side(1)))
    return change if factor == 1 else factor * change, curve.times(units)  # per token of a language model


def _completed(
    verdict: Verdict,
    config: TransferSettings,
    models: Opened,
    source: SourceLosses | None,
    moved: TaskVector,
    left: Mapping[str, str],
) -> Verdict:
    """The verdict with what moved, what stayed behind, and what nobody should overlook."""
    change = change_by_place(models.tuned.tau, moved)
    notes = [what_moved(moved, verdict.scale), *stayed_behind(change), *verdict.notes]
    warnings = [*models.doubts]
    if source is not None and not source.acts:
        warnings.append(source.sentence(config))
    warnings += verdict.warnings
    if (count := models.prepared.calibration.samples) < FEW:
        warnings.append(f"only {count} samples, which say little about others: give about a hundred")
    if models.drawn is not None:
        notes.append(GENERATED)
    elif models.prepared.taught:
        notes.append(TAUGHT)
    facts = {**verdict.facts, "change": change}
    return replace(verdict, notes=tuple(notes), warnings=(*warnings, *by_reason(left)), facts=facts)


def fit(config: FitSettings, *, reporter: Reporter | None = None, dry_run: bool = False) -> Alignment | None:
    """Make the maps between two base models and save them as one alignment file.

    Args:
        config: Models, samples and method.
        reporter: Told what happens.
        dry_run: Load and estimate, and write nothing.

    Raises:
        TaskferryError: Something in the inputs is wrong; the message says how to fix it.
    """
    reporter = reporter or Reporter()
    method = find(config.method)
    method.checked(config.set)
    method.refuse("whole", save=True)
    config = with_base(config)
    check_free(config.out)
    if config.generates:
        check_free(beside(config.out))
    reporter.say({"from": config.source_base, "to": config.target_base, "output": f"an alignment in {config.out}"})
    with opened(config, config.out, None, reporter, trial=dry_run) as models:
        job = Job(models.pair, models.tuned.tau, every_site=True)
        passes = BACKWARD if method.needs.gradients else 1.0
        found = estimate(job.pair, job.wanted, source_passes=passes, target_passes=passes) if dry_run else None
        reporter.say(models.lines(), found)
        if dry_run:
            return None
        alignment = method.move(job, config.set).alignment
        if alignment is None:
            raise TaskferryError(f"the method {config.method} leaves no maps to save")
        models.inputs.check()
        if models.drawn is not None:
            samples = {**alignment.provenance["calibration"], "generated": dict(models.drawn.how)}
            alignment = replace(alignment, provenance={**alignment.provenance, "calibration": samples})
        alignment.save(config.out)
        if models.drawn is not None:
            write_text(beside(config.out), models.drawn.lines())
    return alignment


def apply(config: ApplySettings, *, command: str = "") -> Result:
    """Move a fine-tune by a saved alignment; a LoRA needs no model at all.

    Args:
        config: The alignment, the fine-tune and the form of the output.
        command: As it was typed, for the record.

    Raises:
        TaskferryError: Something in the inputs is wrong; the message says how to fix it.
    """
    check_free(config.out)
    found = Path(resolve(config.source_tuned))
    given = {"alignment": config.alignment, "source_tuned": found}
    bases = {"source_base": config.source_base, "target_base": config.target_base}  # a name need not be there
    there = {side: Path(base) for side, base in bases.items() if base is not None and Path(base).exists()}
    inputs = Inputs(**given, **there)
    alignment = Alignment.load(config.alignment)
    tuned = _tuned_for(config, found, alignment)
    form = form_of(config.as_, tuned.adapter)
    target: Target
    if form != "model":
        target = target_skeleton(alignment)
        check_fits(config.alignment, config.target_base)
    elif config.target_base is None:
        raise TaskferryError("a full model needs its base: give --target-base, or --as task-vector")
    else:
        target = _base(alignment, "target", config.target_base)
    moved = alignment.apply(tuned.tau)
    if not len(moved):
        raise TaskferryError(f"nothing of {config.source_tuned} moved: {moved.coverage and moved.coverage.summary()}")
    change, cut = truncate(config.scale * moved, form, config.rank, tuned.adapter)
    verdict = applied(config.scale, tuned.tau, change, {**tuned.ignored, **cut.get("not_in_the_lora", {})})
    verdict = replace(verdict, notes=(*verdict.notes, *remarks(form, change, target, tuned.adapter)))
    record = make_record(
        command, config, inputs.hashes(), change, verdict, provenance=alignment.provenance, sites=alignment.table(),
        ignored=tuned.ignored, form=form, rank=rank_of(change), **cut,
    )  # fmt: skip
    with staged_folder(config.out) as folder:
        write_form(folder, form, change, target, base=config.target_base or "", like=tuned.adapter)
        write_record(folder, record, config, adapter=form == "lora")
        check_written(folder, form, change, target)
        inputs.check()
    return Result(record, config.out, change)


def applied(scale: float, tau: TaskVector, moved: TaskVector, left: Mapping[str, str]) -> Verdict:
    """The verdict where no loss was measured."""
    change = change_by_place(tau, moved)
    sentence = f"{what_moved(moved, scale)} Nothing was measured: evaluate it."
    return Verdict(None, sentence, scale, tuple(stayed_behind(change)), tuple(by_reason(left)), {"change": change})


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


def check_fits(alignment: Path, target_base: str | None) -> None:
    """Refuse a folder whose layers are not those that the maps of a file lead to; no weights and no maps are read."""
    if target_base is None or not Path(target_base).is_dir() or not huggingface.owns(target_base):
        return  # a name that is written into the adapter
    model, _ = huggingface.skeleton(Path(target_base), weights=False)
    there = {name: tuple(p.shape) for name, p in model.named_parameters()}
    newer = huggingface.older_names(model) or str
    for name, wanted in Alignment.weights_to(alignment).items():
        same = _spelled(name, there) or _spelled(newer(name), there)  # a body with or without a head around it
        if same is None or there[same] != wanted:
            found = "not there" if same is None else f"there of shape {there[same]}"
            raise TaskferryError(
                f"{target_base} is not the target that this alignment was fitted on: {name} of shape {wanted} is "
                f"{found}; give the base that it was fitted on, or fit an alignment for this one"
            )


def _spelled(name: str, known: Mapping[str, Any]) -> str | None:
    """A parameter's name as another model has it, with or without a prefix."""
    with suppress(TaskferryError):
        return name if name in known else match_names([name], known)[name]
    return None


def _tuned_for(config: ApplySettings, path: Path, alignment: Alignment) -> Tuned:
    if is_adapter(path):
        adapter: Adapter = read_adapter(path, source_skeleton(alignment))
        return Tuned(adapter.tau, adapter, adapter.ignored)
    if path.is_file() and config.source_base is None:
        return Tuned(TaskVector.load(path))
    if config.source_base is None:
        raise TaskferryError(f"{config.source_tuned} is a full model: give its base with --source-base")
    return load_tuned(config.source_tuned, _base(alignment, "source", config.source_base))


def _base(alignment: Alignment, side: str, given: str) -> Loaded:
    """A base in the precision that it was fitted in, by which it is known."""
    precision = alignment.model(side).get("dtype", "float32")
    loaded = load_model(given, dtype=precision if precision in ("float32", "bfloat16", "float16") else "auto")
    if hash_parameters(loaded.model) != alignment.model(side)["sha256"]:
        raise TaskferryError(f"{loaded.given} is not the {side} that this alignment was fitted on: fit one for it")
    return loaded
