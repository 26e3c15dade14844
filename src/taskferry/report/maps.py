"""A model as a map: one row a kind of layer, one column a block, a cell for what happened or was measured there."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from taskferry.families.base import split_path
from taskferry.report.parts import Number, Table, html

MARKS = {"moved": "●", "partly": "◐", "kept": "○"}
Place = tuple[str, str, int]  # stack, role, block


def place_of(name: str) -> Place | None:
    """Where a parameter or site stands, by its name; None outside of blocks."""
    stack, block, role = split_path(name)
    return None if block is None else (stack, role, block)


@dataclass(frozen=True)
class StatusMap:
    """What moved."""

    stack: str
    roles: Sequence[str]
    blocks: Sequence[int]
    status: Mapping[tuple[str, int], str]

    def html(self) -> str:
        """A table of marks; colour says nothing that the mark does not."""

        def cell(role: str, block: int) -> str:
            status = self.status.get((role, block))
            if status not in MARKS:
                return "<td></td>"
            return f'<td class="{status}"><span aria-hidden="true">{MARKS[status]}</span><i>{status}</i></td>'

        return _grid(f"{self.stack}, by block", self.roles, self.blocks, cell, "status")

    def markdown(self) -> str:
        """The same marks."""
        rows = [[role, *(MARKS.get(self.status.get((role, b), ""), "") for b in self.blocks)] for role in self.roles]
        return Table(f"{self.stack}, by block", ["", *map(str, self.blocks)], rows).markdown()


@dataclass(frozen=True)
class HeatMap:
    """A number for every layer; the darker, the larger."""

    caption: str
    roles: Sequence[str]
    blocks: Sequence[int]
    values: Mapping[tuple[str, int], float]
    show: Callable[[float], str]
    top: float | None = None  # the value of the darkest cell; the largest where none is given

    def html(self) -> str:
        """A table of numbers on a ground as dark as they are large."""
        finite = [v for v in self.values.values() if math.isfinite(v)]
        top = self.top or max(finite, default=1.0) or 1.0

        def cell(role: str, block: int) -> str:
            value = self.values.get((role, block))
            if value is None or not math.isfinite(value):
                return "<td></td>"
            share = max(0.0, min(1.0, value / top))
            return f'<td style="--v:{share:.3f}">{Number(value, self.show(value)).html()}</td>'

        return _grid(self.caption, self.roles, self.blocks, cell, "heat")

    def markdown(self) -> str:
        """The numbers."""
        rows = [
            [role, *(None if (role, b) not in self.values else self.show(self.values[role, b]) for b in self.blocks)]
            for role in self.roles
        ]
        return Table(self.caption, ["", *map(str, self.blocks)], rows).markdown()


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


def _grid(caption: str, roles: Sequence[str], blocks: Sequence[int], cell: Callable[[str, int], str], kind: str) -> str:
    head = "".join(f'<th scope="col">{block}</th>' for block in blocks)
    body = "".join(
        f'<tr><th scope="row">{html(role)}</th>{"".join(cell(role, block) for block in blocks)}</tr>' for role in roles
    )
    return (
        f'<div class="scroll" tabindex="0"><table class="grid {kind}"><caption>{html(caption)}</caption>'
        f'<thead><tr><th scope="col">block</th>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def legend() -> str:
    """What the marks mean, in words."""
    return f"{MARKS['moved']} moved, {MARKS['partly']} moved in part, {MARKS['kept']} kept as it was"
