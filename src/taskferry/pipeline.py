"""Whole jobs, file to file: what the commands wire. Nothing here prints; a reporter is told what happens.

>>> outcome = transfer(TransferSettings(...), command="taskferry transfer …")
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from taskferry.alignment import Alignment
from taskferry.analysis.spectrum import before_and_after
from taskferry.card import site_table
from taskferry.checkpoints import (
    Loaded,
    Skeleton,
    Tuned,
    is_adapter,
    load_model,
    load_pair,
    load_tuned,
    read_adapter,
)
from taskferry.checkpoints.loaded import to_device
from taskferry.checkpoints.models import resolve
from taskferry.checkpoints.output import check_free, kept_groups, staged_folder
from taskferry.engines.distributed import Ranks, process_group, rank_and_size, started_by_torchrun
from taskferry.errors import TaskferryError
from taskferry.fitting import fit, hash_parameters
from taskferry.forms import FORMS, check_output, in_form, output_kind, write_form
from taskferry.inputs import Inputs
from taskferry.large import transfer_blockwise
from taskferry.methods import Job, find, twofold
from taskferry.outcome import Outcome, Reporter, finish, summary, verdict, with_coverage
from taskferry.plan import Plan, make_plan
from taskferry.preparing import Prepared, prepare
from taskferry.scale import ScaleCurve, calibration_loss, moved_by, scale_on_calibration
from taskferry.settings import ApplySettings, FitSettings, MapSettings, PlanSettings, TransferSettings, dump_settings
from taskferry.solving import Alone
from taskferry.stages import Stages
from taskferry.taskvector import TaskVector

LOOKS = 8  # forward passes of the target that choosing a scale takes, usually


def transfer(
    settings: TransferSettings, *, command: str, reporter: Reporter | None = None, dry_run: bool = False
) -> Outcome | None:
    """Fit, apply, choose the scale, write, load again and check. None for a dry run."""
    reporter = Stages(reporter or Reporter())
    if settings.engine == "blockwise":
        return transfer_blockwise(settings, command=command, reporter=reporter, dry_run=dry_run)
    check_free(settings.out)
    own = find(settings.method).checked(_method_settings(settings))
    inputs = Inputs(
        source_base=resolve(settings.source_base),
        source_tuned=resolve(settings.source_tuned),
        target_base=resolve(settings.target_base),
        calibration=settings.calibration,
    )
    source, target = load_pair(settings.source_base, settings.target_base, settings.device)
    tuned = load_tuned(settings.source_tuned, source)
    if not len(tuned.tau):
        raise TaskferryError(f"{settings.source_tuned} does not differ from {settings.source_base}: nothing to move")
    kind = output_kind(settings, tuned.adapter)
    prepared = prepare(settings, source, target, settings.source_tuned)
    if dry_run or reporter.wants_plan:
        job = Job(source.model, target.model, tuned.tau, prepared.calibration, prepared.objectives)
        own_work = twofold.work(job, **own) if settings.method == "twofold" else {}
        looks = (LOOKS if settings.scale == "auto" else 2) + own_work.get("looks", 0)
        plan = _plan(settings, source, target, prepared, tuned, **{**own_work, "looks": looks})
        reporter.plan(plan, _plan_lines(settings, tuned, prepared, kind))
    if dry_run:
        return None
    reporter.ends("prepare")
    with kept_groups(settings.out) as keep:
        moved, provenance, sites = _move(settings, own, source, target, tuned, prepared, reporter, keep)
        if not len(moved):
            raise TaskferryError(f"nothing of {settings.source_tuned} moved: {summary(moved)}")
        if kind == "lora" and settings.rank is None and settings.energy is None and not moved.low_rank:
            raise TaskferryError(
                f"the method {settings.method} makes a dense change of a LoRA: write it with --as-model"
            )
        reporter.ends("apply")
        # Cut first: the scale and the verdict are those of what is written.
        final, extra = in_form(settings, kind, moved)
        loss = prepared.objectives[1].bind(target.model, prepared.calibration.side(1))
        curve = _scale(settings, target, final, loss, prepared, reporter)
        record = {
            "command": command,
            "settings": settings.model_dump(mode="json"),
            "inputs": inputs.hashes(),
            "calibration": {
                "indices": prepared.indices,
                "labels": prepared.labels,
                **provenance.get("calibration", {}),
            },
            "provenance": provenance,
            "verdict": verdict(curve, final),
            "scale_curve": curve.points,
            "sites": sites,
            "spectrum": before_and_after(tuned.tau, moved),
            "ignored": dict(tuned.ignored),
            **extra,
        }
        reporter.ends("record")
        record = with_coverage({**record, "work": reporter.work()}, final)
        if not curve.helps:
            return Outcome(record, None)
        final = curve.best * final
        with staged_folder(settings.out) as folder:
            base = settings.target_base
            write_form(kind, final, folder, target=target, adapter=tuned.adapter, base=base)
            finish(folder, record, dump_settings(settings), adapter=kind == "lora")
            reporter.step("check", 0, 1)
            check_output(folder, kind, final, target)
            inputs.check()
            reporter.step("check", 1, 1)
        return Outcome(record, settings.out)


def plan_transfer(settings: PlanSettings, reporter: Reporter) -> Plan:
    """What fitting and applying would cost; nothing is written."""
    source, target = load_pair(settings.source_base, settings.target_base, settings.device)
    tuned = None if settings.source_tuned is None else load_tuned(settings.source_tuned, source)
    prepared = prepare(settings, source, target, settings.source_tuned)
    plan = _plan(settings, source, target, prepared, tuned)
    reporter.plan(plan, _sample_lines(prepared))
    return plan


def _plan(
    settings: MapSettings,
    source: Loaded,
    target: Loaded,
    prepared: Prepared,
    tuned: Tuned | None = None,
    **work: int,
) -> Plan:
    return make_plan(
        source.model,
        target.model,
        prepared.calibration,
        None if tuned is None else tuned.tau.deltas.keys(),
        **work,
        tokens_per_width=settings.tokens_per_width,
        statistics_memory=int(settings.statistics_memory * 2**30),
    )


def _sample_lines(prepared: Prepared) -> dict[str, str]:
    return {"labels": prepared.labels, "samples": str(prepared.calibration.samples)}


def fit_alignment(
    settings: FitSettings, *, reporter: Reporter | None = None, dry_run: bool = False
) -> Alignment | None:
    """Both base models and a calibration set into one alignment file."""
    reporter = reporter or Reporter()
    check_free(settings.out)
    rank, size = rank_and_size()
    if settings.shard and not started_by_torchrun():
        raise TaskferryError("--shard spreads a model over processes: start them with torchrun, or leave it out")
    inputs = Inputs(
        source_base=resolve(settings.source_base),
        target_base=resolve(settings.target_base),
        calibration=settings.calibration,
    )
    # Models that are to be sharded reach the device in parts.
    device = "cpu" if settings.shard else settings.device
    source, target = load_pair(settings.source_base, settings.target_base, device)
    if rank != 0:
        reporter = Reporter()
    prepared = prepare(settings, source, target, settings.source_tuned)
    if reporter.wants_plan:
        lines = _sample_lines(prepared)
        if size > 1:
            lines["processes"] = f"{size}, which share passes and maps; the time below is that of one"
        reporter.plan(_plan(settings, source, target, prepared), lines)
    if dry_run:
        return None
    group = process_group() if started_by_torchrun() else nullcontext(Alone())
    # Only the first rank keeps what is finished, and takes it away.
    keeping = kept_groups(settings.out) if rank == 0 else nullcontext(None)
    with group as ranks, keeping as keep:
        if settings.shard and isinstance(ranks, Ranks):
            for loaded in (source, target):
                ranks.shard(loaded.model)
                to_device(loaded, settings.device)
        alignment = _fit(settings, source, target, prepared, reporter, ranks=ranks, keep=keep)
        if rank != 0:
            return None
        inputs.check()
        alignment.save(settings.out)
    return alignment


def apply_alignment(settings: ApplySettings, *, command: str) -> Outcome:
    """A saved alignment and a tuned source into an output; a LoRA needs no model at all."""
    check_free(settings.out)
    bases = {side: getattr(settings, side) for side in ("source_base", "target_base")}
    # The name of a base in an adapter need not be there.
    there = {side: given for side, given in bases.items() if given is not None and Path(given).exists()}
    inputs = Inputs(alignment=settings.alignment, source_tuned=settings.source_tuned, **there)
    alignment = Alignment.load(settings.alignment)
    tuned = _tuned_for(settings, alignment)
    kind = output_kind(settings, tuned.adapter)
    moved = alignment.apply(tuned.tau)
    if not len(moved):
        raise TaskferryError(f"nothing of {settings.source_tuned} moved: {summary(moved)}")
    if kind == "model" and settings.target_base is None:
        raise TaskferryError("a full model needs its base: give --target-base, or --as-task-vector")
    final, extra = in_form(settings, kind, settings.scale * moved)
    count = len(moved.coverage.moved()) if moved.coverage else len(moved)
    sentence = f"{count} parameters moved at scale {settings.scale:g}; the loss was not looked at."
    record = {
        "command": command,
        "settings": settings.model_dump(mode="json"),
        "inputs": inputs.hashes(),
        "provenance": alignment.provenance,
        "verdict": {"sentence": sentence, "scale": settings.scale},
        "sites": site_table(alignment),
        "ignored": dict(tuned.ignored),
        **extra,
    }
    target: Loaded | Skeleton
    if kind == "model" and settings.target_base is not None:
        target = load_model(settings.target_base)
        _same_model(alignment, "target", target)
    else:
        sites = [pair.target for pair in alignment.pairs]
        target = Skeleton.from_sites(alignment.target_parameters, sites, alignment.model("target").get("prefix", ""))
    with staged_folder(settings.out) as folder:
        base = settings.target_base or ""
        write_form(kind, final, folder, target=target, adapter=tuned.adapter, base=base)
        if isinstance(target, Loaded):
            check_output(folder, kind, final, target)
        finish(folder, with_coverage(record, moved), dump_settings(settings), adapter=kind == "lora")
        inputs.check()
    return Outcome(with_coverage(record, moved), settings.out)


def difference(base: str, tuned: str, out: Path) -> TaskVector:
    """τ = tuned − base as one file."""
    check_free(out)
    tau = load_tuned(tuned, load_model(base)).tau
    if not len(tau):
        raise TaskferryError(f"{tuned} does not differ from {base}")
    tau.save(out)
    return tau


def _fit(
    settings: MapSettings,
    source: Loaded,
    target: Loaded,
    prepared: Prepared,
    reporter: Reporter,
    tuned: TaskVector | None = None,
    ranks: Alone | None = None,
    keep: Path | None = None,
) -> Alignment:
    return fit(
        source.model,
        target.model,
        prepared.calibration,
        prepared.objectives,
        **settings.fit_options(),
        only=None if tuned is None else tuned.deltas.keys(),
        factored=tuned is not None and tuned.low_rank,
        progress=reporter.step,
        ranks=ranks,
        keep=keep,
    )


def _method_settings(settings: TransferSettings) -> dict[str, Any]:
    """The method's settings: those given for it, and the general ones that it has too; others must stay at default."""
    known = find(settings.method).settings
    own = dict(settings.method_settings)
    for name in ("map_rank", "tolerance", "tokens_per_width"):
        value = getattr(settings, name)
        if value == TransferSettings.model_fields[name].default:
            continue
        if name not in known:
            raise TaskferryError(f"the method {settings.method} has no {name}: leave --{name.replace('_', '-')} out")
        own.setdefault(name, value)
    if "statistics_memory" in known:
        own.setdefault("statistics_memory", settings.statistics_memory)
    return own


