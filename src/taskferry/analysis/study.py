"""The whole analysis of a pair of models, file to file: what `taskferry analyze` wires.

>>> study = analyze(AnalyzeSettings(...))
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from torch import nn

from taskferry.alignment import Alignment
from taskferry.analysis.cost import Matrix, transfer_cost
from taskferry.analysis.geometry import isometries
from taskferry.analysis.outputs import output_similarity
from taskferry.analysis.similarity import SiteSimilarity, similarity
from taskferry.analysis.trajectory import Trajectory
from taskferry.bench.rows import Mover, rows
from taskferry.collect.progress import Progress
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch
from taskferry.data.data import load_samples
from taskferry.engines.pair import Work
from taskferry.engines.whole import fit
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.methods import CannotMove, Job
from taskferry.models import Loaded, load_model, load_pair, load_tuned
from taskferry.objectives.preparation import Prepared, prepare
from taskferry.settings import AnalyzeSettings
from taskferry.taskvector import TaskVector
from taskferry.version import __version__

KIND = "analysis"


def analyze(settings: AnalyzeSettings, *, command: str = "", tell: Progress | None = None) -> dict[str, Any]:
    """All that the inputs allow, as plain data: similarity, geometry and cost; with tuned models, outputs and drift."""
    _check(settings)
    source, target = load_pair(settings.source_base, settings.target_base, settings.devices, settings.dtype)
    prepared, fresh = _samples(settings, source, target)
    alignment = fit(
        source.model,
        target.model,
        prepared.calibration,
        prepared.objectives,
        map_rank=settings.map_rank,
        tolerance=settings.tolerance,
        work=Work(int(settings.statistics_memory * 2**30)),
        progress=tell,
    )
    measured = {"calibration": similarity(source.model, target.model, alignment, *_shown(prepared))}
    if fresh is not None:
        measured["fresh"] = similarity(source.model, target.model, alignment, *_shown(fresh))
    batches = (fresh or prepared).calibration.side(1)
    result: dict[str, Any] = {
        "taskferry": __version__,
        "kind": KIND,
        "command": command or f"analyze({settings!r})",
        "settings": settings.model_dump(mode="json"),
        "samples": {
            "calibration": prepared.calibration.samples,
            "fresh": 0 if fresh is None else fresh.calibration.samples,
            "labels": prepared.labels,
        },
        "objective": [objective.describe() for objective in prepared.objectives],
        "similarity": {of: [asdict(row) for row in rows] for of, rows in measured.items()},
        "isometries": [asdict(row) for row in isometries(alignment)],
        "cost": cost_of(alignment, measured["calibration"], source.model, target.model, prepared),
    }
    if settings.source_tuned is not None and settings.target_tuned is not None:
        result |= _outputs(settings, source, target, prepared, batches)
    if settings.along:
        result["trajectory"] = _along(settings.along, source, (fresh or prepared).calibration.side(0))
    return result


def _check(settings: AnalyzeSettings) -> None:
    unknown = [row for row in settings.rows if row not in rows()]
    if unknown:
        raise TaskferryError(f"no row '{unknown[0]}': one of {', '.join(repr(row) for row in rows())}")
    if (settings.source_tuned is None) != (settings.target_tuned is None) and settings.target_tuned is not None:
        raise TaskferryError("--target-tuned is compared with what moves from --source-tuned: give both")


def _samples(settings: AnalyzeSettings, source: Loaded, target: Loaded) -> tuple[Prepared, Prepared | None]:
    """The calibration set, and others of the same data that the maps do not see; None where there are no others."""
    samples = load_samples(settings.calibration, label_column=settings.label_column)
    tuned = None if settings.source_tuned is None else load_tuned(settings.source_tuned, source)
    prepared = prepare(settings, source, target, tuned, samples=samples)
    seen = set(prepared.indices)
    others = samples.take([i for i in range(len(samples)) if i not in seen])
    count = min(settings.fresh, len(others))
    if count < 2:
        return prepared, None
    other = settings.model_copy(update={"samples": count, "per_class": None, "sampler": "random"})
    return prepared, prepare(other, source, target, tuned, samples=others)


def _shown(prepared: Prepared) -> tuple[Any, Any]:
    return prepared.calibration, prepared.objectives


def cost_of(
    alignment: Alignment, rows: Sequence[SiteSimilarity], source: nn.Module, target: nn.Module, prepared: Prepared
) -> dict[str, Any]:
    """FLOPs of moving all paired matrices, with the tokens that their maps have seen."""
    tokens: Counter[tuple[str, str]] = Counter()
    for row in rows:  # a site that is used again has a row for each use
        tokens[row.side, row.site] += row.tokens
    matrices = [
        Matrix(p.source.shape, p.target.shape, (tokens["in", p.reads.partition("@")[0]], tokens["out", p.target.name]))
        for p in alignment.pairs
    ]
    sites = ([p.source for p in alignment.pairs], [p.target for p in alignment.pairs])
    used = [sum(out * in_ for out, in_ in {s.name: s.shape for s in side}.values()) for side in sites]
    shown = [tokens_of(model, prepared.calibration.side(i)) for i, model in enumerate((source, target))]
    cost = transfer_cost(
        (used[0], used[1]), matrices, tokens=(shown[0], shown[1]), samples=prepared.calibration.samples
    )
    return cost.to_json()


def tokens_of(model: nn.Module, batches: Sequence[Batch]) -> int:
    """Tokens of the samples in the longest stream, without padding."""
    family, total = family_of(model), 0
    for batch in batches:
        counts = [batch.rows]
        for layout in family.layouts(model, batch).values():
            if layout.mask is not None:
                counts.append(int(layout.mask.sum()))
            elif layout.length is not None:
                counts.append(batch.rows * layout.length)
        total += max(counts)
    return total


def _outputs(
    settings: AnalyzeSettings, source: Loaded, target: Loaded, prepared: Prepared, batches: Sequence[Batch]
) -> dict[str, Any]:
    """Figure 2: rows at scale 1, each held to the tuned target; rows that cannot be moved say why."""
    tau = load_tuned(str(settings.source_tuned), source).tau
    oracle = load_tuned(str(settings.target_tuned), target).tau
    base = load_model(settings.target_base, dtype=settings.dtype).model
    tuned = oracle.add_to(base.to(next(target.model.parameters()).device))
    mover = Mover(Job.of(source.model, target.model, tau, prepared.calibration, prepared.objectives))
    moved: dict[str, TaskVector] = {}
    refused: dict[str, str] = {}
    chosen = settings.rows or [name for name, kind in rows().items() if kind.row.compared]
    for row in chosen:
        try:
            found, scale, _ = mover.move(row)
            moved[row] = scale * found
        except CannotMove as error:
            refused[row] = str(error)
    curves = output_similarity(target.model, tuned, batches, moved)
    places = [
        {"row": row, "stack": stack, "block": block, "cosine": value}
        for row, blocks in curves.items()
        for (stack, block), value in blocks.items()
    ]
    return {"outputs": places, "refused": refused}


def _along(checkpoints: Sequence[str], source: Loaded, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    trajectory = Trajectory(source.model, batches)
    for place, given in enumerate(checkpoints, 1):
        number = re.search(r"(\d+)\D*$", given)  # checkpoint-500
        with moved_by(source.model, load_tuned(given, source).tau) as set_scale:
            set_scale(1.0)
            trajectory.measure(source.model, int(number.group(1)) if number else place)
    if len(trajectory.measurements) < len(checkpoints):
        raise TaskferryError("two checkpoints have the same step in their names: name them by their steps")
    return trajectory.to_json()
