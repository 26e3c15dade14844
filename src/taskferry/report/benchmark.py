"""The report of a benchmark: tables with their spread, and curves of accuracy against the number of samples."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from taskferry.bench.rows import rows as known_rows
from taskferry.bench.running import ORACLE, TARGET, TUNED
from taskferry.bench.tables import Groups, Line, from_json, lines
from taskferry.methods import published
from taskferry.report import figures
from taskferry.report.parts import Cell, Figure, Number, Part, Report, Row, Section, Table, Text
from taskferry.report.transfer import number

_LEVELS = (TARGET, ORACLE)


def benchmark_report(results: Mapping[str, Mapping[str, Any]], name: str) -> Report:
    """One section a recipe, and all of them at a glance first."""
    groups = {recipe: from_json(found["groups"]) for recipe, found in results.items()}
    sections = [Section("At a glance", [_overview(results, groups)])]
    for recipe, found in results.items():
        sections.append(Section(str(found["title"]), _recipe(recipe, found, groups[recipe])))
    draws = [line.draws for g in groups.values() for k, s in g.items() for line in lines(s, k[3])]
    lead = (
        f"{len(results)} table{'s' * (len(results) != 1)}, up to {max(draws, default=0)} draws of the calibration set "
        "each. Spreads and bands are standard deviations over draws; gains are over the unchanged target, in the same "
        "draws; recovered is the share of what fine-tuning the target itself would gain."
    )
    return Report("benchmark", "Benchmark results", lead, sections, f"From {name}.")


def curve_colours() -> dict[str, int]:
    """Rows that have a colour and mark of their own in every figure."""
    return {name: kind.row.curve for name, kind in known_rows().items() if kind.row.curve is not None}


def _overview(results: Mapping[str, Mapping[str, Any]], groups: Mapping[str, Groups]) -> Table:
    rows: list[list[Cell]] = []
    found_rows = {row for some in groups.values() for scores in some.values() for row in scores}
    shown = [row for row in curve_colours() if row in found_rows]
    for recipe in results:
        last: dict[tuple[str, str, str], int] = {}
        for key in groups[recipe]:
            last[key[:3]] = max(last.get(key[:3], 0), key[3])
        for pair, count in last.items():
            found = {line.row: line for line in lines(groups[recipe][(*pair, count)], count)}
            fixed: list[Cell] = [_score(found[row].average) if row in found else None for row in _LEVELS]
            gains: list[Cell] = [_gain(found[row].gain) if row in found else None for row in shown]
            sampler = "" if pair[2] == "random" else f", {pair[2]}"
            label = f"{recipe}: {pair[0]} → {pair[1]}{sampler}"
            rows.append([label, Number(count, str(count)), *fixed, *gains])
    header = ["", "N", "target", "oracle", *(f"{row}: gain" for row in shown)]
    return Table("Each pair at its largest number of samples", header, rows)


def _recipe(recipe: str, found: Mapping[str, Any], groups: Groups) -> list[Part]:
    parts: list[Part] = [Text(f"taskferry bench run {recipe}", "note")]
    counted = str(found.get("counted", "N"))
    for pair in dict.fromkeys(key[:3] for key in groups):
        counts = sorted(key[3] for key in groups if key[:3] == pair)
        by_count = {count: lines(groups[(*pair, count)], count) for count in counts}
        title = f"{pair[0]} → {pair[1]}" + ("" if pair[2] == "random" else f", {pair[2]} samples")
        if len(counts) > 1:
            parts.append(Row([_curve(title, by_count, counted, False), _curve(title, by_count, counted, True)]))
        else:
            parts.append(_dots(title, by_count[counts[0]], counted))
        parts.append(_table(title, by_count, counted))
    for row, sentence in found.get("refused", {}).items():
        parts.append(Text(f"{row}: {sentence}", "note"))
    return parts


def _curve(title: str, by_count: Mapping[int, Sequence[Line]], counted: str, gain: bool) -> Figure:
    """Average accuracy against N with bands, with the target and the oracle; or the gains alone, closer."""
    rows = list(dict.fromkeys(line.row for found in by_count.values() for line in found))
    shown = [row for row in curve_colours() if row in rows] or [r for r in rows if r not in (*_LEVELS, TUNED)]
    counts, curves, table = list(by_count), [], []
    fixed = [] if gain else [row for row in _LEVELS if row in rows]
    for place, row in enumerate([*shown, *fixed]):
        at = {count: line for count, found in by_count.items() for line in found if line.row == row}
        values = [at[c].gain if gain else at[c].average for c in at]
        spread = [at[c].spread or 0.0 for c in at]
        band = spread if any(spread) else None
        level, colour = row in _LEVELS, curve_colours().get(row, place)
        name = "oracle" if row == ORACLE else row
        curves.append(figures.Line(name, list(at), values, band, dashed=row == ORACLE, colour=colour, plain=level))
        table.append([row, *(number(at[c].gain if gain else at[c].average) if c in at else None for c in counts)])
    what = "gain over the target" if gain else "accuracy"
    draw = partial(figures.lines, curves, x=_axis(counted), y=what, logarithmic="x", ticks=counts, height=3.4)
    alt = "; ".join(f"{c.name} from {c.y[0]:.1f} to {c.y[-1]:.1f}" for c in curves)
    caption = f"{title}: {what}, averaged over tasks, against the number of samples. Bands: one standard deviation."
    header = ["", *(f"{counted} = {c}" for c in counts)]
    return Figure(draw, caption, f"{what}: {alt}.", Table(f"{title}: {what}", header, table))


def _dots(title: str, found: Sequence[Line], counted: str) -> Figure:
    rows = [(line.row, line.gain, line.spread) for line in found if line.row not in (TARGET, TUNED)]
    alt = "; ".join(f"{row} {gain:+.1f}" for row, gain, _ in rows)
    caption = f"{title}: gain over the target at {counted} = {found[0].count}, with its spread over draws."
    return Figure(partial(figures.dots, rows, x="gain over the target"), caption, f"Gain: {alt}.")


def _table(title: str, by_count: Mapping[int, Sequence[Line]], counted: str) -> Table:
    tasks = sorted({task for found in by_count.values() for line in found for task in line.tasks})
    draws = max(line.draws for found in by_count.values() for line in found)
    rows: list[list[Cell]] = []
    strong, seen = set(), set()
    for count, found in by_count.items():
        for line in found:
            if line.fixed and line.row in seen:
                continue
            seen.add(line.row)
            if line.row == published().name:
                strong.add(len(rows))
            scores: list[Cell] = [_score(line.tasks[t]) if t in line.tasks else None for t in tasks]
            spread = "" if line.spread is None else f" ± {line.spread:.1f}"
            average = Number(line.average, f"{line.average:.1f}{spread}")
            share = None if line.recovered is None else Number(line.recovered, f"{round(100 * line.recovered)} %")
            n = None if line.fixed else Number(count, str(count))
            few = line.draws < draws or len(line.tasks) < len(tasks)
            name = (
                f"{line.row} ({line.draws} draw{'s' * (line.draws > 1)}, {len(line.tasks)} tasks)" if few else line.row
            )
            rows.append([name, n, *scores, average, _gain(line.gain), share])
    header = ["", counted, *tasks, "average", "gain", "recovered"]
    return Table(title, header, rows, strong=frozenset(strong))


def _axis(counted: str) -> str:
    return "samples of each class" if counted == "K" else "calibration samples"


def _gain(value: float) -> Number:
    return Number(value, f"{value:+.1f}")


def _score(value: float) -> Number:
    return Number(value, f"{value:.1f}")


def comparison_report(data: Mapping[str, Any], name: str) -> Report:
    """What `taskferry bench compare` wrote: every method on one pair."""
    rows: list[list[Cell]] = []
    for row, values in data["scores"].items():
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        mean = statistics.mean(values)
        rows.append([row, Number(mean, f"{mean:.2f}{spread}"), number(data["seconds"].get(row, 0.0), 2)])
    table = Table("Every method on the same samples", ["method", str(data["metric"]), "seconds"], rows)
    refused = [Text(f"{row}: {why}", "note") for row, why in data["refusals"].items()]
    settings = data["settings"]
    lead = f"{len(rows)} rows on {settings['seeds']} draw(s) of the calibration set, scored on held-out samples."
    title = f"{settings['source_tuned']} on {settings['target_base']}"
    return Report("comparison", title, lead, [Section("Scores", [table, *refused])], f"From {name}.")
