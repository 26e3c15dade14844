"""The tables and figures of quality against cost: what `frontier.py` found, over the cells of a kind.

    >>> found = summed(in_table(cells, ZOO), STANDARD, 100)
    >>> found.share, found.least, found.cpu

A cell is a pair of models, a task, a number of samples and a draw; its key is "task source target samples draw".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.quality.ways import BESIDE, SCRATCH, STANDARD, STARTS, STEPS, WAYS
from benchmarks.shared import common
from taskferry.report.figures import Line, lines

UNCOUNTED = (math.nan, math.nan)  # passes of a way that was run block by block

PAIRS = (("narrow", "twin"), ("wide", "narrow"), ("narrow", "wide"), ("twin", "deep"))
MORE_PAIRS = (("twin", "wide"), ("narrow", "deep"), ("deep", "narrow"))  # of refinement: it is told on all seven
TASKS = ("letters", "cifar10", "occluded", "case")
WORST = -1.0  # points: what a way that chooses its scale may lose on a pair and task
MODELS = {model for pair in PAIRS for model in pair}
ZOO, MORE, NEW = "zoo", "zoo, three more pairs", "zoo, new tasks and a new pair"
TEXT, EXAMPLE = "real encoders of texts", "example, by the loss"

CURVES = ["way", "pairs and tasks", "cells", "0 steps", *(f"{n} steps" for n in STEPS)]
LINES = {line: {"bico": BESIDE, "twofold": STANDARD}.get(start, "") for line, start in {**STARTS, SCRATCH: ""}.items()}


def group(key: str) -> str:
    """Which table a cell belongs to."""
    task, source, target, *_ = key.split()
    if source not in MODELS:
        return EXAMPLE if source == "base-a" else TEXT
    if task in TASKS and (source, target) in PAIRS:
        return ZOO
    return MORE if task in TASKS and (source, target) in MORE_PAIRS else NEW


def in_table(cells: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """The cells of some tables."""
    return {key: known for key, known in cells.items() if group(key) in kinds}


def grouped(cells: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every table and number of samples, with the cells of that table."""
    for kind, count in sorted({(group(key), int(key.split()[3])) for key in cells}):
        yield kind, count, in_table(cells, kind)


@dataclass
class Found:
    """One way at one number of samples, over the cells that it was run in."""

    share: float  # of the oracle's gain: sums over pairs and tasks, each the mean over its draws
    draws: list[float]  # the share of each draw that has all pairs and tasks
    least: float  # points over the target of the worst pair and task, in the mean over its draws
    single: float  # of the worst draw of all
    cpu: float
    passes: tuple[float, float]
    cells: int
    places: int  # pairs and tasks
    worst: str  # the place of the least gain


def summed(cells: dict[str, Any], name: str, count: int) -> Found | None:
    """Over cells of one group."""
    gains: dict[int, list[tuple[float, float]]] = {}
    by_place: dict[str, list[tuple[float, float]]] = {}
    costs = []
    for key, known in cells.items():
        task, source, target, number, seed = key.split()
        way = known["ways"].get(name, {})
        if int(number) != count or "score" not in way:
            continue
        gain = way["score"] - known["target"], known["oracle"] - known["target"]
        gains.setdefault(int(seed), []).append(gain)
        by_place.setdefault(f"{task} {source} {target}", []).append(gain)
        costs.append((way["cpu"], *way.get("passes", UNCOUNTED)))
    if not costs:
        return None
    means = {place: _means(some) for place, some in by_place.items()}
    draws = [_share(some) for some in gains.values() if len(some) == len(means)]
    cpu, of_A, of_B = _means(costs)
    single = min(gain for some in by_place.values() for gain, _ in some)
    worst = min(means, key=lambda place: means[place][0])
    return Found(
        _share(means.values()), draws, means[worst][0], single, cpu, (of_A, of_B), len(costs), len(means), worst
    )


def _means(rows: Iterable[Sequence[float]]) -> tuple[float, ...]:
    """Of each column."""
    return tuple(statistics.mean(column) for column in zip(*rows, strict=True))


def _share(gains: Iterable[Sequence[float]]) -> float:
    """Of the sum of what the oracle gains, from pairs of a gain and the oracle's."""
    gain, whole = (sum(column) for column in zip(*gains, strict=True))
    return gain / (whole or float("nan"))


def table(cells: dict[str, Any]) -> str:
    rows = []
    for kind, count, some in grouped(cells):
        for name in WAYS:
            found = summed(some, name, count)
            if found is not None:
                share = shown_share(found)
                passes = " / ".join(f"{p:.1f}" for p in found.passes)
                rows.append([kind, str(count), name, str(found.cells), f"{share} %", f"{found.least:+.2f}",
                             f"{found.cpu:.1f}", passes])  # fmt: skip
    header = ["", "N", "way", "cells", "share of the oracle's gain", "least gain of a pair and task, points",
              "CPU-seconds", "passes, source / target"]  # fmt: skip
    return common.table(header, rows)


def never_worse_table(cells: dict[str, Any]) -> str:
    """Ways that choose their scale: the worst pair and task at every number of samples, in the mean over draws."""
    rows = []
    for kind, count, some in grouped(cells):
        for name, way in WAYS.items():
            found = summed(some, name, count) if way.auto else None
            if found is not None:
                draws = f"{found.cells / found.places:.3g}"
                rows.append([kind, str(count), name, str(found.places), draws, f"{found.least:+.2f}", found.worst])
    header = ["", "N", "way", "pairs and tasks", "draws", "least gain, points", "where"]
    return common.table(header, rows)


