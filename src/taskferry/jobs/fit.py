"""taskferry fit, and what a job will cost: maps of a pair of base models, once, for many task vectors."""

from __future__ import annotations

from dataclasses import replace

from taskferry.alignment import Alignment
from taskferry.disk.files import write_text
from taskferry.disk.staging import check_free
from taskferry.engines.launch import rank_and_size
from taskferry.errors import DoesNotHelp, TaskferryError
from taskferry.jobs.cost import Plan
from taskferry.jobs.opening import Opened, cut_line, opened, without_weights
from taskferry.jobs.plan import plan_job, plan_sizes, refining
from taskferry.jobs.record import Reporter
from taskferry.jobs.settings import FitSettings, PlanSettings
from taskferry.jobs.source import with_base
from taskferry.methods import Job
from taskferry.objectives.generation import HALF, beside


def fit_alignment(
    settings: FitSettings, *, reporter: Reporter | None = None, dry_run: bool = False
) -> Alignment | None:
    """Both base models and a calibration set into one alignment file."""
    reporter, settings = reporter or Reporter(), with_base(settings)
    method, own = settings.chosen()
    method.refuse(settings.engine_name, save=True)
    if settings.shard and settings.source_tuned is not None and method.needs.captures > 1:
        raise TaskferryError(
            f"--shard: the method {method.name} adds the fine-tune to the weights for its second capture, and sharded "
            "weights stay as they are: leave --source-tuned out, or --shard"
        )
    check_free(settings.out)
    if settings.generates:
        check_free(beside(settings.out))
    with opened(settings, reporter, settings.out, dry_run=dry_run) as models:
        job = Job(models.pair, models.tuned.tau, every_site=True)
        if reporter.wants_plan and models.first:
            lines = sample_lines(models)
            size = rank_and_size()[1]
            if size > 1:
                lines["processes"] = f"{size}, which share passes and maps; the time below is that of one"
            reporter.note("measuring this machine for the plan")
            reporter.plan(models.planned(plan_job(job, method, own)), lines)
        if dry_run:
            return None
        if settings.shard:
            models.shard(settings.devices)
        moved = method.move(job, own)
        if moved.curve is not None and not moved.curve.helps:
            raise DoesNotHelp(
                f"no scale up to {moved.curve.points[-1][0]:g} of {settings.source_tuned} lowers the calibration loss "
                "of the target, so that maps made along it are not saved: give another reference, more samples, or "
                "leave --source-tuned out"
            )
        alignment = moved.alignment
        if not models.first or alignment is None:
            return None
        models.inputs.check()
        if models.drawn is not None:
            how = dict(models.drawn.how)
            if moved.curve is not None and models.drawn.whole:  # as `transfer` does
                alignment, how = alignment.times(HALF), {**how, "scale": "half of the one that is best on them"}
            samples = {**alignment.provenance["calibration"], "generated": how}
            alignment = replace(alignment, provenance={**alignment.provenance, "calibration": samples})
        alignment.save(settings.out)
        if models.drawn is not None:
            write_text(beside(settings.out), models.drawn.lines())
    return alignment


def plan_transfer(settings: PlanSettings, reporter: Reporter) -> Plan:
    """What moving would cost; nothing is written."""
    settings = with_base(settings)
    (method, own), refinement = settings.chosen(), settings.refinement
    settings.check_start(method)
    if settings.device_memory is not None:
        job, precisions, prepared = without_weights(settings)
        plan = plan_sizes(job, method, own, precisions, settings.device_memory)
        samples = {"samples": str(prepared.calibration.samples), **cut_line(prepared)}
        reporter.plan(plan, {"method": method.name, "labels": prepared.labels, **samples})
        return plan
    with opened(settings, reporter, None, dry_run=True) as models:
        job = Job(models.pair, models.tuned.tau, every_site=settings.source_tuned is None)
        reporter.note("measuring this machine for the plan")
        plan = models.planned(plan_job(job, method, own, scale="auto", refinement=refinement))
        lines = {"method": method.name, **sample_lines(models), **refining(settings)}
        reporter.plan(plan, lines)
    return plan


def sample_lines(models: Opened) -> dict[str, str]:
    """Of a plan."""
    if models.drawn is not None:
        return {"labels": models.prepared.labels, "samples": models.drawn.told}
    samples = str(models.prepared.calibration.samples)
    return {"labels": models.prepared.labels, "samples": samples, **cut_line(models.prepared)}