def _move(
    settings: TransferSettings,
    own: Mapping[str, Any],
    source: Loaded,
    target: Loaded,
    tuned: Tuned,
    prepared: Prepared,
    reporter: Reporter,
    keep: Path,
) -> tuple[TaskVector, Mapping[str, Any], list[dict[str, Any]]]:
    """The moved task vector, its provenance and the table of its sites, where the method has maps."""
    if settings.method == "bico" and not settings.method_settings:
        alignment = _fit(settings, source, target, prepared, reporter, tuned.tau, keep=keep)
        return alignment.apply(tuned.tau), alignment.provenance, site_table(alignment)
    job = Job(source.model, target.model, tuned.tau, prepared.calibration, prepared.objectives, reporter.step, keep)
    if settings.method == "twofold":
        alignment, moved = twofold.fit_twofold(job, **own)
        return moved, alignment.provenance, site_table(alignment)
    moved = find(settings.method).function(job, **own)
    objectives = [objective.describe() for objective in prepared.objectives]
    return moved, {"method": settings.method, "settings": dict(own), "objective": objectives}, []


def _tuned_for(settings: ApplySettings, alignment: Alignment) -> Tuned:
    path = Path(settings.source_tuned)
    if is_adapter(path):
        sites = [pair.source for pair in alignment.pairs]
        adapter = read_adapter(path, Skeleton.from_sites(alignment.source_parameters, sites, ""))
        return Tuned(adapter.tau, adapter, adapter.ignored)
    if path.is_file() and settings.source_base is None:
        return Tuned(TaskVector.load(path))
    if settings.source_base is None:
        raise TaskferryError(f"{settings.source_tuned} is a full model: give its base with --source-base")
    source = load_model(settings.source_base)
    _same_model(alignment, "source", source)
    return load_tuned(settings.source_tuned, source)


