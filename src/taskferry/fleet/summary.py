"""The page that a fleet leaves beside its outputs: how many, how fast, and what failed and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from taskferry.fleet.move import Moved
from taskferry.report.page import page
from taskferry.report.parts import Cell, Number, Report, Section, Table, Tiles

SHOWN = 1000  # failures listed


def summary_page(summary: Mapping[str, Any], states: Iterable[Moved]) -> str:
    """HTML; every name and reason is text from files, and escaped."""
    counts: list[tuple[str, Cell, str]] = [
        ("Moved", Number(summary["done"], str(summary["done"])), f"of {summary['of']}"),
        ("Failed", Number(summary["failed"], str(summary["failed"])), "with a reason each, below"),
        ("Pending", Number(summary["pending"], str(summary["pending"])), "rerun to resume"),
        ("Speed", Number(summary["adapters_a_second"], f"{summary['adapters_a_second']}"), "adapters a second"),
        ("Time", Number(summary["seconds"], f"{summary['seconds']}"), "seconds"),
    ]
    sections = [Section("In short", [Tiles(counts)])]
    failures = [state for state in states if state.status == "failed"]
    if failures:
        reasons: list[list[Cell]] = [[reason, Number(n, str(n))] for reason, n in summary["reasons"].items()]
        which: list[list[Cell]] = [[state.adapter, state.move, state.reason] for state in failures[:SHOWN]]
        some = f"The first {SHOWN} of {len(failures)}, the others are in {summary['manifest']}"
        of = some if len(failures) > SHOWN else "Every adapter that failed"
        sections += [
            Section("Why they failed", [Table("Reasons", ["reason", "adapters"], reasons)]),
            Section("Which", [Table(of, ["adapter", "move", "reason"], which, words=3)]),
        ]
    done, good = f"{summary['done']} of {summary['of']} adapters moved", not summary["failed"]
    badge = "All moved" if good and not summary["pending"] else f"{summary['failed']} failed"
    return page(
        Report("fleet", done, f"{done} in {summary['seconds']} s.", sections, "", badge, "good" if good else "bad")
    )
