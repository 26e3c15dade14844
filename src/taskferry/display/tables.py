"""Objects as notebooks show them: facts and a table, in the notebook's own colours. Everything is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taskferry.display.html import escape, table, tag

ROWS = 12  # a table in a notebook is a glance, not a file
_LEFT = "text-align:left"  # notebooks would turn cells to the right


def panel(
    title: str,
    facts: Mapping[str, object],
    header: Sequence[str] = (),
    rows: Sequence[Sequence[object]] = (),
    more: int = 0,
) -> str:
    """HTML with a heading, `name: value` lines, and a table that ends with "… and `more` others"."""
    parts = [tag("strong", escape(title))]
    if facts:
        parts.append(table([_cell(name, ";opacity:.7"), _cell(value)] for name, value in facts.items()))
    if rows:
        head = [tag("th", escape(name), scope="col", style=_LEFT) for name in header]
        parts.append(table(([_cell(value) for value in row] for row in rows), head))
    if more:
        parts.append(tag("small", f"… and {more} others"))
    return tag("div", *parts)


def _cell(value: object, style: str = "") -> str:
    return tag("td", escape(f"{value:.4g}" if isinstance(value, float) else value), style=_LEFT + style)
