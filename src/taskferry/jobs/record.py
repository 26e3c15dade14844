"""What a job tells: to a reporter while it runs, and as an outcome when it is done."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskferry.coverage import Coverage
from taskferry.display.tables import ROWS, panel
from taskferry.fitting.answers import Answers
from taskferry.fitting.scale import ScaleCurve
from taskferry.jobs.card import write_card
from taskferry.jobs.cost import Plan
from taskferry.settings import Settings, dump_settings
from taskferry.taskvector import TaskVector
from taskferry.training.refinement import Refined
from taskferry.version import __version__

RECORD = "taskferry.json"
GENERATED = (
    "All of this is on samples that the tuned source wrote, which is no evidence on real ones: evaluate it on those."
)
LEAST_SHARE = 0.005  # of a change, that is spoken of


class Reporter:
    """Told what happens; the silent one does nothing."""

    wants_plan = False  # a plan takes a trial of some seconds: not for nobody

    def plan(self, plan: Plan, lines: Mapping[str, str]) -> None:
        """Before the work."""

    def step(self, what: str, done: int, total: int) -> None:
        """During it."""


@dataclass(frozen=True, repr=False)
class Outcome:
    """What a job did: `verdict` for people, `record` for machines. `written` is None where nothing was."""

    record: dict[str, Any]
    written: Path | None

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        return str(self.record["verdict"]["sentence"])

    def __repr__(self) -> str:
        return f"Outcome({self.sentence!r}, written={str(self.written)!r})"

    def _repr_html_(self) -> str:
        told = self.record["verdict"]
        facts = {"verdict": self.sentence, "scale": told["scale"], "written": self.written or "nothing"}
        rows = [(line.strip(),) for line in str(self.record["coverage_summary"]).splitlines()]
        title = "Moved" if self.written is not None else "Refused"
        return panel(title, facts, ("coverage",), rows[:ROWS], len(rows) - len(rows[:ROWS]))


def verdict(
    curve: ScaleCurve,
    moved: TaskVector,
    energy: Mapping[str, Any] | None = None,
    answers: tuple[Answers, Answers] | None = None,
    refined: Refined | None = None,
    generated: bool = False,
) -> dict[str, Any]:
    """What moved, how much of the change that is, at which scale, what loss and answers say, what a refinement did."""
    before, after = curve.loss(0.0), curve.loss(curve.best)
    count = len(moved.coverage.moved()) if moved.coverage else len(moved)
    total = len(moved.coverage.rows) if moved.coverage else len(moved)
    if not curve.helps:
        sentence = (
            f"No scale up to {curve.points[-1][0]:g} lowers the calibration loss of the target ({before:.4g}): "
            "the verdict is scale 0, nothing was written."
        )
        if refined is not None and refined.kept:
            sentence = f"The move itself does not lower the calibration loss ({before:.4g})."
    else:
        change = "down" if after < before else "UP"
        on = " on samples that did not make the maps" if curve.folds else ""
        sentence = (
            f"{count} of {total} parameters moved at scale {curve.best:.3g}; "
            f"the calibration loss went {change} from {before:.4g} to {after:.4g}{on}."
        )
        sentence += left_behind(energy)
        if curve.doubtful:
            sentence += " One part of the samples says the opposite: with so few it is uncertain, evaluate it."
    if answers is not None:
        sentence = f"{sentence} {answers_sentence(*answers)}"
    if refined is not None:
        sentence = f"{sentence} {refined.sentence}"
    if generated:
        sentence = f"{sentence} {GENERATED}"
    return {
        "sentence": sentence,
        "scale": curve.best,
        "loss_before": before,
        "loss_after": after,
        "loss_of_folds": [list(each) for each in curve.folds],
        "uncertain": curve.doubtful,
        "right_answers": None if answers is None else [each.right for each in answers],
        "exact_answers": None if answers is None else [each.exact for each in answers],
        "moved": count,
        "of": total,
        **({"energy": dict(energy)} if energy else {}),
        **({"generated_samples": True} if generated else {}),
    }


def answers_sentence(before: Answers, after: Answers) -> str:
    """What a language model answers, which its loss alone does not tell."""
    if before.right is None or after.right is None or before.choices is None:
        return f"Answers word for word: {before.exact:.3g} % before, {after.exact:.3g} % after."
    among = f"Right answers among the {len(before.choices)} in the samples"
    return f"{among}: {before.right:.3g} % before, {after.right:.3g} % after."


def applied(moved: TaskVector, scale: float, energy: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The verdict where no loss was looked at."""
    count = len(moved.coverage.moved()) if moved.coverage else len(moved)
    total = len(moved.coverage.rows) if moved.coverage else len(moved)
    sentence = f"{count} of {total} parameters moved at scale {scale:g}; the loss was not looked at."
    told = {"energy": dict(energy)} if energy else {}
    return {"sentence": sentence + left_behind(energy), "scale": scale, "moved": count, "of": total, **told}


def left_behind(energy: Mapping[str, Any] | None) -> str:
    """A sentence where a share of the change that can be seen found no place; a count of parameters would hide it."""
    share = 1.0 - energy["moved"] if energy else 0.0
    if energy is None or share < LEAST_SHARE:
        return ""
    return f" {100 * share:.0f} % of the change (‖τ‖²) stayed behind, most of it in {next(iter(energy['stayed']))}."


def make_record(
    command: str,
    settings: Settings,
    inputs: Mapping[str, Mapping[str, str]],
    moved: TaskVector,
    *,
    verdict: Mapping[str, Any],
    provenance: Mapping[str, Any],
    sites: Sequence[Mapping[str, Any]],
    ignored: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """The one record of every output, whatever job made it: what `inspect`, `report` and `push` read."""
    coverage = moved.coverage or Coverage(())
    # What a fine-tune brings beside changes of its base has found no place either.
    coverage = Coverage(coverage.rows, {**coverage.unused, **ignored})
    return {
        "taskferry": __version__,
        "command": command,
        "settings": settings.model_dump(mode="json"),
        "inputs": dict(inputs),
        "provenance": dict(provenance),
        "verdict": dict(verdict),
        "sites": list(sites),
        "ignored": dict(ignored),
        **more,
        "coverage": coverage.to_json(),
        "coverage_summary": coverage.summary(),
    }


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """taskferry.json."""
    text = json.dumps(record, indent=1, default=str)
    (folder / RECORD).write_text(text + "\n", encoding="utf-8")


def finish(folder: Path, record: Mapping[str, Any], settings: Settings, *, adapter: bool) -> None:
    """Record, settings and card into an output folder."""
    write_record(folder, record)
    (folder / "taskferry.yaml").write_text(dump_settings(settings), encoding="utf-8")
    write_card(folder, record, adapter=adapter)


def summary(moved: TaskVector) -> str:
    """The coverage in a few lines."""
    return moved.coverage.summary() if moved.coverage else ""
