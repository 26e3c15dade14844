"""A model as a map: one row a kind of layer, one column a block, a cell for what happened or was measured there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from taskferry.layers.family import split_path
from taskferry.report.parts import Cell, Mark, Number, Table

MARKS = {"moved": "●", "partly": "◐", "kept": "○"}
Place = tuple[str, str, int]  # stack, role, block
Roles = Sequence[str]
Blocks = Sequence[int]


def place_of(name: str) -> Place | None:
    """Where a parameter or site stands, by its name; None outside of blocks."""
    stack, block, role = split_path(name)
    return None if block is None else (stack, role, block)


def status_map(stack: str, roles: Roles, blocks: Blocks, status: Mapping[tuple[str, int], str]) -> Table:
    """What moved: a table of marks."""
    marks = {place: Mark(MARKS[what], what) for place, what in status.items() if what in MARKS}
    return _grid(f"{stack}, by block", roles, blocks, marks, "status")


def heat_map(
    caption: str,
    roles: Roles,
    blocks: Blocks,
    values: Mapping[tuple[str, int], float],
    show: Callable[[float], str],
    top: float | None = None,
) -> Table:
    """A number for every layer; the darker, the larger. `top` is the darkest, or the largest of them."""
    finite = {place: value for place, value in values.items() if math.isfinite(value)}
    top = top or max(finite.values(), default=1.0) or 1.0
    cells = {place: Number(v, show(v), max(0.0, min(1.0, v / top))) for place, v in finite.items()}
    return _grid(caption, roles, blocks, cells, "heat")


def _grid(caption: str, roles: Roles, blocks: Blocks, cells: Mapping[tuple[str, int], Cell], kind: str) -> Table:
    rows = [[role, *(cells.get((role, block)) for block in blocks)] for role in roles]
    return Table(caption, ["block", *map(str, blocks)], rows, words=len(blocks) + 1, kind=f"grid {kind}")


def stacks(names: Iterable[str]) -> dict[str, tuple[list[str], list[int]]]:
    """The roles and blocks of each stack, in the order of the names."""
    found: dict[str, tuple[dict[str, None], set[int]]] = {}
    for name in names:
        place = place_of(name)
        if place is not None:
            roles, blocks = found.setdefault(place[0], ({}, set()))
            roles[place[1]] = None
            blocks.add(place[2])
    return {stack: (list(roles), sorted(blocks)) for stack, (roles, blocks) in found.items()}


def legend() -> str:
    """What the marks mean, in words."""
    return f"{MARKS['moved']} moved, {MARKS['partly']} moved in part, {MARKS['kept']} kept as it was"
