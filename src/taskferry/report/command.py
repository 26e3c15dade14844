"""From a file that taskferry wrote to a page beside it: what `taskferry report` wires."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from taskferry.analysis.study import KIND
from taskferry.bench.tables import collect, refusals, to_json
from taskferry.disk.files import write_text
from taskferry.disk.records import as_json
from taskferry.disk.staging import staged_folder
from taskferry.errors import TaskferryError
from taskferry.report.analysis import all_figures, analysis_report
from taskferry.report.benchmark import benchmark_report, comparison_report
from taskferry.report.figures import alone
from taskferry.report.page import GENERATOR, page
from taskferry.report.parts import Report
from taskferry.report.transfer import transfer_report

RECORDS = ("taskferry.json", "analysis.json")
MADE = f"<!-- made by {GENERATOR} -->"


def write_report(given: Path, out: Path | None = None, form: str = "html") -> tuple[Path, Report]:
    """Read a transfer's output, an analysis or a benchmark's results, and write its page; returns where it is."""
    file = find(given)
    report = read_report(file)
    text = page(report) if form == "html" else f"{MADE}\n{report.markdown()}"
    path = out or (file.parent / f"report.{form}" if file.name in RECORDS else file.with_suffix(f".{form}"))
    _write(path, text)
    return path, report


def find(given: Path) -> Path:
    """The record of a folder, or the file itself."""
    if given.is_file():
        return given
    for name in RECORDS:
        if (given / name).is_file():
            return given / name
    raise TaskferryError(
        f"{given} holds no {' or '.join(RECORDS)}: give the output of `taskferry transfer` or `analyze`, or results of "
        "`taskferry bench`"
    )


def read_report(file: Path) -> Report:
    """The report of one file, whatever kind it is."""
    try:
        data = _read(file)
        if "verdict" in data:
            return transfer_report(data, file.parent.name)
        if data.get("kind") == KIND:
            return analysis_report(data, file.name)
        if "scores" in data and "refusals" in data:
            return comparison_report(data, file.name)
        if data and all(isinstance(found, dict) and "groups" in found for found in data.values()):
            return benchmark_report(data, file.name)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, UnicodeDecodeError) as error:
        raise TaskferryError(
            f"{file} cannot be shown, something in it is not as taskferry writes it: {error!r}"
        ) from error
    raise TaskferryError(f"{file} is neither a transfer, an analysis nor a benchmark of taskferry")


def _read(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".jsonl":  # what `taskferry bench run` keeps: one draw a line
        records = [json.loads(line) for line in text.splitlines()]
        found = {"title": file.stem, "groups": to_json(collect(records)), "refused": refusals(records)}
        return {file.stem: found}
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError("no JSON object")
    return data


def _write(path: Path, text: str) -> None:
    """Whole or not at all; over an earlier report, never over anything else."""
    if path.exists():
        head = path.read_text(encoding="utf-8", errors="replace")[:2000] if path.is_file() else ""
        if GENERATOR not in head:
            raise TaskferryError(f"{path} is there and is no report: name another place with --out")
    if not path.parent.is_dir():
        raise TaskferryError(f"{path.parent} is not a folder: make it first, or name another place with --out")
    try:
        write_text(path, text)
    except OSError as error:
        raise TaskferryError(f"{path} cannot be written: {error.strerror}; name another place with --out") from error


def write_analysis(out: Path, study: Mapping[str, Any]) -> None:
    """analysis.json and every figure as a file of its own, in a folder that appears whole or not at all."""
    drawn = {name: alone(figure.draw()) for name, figure in all_figures(study).items()}
    with staged_folder(out) as folder:
        (folder / "analysis.json").write_text(as_json(study) + "\n", encoding="utf-8")
        for name, svg in drawn.items():
            (folder / f"{name}.svg").write_text(svg, encoding="utf-8")
