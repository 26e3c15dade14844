"""taskferry transfer, file to file. Nothing here prints; a reporter is told what happens.

>>> outcome = transfer(TransferSettings(...))
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from taskferry.collect.scale import EVALUATIONS, ScaleCurve
from taskferry.disk.staging import check_free
from taskferry.errors import TaskferryError
from taskferry.estimate import BACKWARD, Estimate, estimate
from taskferry.jobs.answers import HeldOutAnswers, held_out_answers
from taskferry.jobs.opening import Opened, opened, sample_lines
from taskferry.jobs.output import FORMS, dequantised, in_form, output_kind, packed, rounded, write_output
from taskferry.jobs.record import Outcome, Reporter, make_record, summary
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.source import SourceLosses, source_losses, with_base
from taskferry.jobs.verdict import Judged, change_by_place, verdict
from taskferry.methods import Job, Method, Moved, find
from taskferry.models import is_adapter
from taskferry.models.models import resolve
from taskferry.models.peft import CONFIG
from taskferry.objectives.generation import HALF
from taskferry.objectives.heads import solved_head
from taskferry.objectives.objectives import Classifier
from taskferry.objectives.teacher import Likeness, check_whole, kind_of, lesson_of
from taskferry.taskvector import TaskVector
from taskferry.training.refine import Refined, refine

ENGINES = {"whole": "both models in memory", "blockwise": "one block at a time"}
WORSE = " Fewer answers are right than before: nothing was written (--force writes it anyway)."
STEP = 8  # samples in one step of a refinement, roughly
SOLVED = (
    " The head {layer} was solved from the tuned source's scores: on {agreement:.0%} of the samples it gives the same "
    "class."
)
HALVED = " Half of the scale that is best on them was taken."


def transfer(
    settings: TransferSettings, *, command: str = "", reporter: Reporter | None = None, dry_run: bool = False
) -> Outcome | None:
    """Fit, move, choose the scale, write, load again and check. None for a dry run."""
    settings, given = with_base(settings), settings
    method, own = settings.chosen()
    settings.check_refine()
    method.refuse(settings.engine_name)
    check_free(settings.out)
    reporter, started = reporter or Reporter(), time.perf_counter()
    reporter.plan(_first_lines(settings, given))
    with opened(settings, reporter, settings.out, dry_run=dry_run) as models:
        kind, drawn = output_kind(settings, models.tuned.adapter), models.drawn
        _check_training(settings, models, kind)
        source = None if dry_run else _source(settings, models, reporter)
        job = Job(models.pair, models.tuned.tau, models.held_out)
        found = _estimated(settings, job, method) if dry_run else None
        reporter.plan(_second_lines(models, kind), found)
        if dry_run:
            return None
        moved = method.move(job, own)
        if not len(moved.tau):
            raise TaskferryError(f"nothing of {settings.source_tuned} moved: {summary(moved.tau)}")
        # Cut first: the scale and the verdict are those of what is written.
        final, cut = in_form(settings, kind, moved.tau)
        apart = job.judging is not job.calibration
        curve, factor = scaled(settings, job, moved, final)
        halved = settings.scale == "auto" and curve.helps and drawn is not None and drawn.whole
        if halved:
            factor *= HALF
            curve = at_half(job, factor * final, curve)
        if not curve.helps:
            factor = 0.0
        shown = in_units(curve, job)
        written, refined = factor * final, None
        if settings.refine:
            refined = _refine(settings, job, written)
            written = refined.change
        answers = None
        if curve.helps or refined is not None:
            answers = _answers(models, job, factor * final, refined, reporter)
        adapter, ignored, head = models.tuned.adapter, models.tuned.ignored, dict[str, Any]()
        if kind == "lora" and adapter is not None and len(models.models) == 2:
            tensors, head = solved_head(models.tuned, *models.models, written, job.calibration, job.judging)
            adapter = replace(adapter, head=tensors)
            ignored = {name: why for name, why in ignored.items() if name not in tensors}
        record = make_record(
            command,
            settings,
            models.inputs.hashes(),
            final,
            verdict=verdict(
                Judged(
                    shown,
                    job.pair.objectives[1].unit,
                    len(models.prepared.indices),
                    apart=apart,
                    generated=drawn is not None,
                    taught=models.prepared.taught,
                    doubts=_doubts(settings, models, source),
                ),
                final,
                change_by_place(models.tuned.tau, final),
                answers,
                refined,
                {**ignored, **cut.get("not_in_the_lora", {})},
            ),
            provenance=moved.provenance,
            sites=moved.sites,
            ignored=ignored,
            source=None if source is None else source.record(),
            calibration={
                "indices": models.prepared.indices,
                "labels": models.prepared.labels,
                "head_made_from_samples": _made_from_samples(models),
                **moved.provenance["calibration"],
                **({} if drawn is None else {"generated": dict(drawn.how)}),
            },
            scale_curve=[point for point in shown.points if math.isfinite(point[1])],  # JSON has no other numbers
            seconds=round(time.perf_counter() - started, 1),
            placement=models.pair.placement(),
            **cut,
            **({} if refined is None else {"refined": refined.record()}),
            **({"head": head} if head else {}),
        )
        helps = curve.helps or (refined is not None and refined.kept > 0)
        if answers is not None and answers.gain[2] < 0 and settings.scale == "auto" and not settings.force:
            helps = False
            record["verdict"]["sentence"] += WORSE
        if not helps:
            return Outcome(record, None)
        record["verdict"]["sentence"] += dequantised(kind, models.target) + rounded(kind, models.target, written)
        record["verdict"]["sentence"] += packed(kind, written, adapter)
        if head:
            record["verdict"]["sentence"] += SOLVED.format(**head)
        if halved and curve.helps:
            record["verdict"]["sentence"] += HALVED
        questions = models.prepared.questions
        template = None if questions is None else questions.template
        write_output(settings, kind, written, models.target, adapter, record, models.inputs, reporter, drawn, template)
        return Outcome(record, settings.out)


def _answers(
    models: Opened, job: Job, moved: TaskVector, refined: Refined | None, reporter: Reporter
) -> HeldOutAnswers | None:
    """Generate answers on samples that made neither the change nor what was learned after it."""
    numbers = [i for batch in job.judging.side(1) for i in batch.ids]
    held_out = job.judging is not job.calibration
    learned = None if refined is None else refined.change
    return held_out_answers(models, numbers, moved, learned, held_out=held_out, progress=reporter.step)


def _refine(settings: TransferSettings, job: Job, start: TaskVector) -> Refined:
    """Train the moved change towards what the tuned source answers."""
    models, progress = (job.source, job.target), job.pair.work.progress
    fit, held_out = (lesson_of(models, job.tau, part, job.pair.objectives) for part in (job.calibration, job.judging))
    return refine(
        job.target,
        start,
        fit,
        held_out,
        settings.refine,
        learning_rate=settings.refine_rate,
        seed=settings.seed,
        progress=None if progress is None else lambda done, steps: progress("refine", done, steps),
    )


def _source(settings: TransferSettings, models: Opened, reporter: Reporter) -> SourceLosses | None:
    """Losses of the source without and with the fine-tune; refused where it does nothing."""
    reporter.note(f"measuring {settings.source_tuned} on the samples")
    losses = source_losses(models.pair, models.tuned)
    if losses is not None and not losses.acts and not settings.force:
        raise TaskferryError(f"{losses.sentence(settings)}; --force goes on anyway")
    return losses


def _doubts(settings: TransferSettings, models: Opened, source: SourceLosses | None) -> tuple[str, ...]:
    """Reasons to doubt the source base."""
    if source is None or source.acts:
        return models.doubts
    return (*models.doubts, source.sentence(settings))


def _check_training(settings: TransferSettings, models: Opened, kind: str) -> None:
    """Refuses what could only fail after the whole move."""
    if find(settings.method).needs.dense and kind == "lora" and settings.rank is None:
        raise TaskferryError(f"the method {settings.method} makes a dense change of a LoRA: write it with --as-model")
    if settings.refine:
        lesson = kind_of(models.pair.objectives)
        check_whole(models.tuned, "leave --refine out", heads=lesson is not Likeness)  # features need no head


def scaled(settings: TransferSettings, job: Job, moved: Moved, final: TaskVector) -> tuple[ScaleCurve, float]:
    """Losses at the scales that were looked at, and what the change is multiplied by: 1 where its method has chosen.

    `final` is what moved in the form that is written.
    """
    if settings.scale != "auto":
        scales = list(dict.fromkeys((0.0, float(settings.scale))))
        losses = job.losses(final, scales)
        return ScaleCurve(tuple(zip(scales, losses, strict=True)), scales[-1]), scales[-1]
    if moved.curve is None:
        curve = job.best_scale(final)
        return curve, curve.best
    curve, best = moved.curve, moved.curve.best
    if final is moved.tau or not curve.helps:
        return curve, 1.0
    before, after = job.losses(final, [0.0, 1.0])  # of what the cut has left
    return ScaleCurve(((0.0, before), (best, after)), best if after < before else 0.0), 1.0


def at_half(job: Job, change: TaskVector, curve: ScaleCurve) -> ScaleCurve:
    """With the loss at half of its best scale, which is taken: whole texts of the tuned source ask for too large ones.

    What a small model writes is met by a larger change than real texts are (docs/how-to/no-data.md).
    """
    half, after = HALF * curve.best, job.losses(change, [1.0])[0]
    points = tuple(sorted({**dict(curve.points), half: after}.items()))
    return ScaleCurve(points, half if after < curve.loss(0.0) else 0.0)


def _made_from_samples(models: Opened) -> bool:
    """Whether a score needs samples with labels beside the test data, to make a head from them."""
    head = models.prepared.objectives[1]
    return isinstance(head, Classifier) and head.fitted


def in_units(curve: ScaleCurve, job: Job) -> ScaleCurve:
    """Losses per token of a language model, per sample of all others, as `taskferry evaluate` has them."""
    units = job.pair.objectives[1].units(job.target, job.judging.side(1))
    return curve.times(job.judging.samples / max(1, units))


def _first_lines(settings: TransferSettings, given: TransferSettings) -> dict[str, str]:
    """Say what will be done, as far as settings tell: models are not loaded yet."""
    named = "" if given.source_base else f", the base that its {CONFIG} names"
    lines = {"from": f"{settings.source_tuned} on {settings.source_base}{named}", "to": settings.target_base}
    if settings.source_base == settings.target_base:
        lines["note"] = "both bases are the same: what was tuned on one fits it as it is"
    if not settings.generates:
        lines["samples"] = f"up to {settings.samples} of {settings.calibration}, seed {settings.seed}"
    words = [settings.method, *(f"{name}={value}" for name, value in settings.method_settings.items())]
    if settings.refine:
        words.append(f"and {settings.refine} training steps towards the tuned source")
    lines["method"] = " ".join(words)
    if settings.engine != "whole":
        lines["engine"] = ENGINES[settings.engine]
    adapter = settings.as_lora or is_adapter(Path(resolve(settings.source_tuned)))
    kind = "task-vector" if settings.as_task_vector else "lora" if adapter and not settings.as_model else "model"
    lines["output"] = f"{FORMS[kind]} in {settings.out}"
    return lines


def _second_lines(models: Opened, kind: str) -> dict[str, str]:
    """Say what models and samples have shown."""
    prepared = models.prepared
    lines = sample_lines(models)
    lines["loss"] = f"{prepared.objectives[1].words}, {prepared.objectives[1].unit}"
    note = dequantised(kind, models.target).strip()
    return {**lines, "note": note} if note else lines


def _estimated(settings: TransferSettings, job: Job, method: Method) -> Estimate:
    """Sizes and a rough time."""
    passes = BACKWARD if method.needs.gradients else 1.0
    training = settings.refine * STEP / job.calibration.samples
    looks = (EVALUATIONS if settings.scale == "auto" else 2) * job.judging.samples / job.calibration.samples
    target = passes + looks + BACKWARD * training
    return estimate(job.pair, job.wanted, source_passes=passes, target_passes=target, maps=method.needs.maps)
