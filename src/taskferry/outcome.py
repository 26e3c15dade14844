"""What a job tells: to a reporter while it runs, and as an outcome when it is done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskferry.card import write_card, write_record
from taskferry.coverage import Coverage
from taskferry.display import ROWS, panel
from taskferry.plan import Plan
from taskferry.scale import ScaleCurve
from taskferry.taskvector import TaskVector


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


def verdict(curve: ScaleCurve, moved: TaskVector) -> dict[str, Any]:
    """What moved, at which scale, and what the loss says."""
    before, after = curve.loss(0.0), curve.loss(curve.best)
    count = len(moved.coverage.moved()) if moved.coverage else len(moved)
    total = len(moved.coverage.rows) if moved.coverage else len(moved)
    if not curve.helps:
        sentence = (
            f"No scale up to {curve.points[-1][0]:g} lowers the calibration loss of the target ({before:.4g}): "
            "the verdict is scale 0, nothing was written."
        )
    else:
        change = "down" if after < before else "UP"
        sentence = (
            f"{count} of {total} parameters moved at scale {curve.best:.3g}; "
            f"the calibration loss went {change} from {before:.4g} to {after:.4g}."
        )
    return {
        "sentence": sentence,
        "scale": curve.best,
        "loss_before": before,
        "loss_after": after,
        "moved": count,
        "of": total,
    }


def finish(folder: Path, record: Mapping[str, Any], yaml: str, *, adapter: bool) -> None:
    """Record, settings and card into an output folder."""
    write_record(folder, record)
    (folder / "taskferry.yaml").write_text(yaml, encoding="utf-8")
    write_card(folder, record, adapter=adapter)


def with_coverage(record: dict[str, Any], moved: TaskVector) -> dict[str, Any]:
    """A record with the coverage table."""
    coverage = moved.coverage or Coverage(())
    return {**record, "coverage": coverage.to_json(), "coverage_summary": coverage.summary()}


def summary(moved: TaskVector) -> str:
    """The coverage in a few lines."""
    return moved.coverage.summary() if moved.coverage else ""
