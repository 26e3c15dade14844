"""From records to tables: mean over draws for each task, the average with its spread, and the share recovered.

>>> print(markdown(collect(records)))
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taskferry.bench.running import BASE_ROWS, ORACLE, TARGET, TUNED, Record

Scores = dict[str, dict[str, dict[int, float]]]  # row -> task -> draw -> score
Key = tuple[str, str, str, int]  # source, target, sampler, number of samples
Groups = dict[Key, Scores]


@dataclass(frozen=True)
class Line:
    """One row of a table at one number of samples."""

    row: str
    count: int  # samples, in all or of each class
    fixed: bool  # the same in every draw, because nothing is drawn for it
    tasks: dict[str, float]  # mean over the draws
    average: float
    spread: float | None  # standard deviation of the average over the draws
    gain: float  # over the target, in the same draws
    recovered: float | None  # share of the oracle's gain
    draws: int


def collect(records: Iterable[Record]) -> Groups:
    """Scores by pair, sampler and number of samples."""
    groups: Groups = {}
    for record in records:
        cell = record["cell"]
        key = (cell["source"], cell["target"], cell["sampler"], int(cell.get("samples", cell.get("per_class", 0))))
        for entry in record["rows"]:
            if "score" in entry:
                tasks = groups.setdefault(key, {}).setdefault(entry["row"], {})
                tasks.setdefault(cell["task"], {})[int(cell["seed"])] = float(entry["score"])
    return groups


def refusals(records: Sequence[Record]) -> dict[str, str]:
    """Rows that could not be made, with their sentence and how often."""
    found: Counter[tuple[str, str]] = Counter()
    asked: Counter[str] = Counter()
    for record in records:
        for entry in record["rows"]:
            asked[entry["row"]] += 1
            if "refused" in entry:
                found[entry["row"], entry["refused"]] += 1
    return {
        row: sentence + ("" if count == asked[row] else f" ({count} of {asked[row]} draws)")
        for (row, sentence), count in found.items()
    }


def to_json(groups: Groups) -> list[dict[str, Any]]:
    """Groups as plain data, small enough to keep."""
    return [
        {"source": source, "target": target, "sampler": sampler, "count": count, "scores": scores}
        for (source, target, sampler, count), scores in groups.items()
    ]


def from_json(data: Iterable[dict[str, Any]]) -> Groups:
    """What `to_json` wrote; JSON made the numbers of draws text."""
    return {
        (g["source"], g["target"], g["sampler"], int(g["count"])): {
            row: {task: {int(draw): score for draw, score in draws.items()} for task, draws in tasks.items()}
            for row, tasks in g["scores"].items()
        }
        for g in data
    }


def lines(group: Scores, count: int) -> list[Line]:
    """All rows of one group, the fixed ones first; gains compare the same tasks and draws."""
    order = [*BASE_ROWS, *(row for row in group if row not in BASE_ROWS)]
    result = []
    target, oracle = group[TARGET], group[ORACLE]
    for row in order:
        if row not in group:
            continue
        tasks = {task: statistics.mean(draws.values()) for task, draws in group[row].items()}
        draws = sorted(set.intersection(*(set(d) for d in group[row].values())))
        averages = [statistics.mean(group[row][task][d] for task in tasks) for d in draws]
        pairs = [(task, d) for task in tasks for d in group[row][task]]
        gain = statistics.mean(group[row][t][d] - target[t][d] for t, d in pairs)
        possible = statistics.mean(oracle[t][d] - target[t][d] for t, d in pairs)
        # A zero-shot head does not depend on the draw, and then neither do rows that take no samples.
        constant = all(len(set(d.values())) == 1 for d in group[row].values())
        fixed = constant and (row in BASE_ROWS or len(draws) > 1)
        result.append(
            Line(
                row,
                count,
                fixed,
                tasks,
                statistics.mean(tasks.values()),
                statistics.stdev(averages) if len(averages) > 1 and not fixed else None,
                gain,
                gain / possible if row not in (TARGET, TUNED) and possible > 0 else None,
                len(draws),
            )
        )
    return result


def markdown(groups: Groups, count_name: str = "N", refused: Mapping[str, str] | None = None) -> str:
    """One table for each pair and sampler: rows that no sample changes first, the others by number of samples."""
    tables = []
    for pair in dict.fromkeys(key[:3] for key in groups):
        counts = sorted(key[3] for key in groups if key[:3] == pair)
        found = [line for count in counts for line in lines(groups[(*pair, count)], count)]
        tasks = sorted({task for line in found for task in line.tasks})
        values: dict[str, list[dict[str, float]]] = {}
        for line in found:
            values.setdefault(line.row, []).append(line.tasks)
        once = {line.row for line in found if line.fixed and all(v == line.tasks for v in values[line.row])}
        first = {line.row: line for line in found if line.row in once}
        shown = [[row, "", *_cells(line, tasks)] for row, line in first.items()]
        draws = max(line.draws for line in found)
        for line in found:
            if line.row not in once:
                few = line.draws < draws or len(line.tasks) < len(tasks)
                name = (
                    f"{line.row} ({line.draws} draw{'s' * (line.draws > 1)}, {len(line.tasks)} tasks)"
                    if few
                    else line.row
                )
                shown.append([name, str(line.count), *_cells(line, tasks)])
        note = "" if pair[2] == "random" else f", {pair[2]} samples"
        header = ["", count_name, *tasks, "average (gain)", "recovered"]
        tables.append(f"{pair[0]} → {pair[1]}{note}\n\n" + table(header, shown))
    return "\n\n".join([*tables, *(f"{row}: {sentence}" for row, sentence in (refused or {}).items())])


def _cells(line: Line, tasks: Sequence[str]) -> list[str]:
    scores = [f"{line.tasks[task]:.1f}" if task in line.tasks else "" for task in tasks]
    spread = "" if line.spread is None else f" ± {line.spread:.1f}"
    recovered = "" if line.recovered is None else f"{100 * line.recovered:.0f} %"
    return [*scores, f"{line.average:.1f}{spread} ({line.gain:+.1f})", recovered]


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    ruled = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join([*ruled, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])
