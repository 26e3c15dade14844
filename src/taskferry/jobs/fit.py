"""taskferry fit: maps of a pair of base models, once, for many task vectors."""

from __future__ import annotations

from dataclasses import replace

from taskferry.alignment import Alignment
from taskferry.disk.files import write_text
from taskferry.disk.staging import check_free
from taskferry.estimate import BACKWARD, estimate
from taskferry.jobs.opening import opened, sample_lines
from taskferry.jobs.record import Reporter
from taskferry.jobs.settings import FitSettings
from taskferry.jobs.source import with_base
from taskferry.methods import Job
from taskferry.objectives.generation import beside


def fit_alignment(
    settings: FitSettings, *, reporter: Reporter | None = None, dry_run: bool = False
) -> Alignment | None:
    """Both base models and a calibration set into one alignment file."""
    reporter, settings = reporter or Reporter(), with_base(settings)
    method, own = settings.chosen()
    method.refuse(settings.engine_name, save=True)
    check_free(settings.out)
    if settings.generates:
        check_free(beside(settings.out))
    with opened(settings, reporter, settings.out, dry_run=dry_run) as models:
        job = Job(models.pair, models.tuned.tau, every_site=True)
        passes = BACKWARD if method.needs.gradients else 1.0
        found = estimate(job.pair, job.wanted, source_passes=passes, target_passes=passes) if dry_run else None
        reporter.plan(sample_lines(models), found)
        if dry_run:
            return None
        alignment = method.move(job, own).alignment
        if alignment is None:
            return None
        models.inputs.check()
        if models.drawn is not None:
            samples = {**alignment.provenance["calibration"], "generated": dict(models.drawn.how)}
            alignment = replace(alignment, provenance={**alignment.provenance, "calibration": samples})
        alignment.save(settings.out)
        if models.drawn is not None:
            write_text(beside(settings.out), models.drawn.lines())
    return alignment
