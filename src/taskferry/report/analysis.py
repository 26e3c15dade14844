"""The report of `taskferry analyze`, and its figures."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from taskferry.report import figures
from taskferry.report.benchmark import curve_colours
from taskferry.report.parts import Cell, Code, Facts, Figure, Number, Part, Report, Row, Section, Table, Text, Tiles
from taskferry.report.transfer import number, short

Rows = Sequence[Mapping[str, Any]]
SIDES = {"in": "activations that layers read", "out": "gradients at what they write"}


def analysis_report(data: Mapping[str, Any], name: str) -> Report:
    """Similarity before and after, geometry, cost; and where models were given, outputs and drift."""
    settings, samples = data["settings"], data["samples"]
    measured = "fresh" if "fresh" in data["similarity"] else "calibration"
    rows = data["similarity"][measured]
    drawn = all_figures(data)
    count = samples[measured]
    seen = "which the maps have not seen" if measured == "fresh" else "the same that the maps were fitted on"
    parts: list[Part] = [
        Text(f"Maps fitted on {samples['calibration']} samples, measured on {count}, {seen}.", "note"),
        Row([figure for key, figure in drawn.items() if key.startswith("similarity")]),
    ]
    sections = [
        Section("In short", [Tiles(_tiles(rows, data))]),
        Section("How alike the models are", parts),
        Section("Lengths and angles", _geometry(data, rows)),
        Section("Cost", [_cost(data["cost"])]),
    ]
    more: list[Part] = [figure for key, figure in drawn.items() if not key.startswith("similarity")]
    if more:
        notes = [Text(f"{row}: {why}", "note") for row, why in data.get("refused", {}).items()]
        sections.insert(2, Section("Tuned models", [Row(more), *_outside(data.get("outputs", [])), *notes]))
    sections.append(Section("To repeat it", [Code(str(data["command"]))]))
    title = f"{short(settings['source_base'])} and {short(settings['target_base'])}"
    cka, before, after = (_mean(rows, what, "in") for what in ("cka", "cosine", "cosine_after"))
    lead = f"Linear CKA of their activations is {cka:.2f}; their cosine is {after:.2f} after alignment"
    lead += "." if before is None else f", {before:.2f} before."
    return Report("analysis", title, lead, sections, f"From {name}.")


def all_figures(data: Mapping[str, Any]) -> dict[str, Figure]:
    """Every figure by the name of its file."""
    measured = "fresh" if "fresh" in data["similarity"] else "calibration"
    found = {
        f"similarity-{side}": similarity_figure(data["similarity"][measured], side)
        for side in SIDES
        if any(row["side"] == side and row["block"] is not None for row in data["similarity"][measured])
    }
    if data.get("outputs"):
        found["outputs"] = outputs_figure(data["outputs"])
    if data.get("trajectory"):
        for what in ("direction", "magnitude"):
            found[f"trajectory-{what}"] = trajectory_figure(data["trajectory"], what)
    return found


def _block_means(rows: Rows, value: Callable[[Mapping[str, Any]], float | None]) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        one = value(row)
        if row["block"] is not None and one is not None:
            found.setdefault((str(row["stack"]), int(row["block"])), []).append(float(one))
    return {place: statistics.mean(found[place]) for place in sorted(found)}


def _mean(rows: Rows, what: str, side: str) -> float | None:
    mine = [row for row in rows if row["side"] == side]
    values = list(_block_means(mine, lambda row: row[what]).values())
    values = values or [float(row[what]) for row in mine if row[what] is not None]  # a model without blocks
    return statistics.mean(values) if values else None


def _order(places: Iterable[tuple[str, int]]) -> str:
    """Which blocks stand where, for a model of several stacks."""
    stacks = list(dict.fromkeys(stack for stack, _ in places))
    return f" Blocks of {', then of '.join(stacks)}." if len(stacks) > 1 else ""


def _numbers(caption: str, curves: Sequence[figures.Line], first: str) -> Table:
    places = sorted({x for curve in curves for x in curve.x})
    at = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
    rows: list[list[Cell]] = [
        [f"{place:g}", *(number(values[place], 3) if place in values else None for values in at)] for place in places
    ]
    return Table(caption, [first, *(curve.name for curve in curves)], rows)


def _cka(row: Mapping[str, Any]) -> float:
    return float(row["cka"])


def similarity_figure(rows: Rows, side: str) -> Figure:
    """Figure 1: CKA and cosine by block, before and after alignment."""
    mine = [row for row in rows if row["side"] == side]
    names = {"cka": "CKA", "cka_after": "CKA, aligned", "cosine": "cosine", "cosine_after": "cosine, aligned"}
    curves = []
    for place, (what, name) in enumerate(names.items()):
        means = _block_means(mine, lambda row, what=what: row[what])  # type: ignore[misc]
        if means:
            x = list(range(len(means)))
            colour, dashed = place // 2, not what.endswith("after")
            curves.append(figures.Line(name, x, list(means.values()), dashed=dashed, colour=colour))
    low = min(0.0, *(min(curve.y) for curve in curves))
    draw = partial(figures.lines, curves, x="block of the target", y="similarity", low=low - 0.02, high=1.02)
    words = "; ".join(f"{c.name} {statistics.mean(c.y):.2f}" for c in curves)
    caption = f"The {SIDES[side]}, averaged over the layers of each block.{_order(_block_means(mine, _cka))}"
    if not any(curve.name == "cosine" for curve in curves):
        caption += " The widths differ, so there is no cosine before alignment."
    return Figure(draw, caption, f"Means over blocks: {words}.", _numbers(caption, curves, "block"))


def outputs_figure(rows: Rows) -> Figure:
    """Figure 2: how close each method brings the outputs of every block to the fine-tuned target."""
    curves: list[figures.Line] = []
    order, colours = "", curve_colours()
    for name in dict.fromkeys(str(row["row"]) for row in rows):
        means = _block_means([row for row in rows if row["row"] == name], lambda row: row["cosine"])
        x, first = list(range(len(means))), not curves  # the target as it is
        colour = colours.get(name)
        curves.append(figures.Line(name, x, list(means.values()), dashed=first, colour=colour, plain=first))
        order = _order(means)
    draw = partial(figures.lines, curves, x="block of the target", y="cosine to the tuned target", height=3.4)
    words = "; ".join(f"{c.name} {c.y[-1]:.3f}" for c in curves)
    caption = "Outputs of every layer against those of the target fine-tuned on the task, averaged over each block."
    caption += order
    return Figure(draw, caption, f"In the last block: {words}.", _numbers(caption, curves, "block"))


def _outside(rows: Rows) -> list[Part]:
    """The layers outside of the blocks: behind the last one stand the features that a head reads."""
    names = list(dict.fromkeys(str(row["row"]) for row in rows))
    sites = list(dict.fromkeys(str(row["stack"]) for row in rows if row["block"] is None))
    found = {(row["stack"], row["row"]): float(row["cosine"]) for row in rows if row["block"] is None}
    table: list[list[Cell]] = [
        [site, *(number(found[site, name]) if (site, name) in found else None for name in names)] for site in sites
    ]
    caption = "Cosine to the tuned target of what layers outside of the blocks write"
    return [Table(caption, ["layer", *names], table)] if table else []


def trajectory_figure(rows: Rows, what: str) -> Figure:
    """Appendix B: how far the inputs of each block have wandered from the base, along a run."""
    steps = sorted({int(row["step"]) for row in rows})
    places = sorted({(str(row["stack"]), int(row["block"])) for row in rows})
    chosen = places if len(places) <= 7 else [places[round(i * (len(places) - 1) / 6)] for i in range(7)]
    curves = []
    for stack, block in chosen:
        at = {int(r["step"]): float(r[what]) for r in rows if (r["stack"], r["block"]) == (stack, block)}
        name = f"block {block}" if len({s for s, _ in places}) == 1 else f"{stack} {block}"
        curves.append(figures.Line(name, steps, [at[step] for step in steps]))
    y = "1 − cosine to the base" if what == "direction" else "relative change of length"
    draw = partial(figures.lines, curves, x="step of the fine-tune", y=y, low=0, height=3.4)
    most = max(max(curve.y) for curve in curves)
    caption = f"Shift of the {'direction' if what == 'direction' else 'length'} of activations along a fine-tune."
    return Figure(draw, caption, f"The largest shift is {most:.3f}.", _numbers(caption, curves, "step"))


def _tiles(rows: Rows, data: Mapping[str, Any]) -> list[tuple[str, Cell, str]]:
    tiles: list[tuple[str, Cell, str]] = []
    for side, word in (("in", "activations"), ("out", "gradients")):
        cka, before, after = (_mean(rows, what, side) for what in ("cka", "cosine", "cosine_after"))
        if cka is not None and after is not None:
            tiles.append((f"CKA of {word}", number(cka, 3), "mean over blocks"))
            note = "no cosine before: widths differ" if before is None else f"{before:.3f} before"
            tiles.append((f"Cosine of {word}, aligned", number(after, 3), note))
    ratio = float(data["cost"]["ratio"])
    tiles.append(("A fine-tune costs", Number(ratio, f"{ratio:,.0f} ×"), "a transfer, in FLOPs"))
    return tiles


def _geometry(data: Mapping[str, Any], rows: Rows) -> list[Part]:
    maps = data["isometries"]
    worst = max(float(row["error"]) for row in maps)
    whole = sum(bool(row["whole"]) for row in maps)
    facts: dict[str, Cell] = {
        "maps": Number(len(maps), str(len(maps))),
        "that reach all of the narrower space": Number(whole, str(whole)),
        "largest deviation from an isometry": number(worst, 2),
    }
    for side, word in SIDES.items():
        kept, error = _mean(rows, "norms_kept", side), _mean(rows, "angles_error", side)
        if kept is not None and error is not None:
            facts[f"energy kept, {word}"] = Number(kept, f"{100 * kept:.1f} %")
            facts[f"error of inner products, {word}"] = Number(error, f"{100 * error:.1f} %")
    words = (
        "On its range every map keeps lengths and angles exactly. What lies outside of it, because the samples did not "
        "show it or because the target is narrower, is lost."
    )
    return [Text(words, "note"), Facts(facts)]


def _cost(cost: Mapping[str, Any]) -> Table:
    names = {
        "passes": "forward and backward of both models",
        "covariances": "cross-covariances",
        "decompositions": "decompositions",
        "applying": "applying the maps",
        "transfer": "a transfer, in all",
        "finetune": f"a fine-tune of the target, {cost['steps']} steps of {cost['batch']}",
    }
    total = float(cost["transfer"])
    rows: list[list[Cell]] = []
    for key, name in names.items():
        flops = float(cost[key])
        rows.append([name, Number(flops, f"{flops:.3g}"), Number(flops / total, f"{flops / total:,.2f}")])
    ratio = Number(float(cost["paper_ratio"]), f"{float(cost['paper_ratio']):,.0f}")
    rows.append(["a fine-tune by the paper's count, which leaves tokens and C_align out", None, ratio])
    return Table("FLOPs", ["", "FLOPs", "transfers"], rows, strong=frozenset({4}))
