"""Objects as notebooks show them: facts and a table, in the notebook's own colours. Everything is escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

ROWS = 12  # a table in a notebook is a glance, not a file


def panel(
    title: str,
    facts: Mapping[str, object],
    header: Sequence[str] = (),
    rows: Sequence[Sequence[object]] = (),
    more: int = 0,
) -> str:
    """HTML with a heading, `name: value` lines, and a table that ends with "… and `more` others"."""
    parts = [f"<div><strong>{_text(title)}</strong>"]
    if facts:
        lines = "".join(
            f"<tr><td style='text-align:left;opacity:.7'>{_text(name)}</td>"
            f"<td style='text-align:left'>{_text(v)}</td></tr>"
            for name, v in facts.items()
        )
        parts.append(f"<table>{lines}</table>")
    if rows:
        head = "".join(f"<th scope='col' style='text-align:left'>{_text(name)}</th>" for name in header)
        body = "".join(
            "<tr>" + "".join(f"<td style='text-align:left'>{_text(cell)}</td>" for cell in row) + "</tr>"
            for row in rows
        )
        parts.append(f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
    if more:
        parts.append(f"<small>… and {more} others</small>")
    return "".join([*parts, "</div>"])


def _text(value: object) -> str:
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))
