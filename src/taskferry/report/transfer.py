"""The report of a transfer, from the taskferry.json of its output."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Any

from taskferry.report import figures
from taskferry.report.maps import heat_map, legend, place_of, stacks, status_map
from taskferry.report.parts import (
    Cell,
    Code,
    Facts,
    Figure,
    Fold,
    Number,
    Part,
    Report,
    Row,
    Section,
    Stack,
    Table,
    Text,
    Tiles,
)

Record = Mapping[str, Any]
BADGES = {
    "helps": ("It helps on the samples", "good"),
    "not shown to help": ("Not shown to help", "open"),
    "harms": ("It does harm on the samples", "bad"),
}
POOR = 0.99  # residual of a map that finds next to nothing in common


def transfer_report(record: Record, name: str) -> Report:
    """All that a record tells; what an older or another kind of output lacks is left out."""
    settings, verdict = record["settings"], record["verdict"]
    source, target = short(settings.get("source_tuned")), short(settings.get("target_base"))
    sections = [
        Section("In short", [*_warnings(record), Tiles(_tiles(record))]),
        *_answers(verdict.get("answers")),
        coverage_section(record["coverage"], verdict.get("change", {})),
        *_maps(record.get("sites", [])),
        *_curves(record),
        Section("Where it comes from", [Facts(_provenance(record)), *_hashes(record.get("inputs", {}))]),
        Section("To repeat it", [Code(str(record["command"]))]),
    ]
    badge, colour = BADGES.get(verdict.get("state"), ("", ""))
    title, foot = f"{source} on {target}", f"From {name}/taskferry.json."
    return Report("transfer", title, str(verdict["sentence"]), sections, foot, badge, colour)


def _warnings(record: Record) -> list[Part]:
    """Those of the verdict, and maps that found little in common."""
    found = [str(text) for text in record["verdict"].get("warnings", ())]
    residuals = [site.get("residual_out") for site in record.get("sites", ())]
    poor = sum(residual is not None and float(residual) > POOR for residual in residuals)
    if poor:
        found.append(
            f"{poor} of {len(residuals)} output maps have a residual above {POOR}: what these layers write has little "
            "in common in the two models, as is usual for gradients; the loss says whether it helps anyway"
        )
    return [Text(f"Warning: {text}", "warning") for text in found]


def short(given: object) -> str:
    """The last word of a path or hub id, without the ending of a file of weights."""
    path = PurePath(str(given))
    return (path.stem if path.suffix in (".safetensors", ".pt", ".bin") else path.name) or str(given)


def number(value: float | None, digits: int = 4) -> Number:
    """With so many significant digits; None is no number."""
    return Number(_float(value), f"{_float(value):.{digits}g}")


def _float(value: float | None) -> float:
    return math.nan if value is None else float(value)


def _tiles(record: Record) -> list[tuple[str, Cell, str]]:
    verdict, rows = record["verdict"], record["coverage"]["rows"]
    moved = sum(row["status"] != "kept" for row in rows)
    tiles: list[tuple[str, Cell, str]] = []
    if verdict.get("loss_before") is not None:
        before = number(verdict["loss_before"])
        unit = verdict.get("loss_unit", "per sample")
        tiles.append((f"Calibration loss {unit}", number(verdict["loss_after"]), f"{before.shown} before"))
    if answers := verdict.get("answers"):
        before, after = (answers[name]["right"] for name in ("before", "refined" if "refined" in answers else "moved"))
        own = f", source {answers['source']['right']:.0f} %" if "source" in answers else ""
        tiles.append(("Right answers", Number(after, f"{after:.0f} %"), f"{before:.0f} % before{own}"))
    how = "chosen on the samples" if record["settings"].get("scale") == "auto" else "as given"
    tiles.append(("Scale", number(verdict["scale"], 3), how))
    tiles.append(("Weight tensors moved", Number(moved, str(moved)), f"of {len(rows)} in the target"))
    numbers = [(_size(row["shape"]), row["status"] != "kept") for row in rows]
    share = sum(n for n, took in numbers if took) / max(1, sum(n for n, _ in numbers))
    tiles.append(("Weights moved", Number(share, f"{100 * share:.1f} %"), "of all in the target"))
    if change := verdict.get("change"):
        share = sum(change["moved"].values())
        tiles.append(("Change moved", Number(share, f"{100 * share:.1f} %"), "of its squared norm, ‖τ‖²"))
    samples = len(record.get("calibration", {}).get("indices") or ())
    if samples:
        tiles.append(("Samples", Number(samples, str(samples)), str(record["calibration"].get("labels", ""))))
    return tiles


def _size(shape: Sequence[int]) -> int:
    total = 1
    for length in shape:
        total *= int(length)
    return total


def coverage_section(coverage: Record, change: Record) -> Section:
    """A map of the target, what stands outside of its blocks, and why what stayed has stayed."""
    rows = coverage["rows"]
    status = {row["parameter"]: row["status"] for row in rows}
    maps: list[Part] = []
    folds: list[Part] = []
    found = stacks(status)
    for stack, (roles, blocks) in found.items():
        cells = {}
        for name, what in status.items():
            place = place_of(name)
            if place is not None and place[0] == stack:
                cells[place[1], place[2]] = str(what)
        part = status_map(stack, roles, blocks, cells)
        if any(what != "kept" for what in cells.values()):
            maps.append(part)
        else:
            folds.append(Fold(f"{stack}: nothing of it moved", part))
    tables: list[Part] = []
    reasons = Counter(row["reason"] for row in rows if row["status"] != "moved")
    why: list[list[Cell]] = [[reason, Number(n, str(n))] for reason, n in reasons.most_common()]
    unused = Counter(coverage.get("unused", {}).values())
    why += [[f"a change of the source: {reason}", Number(n, str(n))] for reason, n in unused.most_common()]
    if why:
        tables.append(Table("What stayed, and why", ["reason", "parameters"], why))
    notes = Counter(row["note"] for row in rows if row.get("note"))
    if notes:
        chosen: list[list[Cell]] = [[note, Number(n, str(n))] for note, n in notes.most_common()]
        tables.append(Table("Moved from a block at another depth, or of another kind", ["how", "parameters"], chosen))
    stayed = change.get("stayed", {}).items()
    shares: list[list[Cell]] = [[where, Number(share, f"{100 * share:.1f} %")] for where, share in stayed]
    if shares:
        tables.append(Table("Where the change that stayed behind sits in the source", ["part", "of ‖τ‖²"], shares))
    outside: list[list[Cell]] = [
        [row["parameter"], row["status"]] for row in rows if place_of(row["parameter"]) is None
    ]
    if outside:
        tables.append(Table("Outside of the blocks", ["parameter", "what happened"], outside, words=2))
    parts = [Row([Stack([*maps, *folds]), Stack(tables)])] if len(maps) < 2 else [Row(maps), *folds, Row(tables)]
    return Section("What moved", [Text(legend(), "note"), *parts])


def _answers(answers: Record | None) -> list[Section]:
    """Scores of held-out answers, and some prompts with what each model wrote."""
    if not answers:
        return []
    named = {"source": "tuned source", "before": "target before", "moved": "target moved", "refined": "target refined"}
    facts = {"right": "right", "exact": "exact", "begins": "begins right", "stopped": "stopped", "valid_json": "JSON"}
    shown = {name: words for name, words in facts.items() if name in answers["before"]}
    scores: list[list[Cell]] = [
        [words, *(Number(answers[who][name], f"{answers[who][name]:.0f} %") for name in shown)]
        for who, words in named.items()
        if who in answers
    ]
    examples: list[list[Cell]] = [
        [example[name] for name in ("prompt", "source", "before", "after")] for example in answers["examples"]
    ]
    gain = answers["gain"]
    told = f"{gain['points']:+.0f} points of right answers, 95 % interval {gain['low']:+.0f} to {gain['high']:+.0f}."
    return [
        Section(
            "What it answers",
            [
                Text(told, "note"),
                Table(f"Answers to {answers['samples']} held-out prompts", ["", *shown.values()], scores),
                Table("Some of them", ["prompt", "tuned source", "target before", "target after"], examples, words=4),
            ],
        )
    ]


def _maps(sites: Sequence[Record]) -> list[Section]:
    """Rank and residual of every map, as heat maps."""
    if not sites:
        return []
    parts: list[Part] = [
        Text(
            "Each layer has two maps: one for what it reads (activations), one for what it writes (gradients). "
            "The residual is √(1 − similarity²): 0 where the two models differ by a rotation alone, 1 where the map "
            "finds nothing in common. Gradients of two models have little in common: 0.8 to 0.99 is usual for what a "
            "layer writes, also where a move helps. The rank is the number of directions that the samples have shown.",
            "note",
        )
    ]
    shows: dict[str, tuple[Callable[[float], str], float | None]] = {
        "residual": (lambda v: f"{v:.2f}", 1.0),
        "rank": (lambda v: f"{v:.0f}", None),
    }
    found = stacks(site["target"] for site in sites)
    for stack, (roles, blocks) in found.items():
        maps: list[Part] = []
        for side, word in (("in", "reads"), ("out", "writes")):
            for what, (show, top) in shows.items():
                values = {}
                for site in sites:
                    place = place_of(site["target"])
                    if place is not None and place[0] == stack and site.get(f"{what}_{side}") is not None:
                        values[place[1], place[2]] = float(site[f"{what}_{side}"])
                if values:
                    title = f"{what.capitalize()}: what it {word}"
                    maps.append(
                        heat_map(title if len(found) == 1 else f"{stack}: {title}", roles, blocks, values, show, top)
                    )
        parts.append(Row(maps))
    return [Section("How good the maps are", parts)]


def _curves(record: Record) -> list[Section]:
    found: list[Part] = []
    points = [(float(s), float(v)) for s, v in record.get("scale_curve", []) if math.isfinite(_float(v))]
    if len(points) > 2:
        unit = str(record["verdict"].get("loss_unit", "per sample"))
        found.append(_scale_figure(points, float(record["verdict"]["scale"]), unit))
    if record.get("refined"):
        found.append(_refinement_figure(record["refined"]))
    if record.get("sites"):
        figure = _similarity_figure(record["sites"])
        if figure is not None:
            found.append(figure)
    return [Section("Curves", [Row(found)])] if found else []


def _scale_figure(points: Sequence[tuple[float, float]], chosen: float, unit: str) -> Figure:
    points = sorted(points)
    scales, losses = [p[0] for p in points], [p[1] for p in points]
    marked = scales.index(chosen) if chosen in scales else None
    curve = figures.Line("calibration loss", scales, losses, marked=marked)
    level = (losses[0], "unchanged target") if scales[0] == 0 else None
    draw = partial(figures.lines, [curve], x="scale", y=f"calibration loss {unit}", level=level)
    table = Table("Every scale that was tried", ["scale", "loss"], [[number(s), number(v)] for s, v in points], 0)
    alt = f"Calibration loss from {losses[0]:.4g} at scale {scales[0]:g} to {losses[-1]:.4g} at scale {scales[-1]:g}; "
    alt += f"the chosen scale is {chosen:.4g}."
    caption = "The loss on the calibration samples at each scale that was tried; the ring is the one taken."
    return Figure(draw, caption, alt, table)


def _refinement_figure(refined: Record) -> Figure:
    evaluations = [(int(step), _float(loss)) for step, loss in refined["losses"]]
    steps, losses = [step for step, _ in evaluations], [loss for _, loss in evaluations]
    curve = figures.Line("held-out samples", steps, losses, marked=steps.index(int(refined["kept"])))
    draw = partial(
        figures.lines, [curve], x="training step", y=f"loss {refined['unit']}", level=(losses[0], "as it was moved")
    )
    rows: list[list[Cell]] = [[Number(step, str(step)), number(loss)] for step, loss in evaluations]
    return Figure(
        draw,
        f"Refinement: the loss to the tuned source on {refined['held_out']} held-out samples; the ring is the step "
        "that was taken.",
        str(refined["sentence"]),
        Table("Loss on the held-out samples", ["step", "loss"], rows, 0),
    )


def _similarity_figure(sites: Sequence[Record]) -> Figure | None:
    lines: list[figures.Line] = []
    rows: list[list[Cell]] = []
    found = stacks(site["target"] for site in sites)
    for stack, (_, blocks) in found.items():
        for side, word in (("in", "reads"), ("out", "writes")):
            values: dict[int, list[float]] = {}
            for site in sites:
                place = place_of(site["target"])
                if place is not None and place[0] == stack:
                    residual = float(site[f"residual_{side}"])
                    values.setdefault(place[2], []).append(max(0.0, 1 - residual**2) ** 0.5)
            mean = [statistics.mean(values[block]) for block in blocks]
            name = f"what it {word}" if len(found) == 1 else f"{stack}: {word}"
            lines.append(figures.Line(name, blocks, mean, dashed=side == "out"))
            rows.append([f"{stack}: {word}", *(number(v, 3) for v in mean)])
    if not lines:
        return None
    longest = max((line.x for line in lines), key=len)
    draw = partial(figures.lines, lines, x="block of the target", y="similarity after alignment", low=0, high=1.02)
    header = ["", *(f"{block:g}" for block in longest)]
    padded: list[list[Cell]] = [[*row, *[None] * (len(header) - len(row))] for row in rows]
    ends = "; ".join(f"{line.name} {line.y[0]:.2f} in the first block, {line.y[-1]:.2f} in the last" for line in lines)
    return Figure(
        draw,
        "How alike both models are after alignment, averaged over the layers of a block: 1 where they differ by a "
        "rotation alone.",
        f"Similarity by block: {ends}.",
        Table("Similarity by block", header, padded),
    )


def _provenance(record: Record) -> dict[str, Cell]:
    settings, provenance = record["settings"], record.get("provenance", {})
    facts: dict[str, Cell] = {
        "tuned source": settings.get("source_tuned"),
        "its base": settings.get("source_base"),
        "target": settings.get("target_base"),
        "calibration": settings.get("calibration"),
        "method": settings.get("method", provenance.get("method")),
        "objective": " / ".join(dict.fromkeys(map(str, provenance.get("objective", [])))),
        "sampler": settings.get("sampler"),
        "seed": None if settings.get("seed") is None else str(settings["seed"]),
        "versions": ", ".join(f"{k} {v}" for k, v in provenance.get("versions", {}).items()),
    }
    return {name: value for name, value in facts.items() if value}


def _hashes(inputs: Mapping[str, Mapping[str, str]]) -> list[Part]:
    found: dict[str, Cell] = {
        f"{name.replace('_', ' ')}: {file}": str(digest)
        for name, files in inputs.items()
        for file, digest in files.items()
    }
    return [Fold(f"sha256 of {len(found)} input files", Facts(found))] if found else []