def _same_model(alignment: Alignment, side: str, loaded: Loaded) -> None:
    if hash_parameters(loaded.model) != alignment.model(side)["sha256"]:
        raise TaskferryError(f"{loaded.given} is not the {side} that this alignment was fitted on: fit one for it")


def _scale(
    settings: TransferSettings, target: Loaded, moved: TaskVector, loss: Any, prepared: Prepared, reporter: Reporter
) -> ScaleCurve:
    batches = prepared.calibration.side(1)
    count = 0

    def tell(scale: float, value: float) -> None:  # noqa: ARG001
        nonlocal count
        count += 1
        reporter.step("scale", count, 12 if settings.scale == "auto" else 2)

    if settings.scale == "auto":
        curve = scale_on_calibration(target.model, moved, loss, batches, tell)
        reporter.step("scale", 12, 12)
        return curve
    points = []
    with moved_by(target.model, moved) as set_scale:
        for scale in dict.fromkeys((0.0, settings.scale)):
            set_scale(scale)
            points.append((scale, calibration_loss(target.model, loss, batches)))
            tell(*points[-1])
    return ScaleCurve(tuple(points), settings.scale)


def _plan_lines(settings: TransferSettings, tuned: Tuned, prepared: Prepared, kind: str) -> dict[str, str]:
    form = "low-rank" if tuned.adapter is not None else "dense"
    count = prepared.calibration.samples
    return {
        "from": f"{settings.source_tuned} on {settings.source_base}",
        "to": settings.target_base,
        "task vector": f"{len(tuned.tau)} changed parameters, {form}, norm {tuned.tau.norm():.3g}",
        "samples": f"{count} of {settings.calibration}, sampler {settings.sampler}, seed {settings.seed}",
        "labels": prepared.labels,
        "method": " ".join([settings.method, *(f"{k}={v}" for k, v in settings.method_settings.items())]),
        "objective": prepared.objectives[1].describe(),
        "scale": "chosen on the samples" if settings.scale == "auto" else f"{settings.scale:g}",
        "output": f"{FORMS[kind]} in {settings.out}",
    }
