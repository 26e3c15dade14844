"""What a move did, in one sentence for people and in numbers for machines, and what nobody should overlook."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from taskferry.collect.scale import ScaleCurve
from taskferry.coverage import Coverage
from taskferry.jobs.answers import HeldOutAnswers
from taskferry.layers.family import split_path
from taskferry.methods.registry import FEW
from taskferry.models import by_reason
from taskferry.taskvector import LazyDeltas, TaskVector
from taskferry.training.refine import Refined

GENERATED = (
    "All of this is on samples that the tuned source wrote, which is no evidence on real ones: evaluate it on those."
)
TAUGHT = "The answers are those of the tuned source: evaluate it on true ones."
HELPS, NOT_SHOWN, HARMS = "helps", "not shown to help", "harms"  # the states of a verdict
LEAST_SHARE = 0.005  # of a change, that is spoken of
LARGE_SHARE = 0.05  # of a change, that is warned of


@dataclass(frozen=True)
class Judged:
    """What a verdict rests on: the losses by scale in their unit, and what samples those are."""

    curve: ScaleCurve
    unit: str = "per sample"
    samples: int = FEW
    apart: bool = True  # whether the losses are of samples that did not make the maps
    generated: bool = False  # whether the tuned source wrote them
    taught: bool = False  # whether it gave the labels or answers
    doubts: tuple[str, ...] = ()  # of the source base


def verdict(
    judged: Judged,
    moved: TaskVector,
    change: Mapping[str, Any] | None = None,
    answers: HeldOutAnswers | None = None,
    refined: Refined | None = None,
    ignored: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What moved, how much of the change that is, at which scale, what loss and answers say, what a refinement did."""
    curve, unit = judged.curve, judged.unit
    before, after = curve.loss(0.0), curve.loss(curve.best)
    trained = refined is not None and refined.kept > 0
    if not curve.helps:
        sentence = (
            f"No scale up to {curve.points[-1][0]:g} lowers the calibration loss of the target ({before:.4g} {unit}): "
            "the verdict is scale 0, nothing was written."
        )
        if trained:
            sentence = (
                f"No scale of the move lowers the calibration loss ({before:.4g} {unit}): training began without it."
            )
    else:
        way = "down" if after < before else "UP"
        on = ", on samples that did not make the change" if judged.apart else ""
        sentence = (
            f"{_weights(moved)} moved at scale {curve.best:.3g}; "
            f"the calibration loss went {way} from {before:.4g} to {after:.4g} {unit}{on}."
        )
        sentence += left_behind(change)
    if answers is not None:
        sentence = f"{sentence} {answers.sentence}"
    if refined is not None:
        sentence = f"{sentence} {refined.sentence}"
    if judged.generated:
        sentence = f"{sentence} {GENERATED}"
    elif judged.taught:
        sentence = f"{sentence} {TAUGHT}"
    state = state_of(judged, answers, refined)
    return {
        "sentence": sentence,
        "state": state,
        "warnings": warnings(judged, change, ignored or {}, refined) if curve.helps or trained else [],
        "scale": curve.best,
        "loss_before": before,
        "loss_after": after,
        "loss_unit": unit,
        "answers": None if answers is None else answers.record(),
        **_counts(moved),
        **({"change": dict(change)} if change else {}),
        **({"generated_samples": True} if judged.generated else {}),
    }


def state_of(judged: Judged, answers: HeldOutAnswers | None, refined: Refined | None = None) -> str:
    """Judge the output by right answers on held-out samples, or by the loss where there are none."""
    curve, trained = judged.curve, refined is not None and refined.kept > 0
    lower = curve.loss(curve.best) < curve.loss(0.0) if refined is None or not trained else refined.better
    if answers is None:
        return HELPS if lower else HARMS
    _, low, high = answers.gain
    if low > 0:
        return HELPS
    return HARMS if high < 0 or not lower else NOT_SHOWN


