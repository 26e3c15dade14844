"""Tables of cells: what each row recovers of the oracle's gain, and what it costs.

>>> print(summary(cells)); print(scores(cells))

A cell's key is "… source target … count seed" as `Key` reads it; a cell has "target", "oracle" and "rows".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.shared import common
from benchmarks.shared.rows import ROWS

BASES = {"target": "unchanged target", "oracle": "tuned on all data (oracle)", "source": "tuned source"}


@dataclass(frozen=True)
class Key:
    """Recipe, task, source, target, sampler, number of samples and draw of a cell."""

    recipe: str
    task: str
    source: str
    target: str
    sampler: str
    count: str
    seed: int

    @classmethod
    def of(cls, key: str) -> Key:
        recipe, task, source, target, sampler, count, seed = key.split()
        return cls(recipe, task, source, target, sampler, count, int(seed))

    @property
    def place(self) -> tuple[str, str, str]:
        return self.task, self.source, self.target


@dataclass(frozen=True)
class Found:
    """One row over some cells: pairs with a task, each the mean over its draws."""

    share: float  # of the oracle's gain
    spread: float  # of the share, over draws that have all places
    least: float  # gain of the worst place, in points
    worst: str  # that place
    cpu: float
    cells: int
    places: int


def summed(cells: dict[Key, Any], row: str) -> Found | None:
    gains: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    draws: dict[tuple[int, str], list[tuple[float, float]]] = {}
    cpu = []
    for key, cell in cells.items():
        found = cell.get("rows", {}).get(row, {})
        if "score" in found:
            gain = found["score"] - cell["target"], cell["oracle"] - cell["target"]
            gains.setdefault(key.place, []).append(gain)
            draws.setdefault((key.seed, key.sampler), []).append(gain)
            cpu.append(found.get("cpu", math.nan))
    if not gains:
        return None
    means = {place: [statistics.mean(column) for column in zip(*some, strict=True)] for place, some in gains.items()}
    whole = [_share(some) for some in draws.values() if len(some) == len(means)]
    worst = min(means, key=lambda place: means[place][0])
    return Found(
        share=_share(means.values()),
        spread=statistics.stdev(whole) if len(whole) > 1 else math.nan,
        least=means[worst][0],
        worst="{}, {} → {}".format(*worst),
        cpu=statistics.mean(cpu),
        cells=len(cpu),
        places=len(means),
    )


def _share(gains: Iterable[Sequence[float]]) -> float:
    gain, whole = (sum(column) for column in zip(*gains, strict=True))
    return gain / whole if whole else math.nan


def keyed(cells: dict[str, Any]) -> dict[Key, Any]:
    return {Key.of(key): cell for key, cell in cells.items() if isinstance(cell, dict) and "oracle" in cell}


def summary(cells: dict[str, Any]) -> str:
    """Share, least gain and cost of each row, by number of samples."""
    known, rows = keyed(cells), []
    for count in sorted({key.count for key in known}, key=lambda count: int(count.removesuffix("K"))):
        some = {key: cell for key, cell in known.items() if key.count == count}
        for row in ROWS:
            found = summed(some, row)
            if found is not None:
                spread = "" if math.isnan(found.spread) else f" ± {100 * found.spread:.0f}"
                cost = "" if math.isnan(found.cpu) else f"{found.cpu:.1f}"
                rows.append([count, row, f"{found.places}, {found.cells}", f"{100 * found.share:.0f}{spread} %",
                             f"{found.least:+.1f} ({found.worst})", cost])  # fmt: skip
    header = ["N", "", "pairs with a task, cells", "share of the oracle's gain", "least gain, points", "CPU-seconds"]
    return common.table(header, rows)


def scores(cells: dict[str, Any]) -> str:
    """A table for each recipe, pair and sampler: every row by task, its average with the gain, and its share."""
    known, parts = keyed(cells), []
    for group in dict.fromkeys((key.recipe, key.source, key.target, key.sampler) for key in known):
        mine = {k: c for k, c in known.items() if (k.recipe, k.source, k.target, k.sampler) == group}
        tasks = sorted({key.task for key in mine})
        rows = []
        for count in sorted({key.count for key in mine}, key=lambda count: int(count.removesuffix("K"))):
            some = {key: cell for key, cell in mine.items() if key.count == count}
            for base, words in BASES.items():
                line = _line(words, count, tasks, {key: cell[base] for key, cell in some.items()}, some)
                if line[2:] not in [row[2:] for row in rows if row[0] == words]:  # a zero-shot head is no draw's
                    rows.append(line)
            for row in ROWS:
                have = {k: c["rows"][row]["score"] for k, c in some.items() if "score" in c["rows"].get(row, {})}
                if have:
                    rows.append(_line(row, count, tasks, have, some, shared=True))
        sampler = "" if group[3] == "random" else f", {group[3]} samples"
        parts.append(f"{group[0]}: {group[1]} → {group[2]}{sampler}\n\n"
                     + common.table(["", "N", *tasks, "average (gain)", "recovered"], rows))  # fmt: skip
    return "\n\n".join(parts)


def _line(
    name: str, count: str, tasks: Sequence[str], have: dict[Key, float], cells: dict[Key, Any], shared: bool = False
) -> list[str]:
    by_task = {task: [value for key, value in have.items() if key.task == task] for task in tasks}
    shown = [f"{statistics.mean(values):.1f}" if values else "" for values in by_task.values()]
    gains = [(value - cells[key]["target"], cells[key]["oracle"] - cells[key]["target"]) for key, value in have.items()]
    average = statistics.mean(statistics.mean(values) for values in by_task.values() if values)
    gain = statistics.mean(gain for gain, _ in gains)
    return [name, count, *shown, f"{average:.1f} ({gain:+.1f})", f"{100 * _share(gains):.0f} %" if shared else ""]
