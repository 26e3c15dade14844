"""Numbers of quality against cost for the text of the findings, from what `frontier.py` found."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.quality import frontier_tables as frontier
from benchmarks.quality.ways import JUDGED, STANDARD


def frontier_numbers(cells: dict[str, Any]) -> dict[str, str]:
    """Shares of the zoo by number of samples, in how many cells, for the text of the findings."""
    ways = {"bico": "BiCo at scale 1", "standard": STANDARD, "thorough": "+ augmented views: effort thorough"}
    known = {key: cell for key, cell in cells.items() if isinstance(cell, dict)}
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
            found[f"f_{name}_{count}"] = f"{statistics.mean(one.share):.0%}"
            found[f"f_places_{count}"] = str(one.places)
            found[f"f_draws_{count}"] = "one draw" if len(one.share) == 1 else f"{len(one.share)} draws"
            found[f"f_{name}_least_{count}"] = signed(one.least)
    for count in (10, 20, 50, 100):
        every = worst_of(known, frontier.ZOO, count)
        found[f"f_worst_{count}"] = signed(min(one.least for one in every))
        found[f"f_worst_draws_{count}"] = str(min(one.cells // one.places for one in every))
    new = worst_of(known, frontier.NEW, 10)
    found["f_new_worst_10"] = signed(min(one.least for one in new))
    found["f_new_places_10"] = str(new[0].places)
    return found


def worst_of(cells: dict[str, Any], kind: str, count: int) -> list[frontier.Found]:
    """Of every effort, and of the default without labels."""
    some = frontier.in_table(cells, kind)
    return [found for way in JUDGED if (found := frontier.summed(some, way, count)) is not None]


def signed(points: float) -> str:
    return f"{points:+.1f}".replace("-", "−")


def steps_shares(cells: dict[str, Any]) -> dict[str, str]:
    """Of the table of steps, on the zoo with 100 samples."""
    known = {key: cell for key, cell in cells.items() if isinstance(cell, dict)}
    curves = {
        curve.line: curve for curve in frontier.refined(frontier.in_table(known, frontier.ZOO, frontier.MORE), 100)
    }
    moved, cold = curves["refined from the default"].points, curves["refined, no move"].points
    shares = {f"{name}_{n}": f"{statistics.mean(point.share):.0%}"
              for name, points in (("r", moved), ("c", cold)) for n, point in points.items()}  # fmt: skip
    return {**shares, "r_places": str(moved[100].places), "r_draws": f"{moved[100].cells / moved[100].places:.2g}"}
