"""Numbers of quality against cost for the text of the findings, from what `frontier.py` found."""

from __future__ import annotations

from typing import Any

from benchmarks.quality import frontier_tables as frontier
from benchmarks.quality.ways import BESIDE, JUDGED, SCRATCH, STANDARD, STEPS
from benchmarks.shared import common

LINES = {
    "refined, no move": "from scratch (`--method cold`)",
    "refined from BiCo": "from `bico`",
    "refined from the default": "from the default",
    SCRATCH: "from scratch with the true labels alone (`--method cold --refine-labels 1`)",
}


def frontier_numbers(results: dict[str, Any]) -> dict[str, str]:
    """Shares of the zoo by number of samples, in how many cells, for the text of the findings."""
    ways = {"bico": "BiCo at scale 1", "standard": STANDARD, "thorough": "+ augmented views: effort thorough"}
    known = cells_of(results)
    zoo_cells = {
        key: cell
        for key, cell in frontier.in_table(known, frontier.ZOO).items()
        if set(ways.values()) <= set(cell["ways"])
    }
    found: dict[str, str] = {}
    for count in (10, 30, 100):
        for name, way in ways.items():
            one = frontier.summed(zoo_cells, way, count)
            if one is None:
                raise SystemExit(f"benchmarks/results/frontier.json has no '{way}' with {count} samples")
            found[f"f_{name}_{count}"] = f"{one.share:.0%}"
            found[f"f_places_{count}"] = str(one.places)
            found[f"f_draws_{count}"] = draws(one.cells // one.places)
            found[f"f_{name}_least_{count}"] = signed(one.least)
    for count in (10, 20, 50, 100):
        every = worst_of(known, frontier.ZOO, count)
        found[f"f_worst_{count}"] = signed(min(one.least for one in every))
        found[f"f_worst_draws_{count}"] = str(min(one.cells // one.places for one in every))
        found[f"f_single_{count}"] = signed(min(one.single for one in every))
    for name, way in {"shot_10": "few-shot, 10 steps", "shot_30": "few-shot, 30 steps",
                      "warm_10": "few-shot from BiCo, 10 steps"}.items():  # fmt: skip
        if (one := frontier.summed(frontier.in_table(known, frontier.ZOO), way, 100)) is not None:
            found[f"f_{name}"], found[f"f_{name}_cpu"] = f"{one.share:.0%}", f"{one.cpu:.0f}"
            found["f_shot_places"] = str(one.places)
    new = worst_of(known, frontier.NEW, 10)
    texts = frontier.in_table(known, frontier.TEXT)
    for name, way in {**ways, "auto": BESIDE, "teacher": "effort standard, no labels"}.items():
        if (one := frontier.summed(texts, way, 100)) is not None:
            found[f"f_text_{name}"] = f"{one.share:.0%}"
    found["f_new_worst_10"] = signed(min(one.least for one in new))
    found["f_new_places_10"] = str(new[0].places)
    found["f_new_draws_10"] = str(min(one.cells // one.places for one in new))
    return found


def worst_of(cells: dict[str, Any], kind: str, count: int) -> list[frontier.Found]:
    """Of every effort, and of the default without labels."""
    some = frontier.in_table(cells, kind)
    return [found for way in JUDGED if (found := frontier.summed(some, way, count)) is not None]


def draws(count: int) -> str:
    return "one draw" if count == 1 else f"{count} draws"


def some_draws(found: frontier.Found) -> str:
    """Of each pair and task: not all need have as many."""
    least, more = divmod(found.cells, found.places)
    if not more:
        return draws(least)
    return "one or two draws" if least == 1 else f"{least} or {least + 1} draws"


def signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


def steps_shares(results: dict[str, Any]) -> dict[str, str]:
    """Of training steps on the zoo, with 100 samples."""
    curves = frontier.zoo_curves(cells_of(results))
    moved, cold = curves["refined from the default"].points, curves["refined, no move"].points
    shares = {f"{name}_{n}": f"{point.share:.0%}"
              for name, points in (("r", moved), ("c", cold)) for n, point in points.items()}  # fmt: skip
    last = moved[100]
    return {**shares, "r_places": str(last.places), "r_draws": some_draws(last)}


def steps_table(results: dict[str, Any]) -> str:
    """The same for the page on refining, with CPU-seconds, and how many cells each row has."""
    curves = frontier.refined(frontier.in_table(cells_of(results), frontier.ZOO, frontier.MORE), 100)
    steps = [n for n in (0, *STEPS) if any(n in curve.points for curve in curves)]
    rows = [
        [LINES[c.line], *(c.shown().get(n, "") for n in steps), str(c.last.places), str(c.last.cells)] for c in curves
    ]
    return common.table(["", *(f"{n} steps" for n in steps), "pairs with a task", "cells"], rows)


def cells_of(results: dict[str, Any]) -> dict[str, Any]:
    """What a file of results holds beside its seconds."""
    return {key: cell for key, cell in results.items() if isinstance(cell, dict)}
