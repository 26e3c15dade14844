"""The record of an output (taskferry.json), the settings beside it, and a result as Python and notebooks hold it."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

from taskferry.config import ApplySettings, Settings, TransferSettings, dump_settings
from taskferry.coverage import Coverage
from taskferry.disk.files import as_json, read_json
from taskferry.disk.staging import staged_folder
from taskferry.display.tables import ROWS, panel
from taskferry.errors import TaskferryError
from taskferry.output.card import write_card
from taskferry.output.verdict import Verdict
from taskferry.taskvector import TaskVector
from taskferry.version import __version__

RECORD = "taskferry.json"
SETTINGS = "taskferry.yaml"


@dataclass(frozen=True, repr=False)
class Result:
    """A move: its verdict, its coverage, and the folder that was written (None where nothing was)."""

    record: Mapping[str, Any]
    folder: Path | None
    change: TaskVector
    temporary: tempfile.TemporaryDirectory[str] | None = None  # that holds the folder, where none was named

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        return str(self.record["verdict"]["sentence"])

    @property
    def state(self) -> str | None:
        """`helps`, `not shown to help` or `harms`; None where nothing was measured."""
        state: str | None = self.record["verdict"]["state"]
        return state

    @property
    def coverage(self) -> Coverage | None:
        """What moved, what did not, and why."""
        return self.change.coverage

    def model(self) -> Any:
        """The target with the change: a `PeftModel` for a LoRA, else a model."""
        from peft import PeftModel

        from taskferry.models import is_adapter, load_model, load_tuned

        folder, base = self._written(), str(self.record["settings"].get("target_base") or "")
        if is_adapter(folder):
            return PeftModel.from_pretrained(load_model(base).model, folder)
        if (folder / "task_vector.safetensors").is_file():
            loaded = load_model(base)
            load_tuned(folder / "task_vector.safetensors", loaded).add_to(loaded.model)
            return loaded.model
        return load_model(folder).model

    def save(self, folder: str | Path) -> Path:
        """Copy what was written to a new folder, whole or not at all."""
        with staged_folder(Path(folder)) as stage:
            copytree(self._written(), stage, dirs_exist_ok=True)
        return Path(folder)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the page for people beside the output, or to `out`; returns where it is."""
        from taskferry.output.report import write_report

        return write_report(self._written(), None if out is None else Path(out))[0]

    def _written(self) -> Path:
        if self.folder is None:
            raise TaskferryError(f"nothing was written: {self.verdict}")
        return self.folder

    def __repr__(self) -> str:
        return f"Result({self.verdict!r}, folder={str(self.folder)!r})"

    def _repr_html_(self) -> str:
        verdict = self.record["verdict"]
        facts = {"verdict": self.verdict, "scale": verdict["scale"], "folder": self.folder or "nothing was written"}
        facts |= {f"warning {i}": text for i, text in enumerate(verdict.get("warnings", ()), 1)}
        examples = (verdict.get("answers") or {}).get("examples", ())
        rows = [tuple(example.values()) for example in examples]
        return panel("Moved", facts, ("prompt", "tuned source", "before", "after") if rows else (), rows[:ROWS])


def make_record(
    command: str,
    config: TransferSettings | ApplySettings,
    inputs: Mapping[str, Mapping[str, str]],
    moved: TaskVector,
    verdict: Verdict,
    *,
    provenance: Mapping[str, Any],
    sites: Sequence[Mapping[str, Any]],
    ignored: Mapping[str, str],
    **more: Any,
) -> dict[str, Any]:
    """The record of an output, whatever made it: what `inspect` and `report` read."""
    coverage = moved.coverage or Coverage(())
    # What a fine-tune brings beside changes of its base has found no place either.
    coverage = Coverage(coverage.rows, {**coverage.unused, **ignored})
    again = f"taskferry {config.command} --config {shlex.quote(str((config.out or Path()) / SETTINGS))} --out ANOTHER"
    counts = {
        "moved": len(coverage.moved()) or len(moved),
        "of": len(coverage.rows) or len(moved),
        "weights": coverage.share() if coverage.rows else None,
    }
    return {
        "taskferry": __version__,
        "command": command or again,
        "settings": config.model_dump(mode="json", by_alias=True),
        "inputs": dict(inputs),
        "provenance": dict(provenance),
        "verdict": {**verdict.record(), **counts},
        "sites": list(sites),
        "ignored": dict(ignored),
        **more,
        "coverage": coverage.to_json(),
        "coverage_summary": coverage.summary(),
    }


def write_record(folder: Path, record: Mapping[str, Any], config: Settings, *, adapter: bool) -> None:
    """Record, settings and card into an output folder."""
    (folder / RECORD).write_text(as_json(record) + "\n", encoding="utf-8")
    (folder / SETTINGS).write_text(dump_settings(config), encoding="utf-8")
    write_card(folder, record, adapter=adapter)


def find_record(given: Path) -> tuple[Path, dict[str, Any]]:
    """The file of a record, and what it holds."""
    file = given if given.is_file() else given / RECORD
    if not file.is_file():
        raise TaskferryError(f"{given} holds no {RECORD}: give the output of `taskferry transfer` or `apply`")
    return file, read_json(file)