def applied(
    moved: TaskVector,
    scale: float,
    change: Mapping[str, Any] | None = None,
    ignored: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The verdict where no loss was measured."""
    sentence = f"{_weights(moved)} moved at scale {scale:g}; the loss was not measured."
    told = {"change": dict(change)} if change else {}
    return {
        "sentence": sentence + left_behind(change),
        "warnings": _stayed(change, ignored or {}),
        "scale": scale,
        **_counts(moved),
        **told,
    }


def warnings(
    judged: Judged, change: Mapping[str, Any] | None, ignored: Mapping[str, str], refined: Refined | None = None
) -> list[str]:
    """What nobody should overlook, each with what to do about it."""
    curve, found = judged.curve, list(judged.doubts)
    if refined is not None and refined.kept and not refined.better:
        found.append(
            "on the held-out samples the refined target is no better than the untouched one: evaluate it before you "
            "use it"
        )
    if curve.helps and not curve.loss(curve.best) < curve.loss(0.0):
        found.append(
            "the loss went UP: this makes the target worse on the samples; leave --scale out, so that a scale that "
            "helps is searched"
        )
    if judged.samples < FEW:
        found.append(
            f"only {judged.samples} samples: the loss above says little about others; give about a hundred, and "
            "evaluate on samples that were not used here"
        )
    return found + _stayed(change, ignored)


def _stayed(change: Mapping[str, Any] | None, ignored: Mapping[str, str]) -> list[str]:
    stayed = (change or {}).get("stayed", {})
    found = []
    if sum(stayed.values()) >= LARGE_SHARE:
        share, where = 100 * sum(stayed.values()), next(iter(stayed))
        found.append(f"{share:.0f} % of the change (‖τ‖²) has no place in the target, most of it in {where}")
    return found + by_reason(ignored)


def _weights(moved: TaskVector) -> str:
    share = weights_moved(moved.coverage)
    return f"{100 * share:.3g} % of the target's weights" if share is not None else f"{len(moved)} weight matrices"


def _counts(moved: TaskVector) -> dict[str, Any]:
    covered = moved.coverage
    return {
        "moved": len(covered.moved()) if covered else len(moved),
        "of": len(covered.rows) if covered else len(moved),
        "weights": weights_moved(covered),
    }


def weights_moved(coverage: Coverage | None) -> float | None:
    """The share of the target's numbers that are in parameters that moved."""
    if coverage is None or not coverage.rows:
        return None
    return coverage.share()


def left_behind(change: Mapping[str, Any] | None) -> str:
    """A sentence where a share of the change that can be seen found no place; a count of parameters would hide it."""
    stayed = (change or {}).get("stayed", {})
    if sum(stayed.values()) < LEAST_SHARE:
        return ""
    share = 100 * sum(stayed.values())
    return f" {share:.0f} % of the change (‖τ‖²) stayed behind, most of it in {next(iter(stayed))}."


def change_by_place(tau: TaskVector, moved: TaskVector) -> dict[str, dict[str, float]]:
    """Shares of ‖τ‖² that had a place in the target and that had none, by where they stand in the source's blocks.

    Nothing is said of changes on disk, which would be read once more.
    """
    rows = () if moved.coverage is None else moved.coverage.rows
    taken = {name for row in rows if row.status != "kept" for name in row.sources}
    total = 0.0 if isinstance(tau.deltas, LazyDeltas) or not taken else tau.norm() ** 2
    if not total:
        return {}
    shares: dict[str, dict[str, float]] = {"moved": {}, "stayed": {}}
    for name, delta in tau.deltas.items():
        found = shares["moved" if name in taken else "stayed"]
        role = split_path(name)[2] or name
        place = ".".join(part for part in role.removesuffix(".weight").split(".") if not part.isdigit())
        found[place] = found.get(place, 0.0) + TaskVector({name: delta}).norm() ** 2 / total
    return {kind: dict(sorted(found.items(), key=lambda item: -item[1])) for kind, found in shares.items()}
