"""What a job tells: to a reporter while it runs, and as an outcome when it is done."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from taskferry.coverage import Coverage
from taskferry.disk.records import as_json
from taskferry.display.tables import ROWS, panel
from taskferry.estimate import Estimate
from taskferry.jobs.card import write_card
from taskferry.settings import Settings, Writing, dump_settings
from taskferry.taskvector import TaskVector
from taskferry.version import __version__

RECORD = "taskferry.json"
SETTINGS = "taskferry.yaml"


class Reporter:
    """Told what happens; the silent one does nothing."""

    def plan(self, lines: Mapping[str, str], estimate: Estimate | None = None) -> None:
        """Say what will be done, and, of a dry run, what it takes."""

    def step(self, what: str, done: int, total: int) -> None:
        """During it."""

    def note(self, what: str) -> None:
        """What takes a while and has no steps: loading, measuring."""

    def warning(self, what: str) -> None:
        """Say before the work what nobody should overlook."""


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
        facts |= {f"warning {i}": text for i, text in enumerate(told.get("warnings", ()), 1)}
        return panel(title, facts, ("coverage",), rows[:ROWS], len(rows) - len(rows[:ROWS]))


def make_record(
    command: str,
    settings: Writing,
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
        "command": command or _from_file(settings),
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


def _from_file(settings: Writing) -> str:
    """The command that does the same as a call from Python, by the settings that are written beside the output."""
    file = shlex.quote(str(settings.out / SETTINGS))
    return f"taskferry {settings.command} --config {file} --out ANOTHER"


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """taskferry.json."""
    (folder / RECORD).write_text(as_json(record) + "\n", encoding="utf-8")


def finish(folder: Path, record: Mapping[str, Any], settings: Settings, *, adapter: bool) -> None:
    """Record, settings and card into an output folder."""
    write_record(folder, record)
    (folder / SETTINGS).write_text(dump_settings(settings), encoding="utf-8")
    write_card(folder, record, adapter=adapter)


def summary(moved: TaskVector) -> str:
    """The coverage in a few lines."""
    return moved.coverage.summary() if moved.coverage else ""
