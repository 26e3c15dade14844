"""From a file that taskferry wrote to a page beside it: what `taskferry report` wires."""

from __future__ import annotations

import json
from pathlib import Path

from taskferry.disk.files import write_text
from taskferry.errors import TaskferryError
from taskferry.report.page import GENERATOR, page
from taskferry.report.parts import Report
from taskferry.report.transfer import transfer_report

RECORD = "taskferry.json"
MADE = f"<!-- made by {GENERATOR} -->"


def write_report(given: Path, out: Path | None = None, form: str = "html") -> tuple[Path, Report]:
    """Read a transfer's output and write its page; returns where it is."""
    file = find(given)
    report = read_report(file)
    text = page(report) if form == "html" else f"{MADE}\n{report.markdown()}"
    path = out or (file.parent / f"report.{form}" if file.name == RECORD else file.with_suffix(f".{form}"))
    _write(path, text)
    return path, report


def find(given: Path) -> Path:
    """The record of a folder, or the file itself."""
    file = given if given.is_file() else given / RECORD
    if not file.is_file():
        raise TaskferryError(f"{given} holds no {RECORD}: give the output of `taskferry transfer`")
    return file


def read_report(file: Path) -> Report:
    """The report of a transfer's record."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        if "verdict" in record:
            return transfer_report(record, file.parent.name)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TaskferryError(
            f"{file} cannot be shown, something in it is not as taskferry writes it: {error!r}"
        ) from error
    raise TaskferryError(f"{file} is no record of a transfer: give the output of `taskferry transfer`")


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