def comparable(cells: dict[str, Any], count: int) -> dict[str, Any]:
    """Those of one number of samples in which all kinds of way were run that were run in any."""
    mine = {key: known for key, known in cells.items() if int(key.split()[3]) == count}
    kinds = {key: {WAYS[name].kind for name in known["ways"] if name in WAYS} for key, known in mine.items()}
    every = set().union(*kinds.values()) - {"refined"}  # dearer: of some of them alone, which its table says
    return {key: known for key, known in mine.items() if every <= kinds[key]}


@dataclass
class Curve:
    """What some steps of training recover from one start, all over the same cells."""

    line: str
    points: dict[int, Found]  # by steps; 0 is the move that it started from, if any

    @property
    def last(self) -> Found:
        return self.points[max(self.points)]

    def shown(self) -> dict[int, str]:
        """Shares, with CPU-seconds in brackets."""
        return {0: "0 %"} | {n: f"{shown_share(point)} % ({point.cpu:.0f})" for n, point in self.points.items()}


def refined(cells: dict[str, Any], count: int, starts: Mapping[str, str] = LINES) -> list[Curve]:
    """The curves of one number of samples, each over the cells that have the start and all of its steps.

    Where only some cells have the most steps, they have a curve of their own behind that of all. `starts`: of each line
    the way that it starts from, if any.
    """
    some = {key: known for key, known in cells.items() if int(key.split()[3]) == count}
    found = []
    for line, moved in starts.items():
        names = {
            n: name for n in STEPS if any((name := f"{line}, {n} steps") in known["ways"] for known in some.values())
        }
        if not names:
            continue
        if moved:
            names = {0: moved, **names}
        curves: list[Curve] = []
        for most in sorted(names, reverse=True):
            mine = {n: name for n, name in names.items() if n <= most}
            whole = {key: known for key, known in some.items() if set(mine.values()) <= set(known["ways"])}
            points = {n: point for n, name in mine.items() if (point := summed(whole, name, count)) is not None}
            if most > 0 and points and (not curves or points[most].cells > curves[-1].last.cells):
                curves.append(Curve(line, points))
        found += reversed(curves)
    return found


def zoo_curves(cells: dict[str, Any]) -> dict[str, Curve]:
    """On all pairs of the zoo with 100 samples: of each line the curve over the most cells."""
    found: dict[str, Curve] = {}
    for curve in refined(in_table(cells, ZOO, MORE), 100):
        found.setdefault(curve.line, curve)
    return found


def refine_table(cells: dict[str, Any]) -> str:
    """Share against steps, and CPU-seconds: what a move saves of a training; the zoo on all pairs that were run."""
    rows = []
    for kind, count, some in grouped(cells):
        if kind == MORE:
            continue
        told = (kind, some) if kind != ZOO else ("zoo, all pairs", in_table(cells, ZOO, MORE))
        rows += [[told[0], str(count), *row] for row in curve_rows(refined(told[1], count))]
    return common.table(["", "N", *CURVES], rows)


def curve_rows(curves: Iterable[Curve]) -> list[list[str]]:
    """Under the header CURVES."""
    return [
        [curve.line, str(curve.last.places), str(curve.last.cells), *(curve.shown().get(n, "") for n in (0, *STEPS))]
        for curve in curves
    ]


def draw_refined(cells: dict[str, Any], by: str) -> str:
    """Share with 100 samples on all pairs of the zoo, against "steps" or "CPU-seconds".

    Of each line the curve with the most steps among those on the most pairs and tasks, be it of fewer draws.
    """
    longest: dict[str, Curve] = {}
    for curve in sorted(refined(in_table(cells, ZOO, MORE), 100), key=lambda c: (c.last.places, max(c.points))):
        longest[curve.line] = curve
    curves = []
    for curve in longest.values():
        points = {} if 0 in curve.points else {0.0: 0.0}
        points |= {float(n) if by == "steps" else point.cpu: 100 * point.share for n, point in curve.points.items()}
        curves.append(Line(curve.line, list(points), list(points.values()), dashed="labels" in curve.line))
    return lines(curves, x=by, y="% of the oracle's gain", level=(0.0, "target"), height=4.0)


def is_refined(cell: dict[str, Any]) -> bool:
    """Whether some way of a cell was refined."""
    return any(WAYS[name].kind == "refined" for name in cell.get("ways", {}) if name in WAYS)


def shown_share(found: Found) -> str:
    """Of the oracle's gain, in per cent, with its spread over draws."""
    spread = f" ± {100 * statistics.stdev(found.draws):.0f}" if len(found.draws) > 1 else ""
    return f"{100 * found.share:.0f}{spread}"


def draw(cells: dict[str, Any], count: int) -> str:
    """Share against CPU-seconds at one number of samples."""
    curves = []
    for line in dict.fromkeys(way.line for way in WAYS.values() if way.line):
        found = [f for name, way in WAYS.items() if way.line == line
                 for f in [summed(cells, name, count)] if f is not None]  # fmt: skip
        most = max((f.places for f in found), default=0)  # what was run on some of them alone is in the table
        if found:
            x, y = zip(*((f.cpu, 100 * f.share) for f in found if f.places == most), strict=True)
            curves.append(Line(line, x, y, dashed="labels" in line))
    return lines(
        curves, x="CPU-seconds", y="% of the oracle's gain", logarithmic="x", level=(0.0, "target"), height=4.0
    )
