"""The parts of a report, each as HTML and as Markdown. All text comes from files, so all of it is escaped here.

>>> Section("Cost", [Facts({"time": "3 s"})]).html()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol


@dataclass(frozen=True)
class Number:
    """A number as people read it, with the value of the file behind it."""

    value: float
    shown: str

    def html(self) -> str:
        """The page keeps the exact value."""
        return f'<data value="{escape(repr(self.value))}">{escape(self.shown)}</data>'


Cell = str | Number | None


class Part(Protocol):
    """Something that a report shows."""

    def html(self) -> str:
        """For the page."""

    def markdown(self) -> str:
        """For a text file."""


def plain(text: object) -> str:
    """Text from a file as text: no control characters, no marks that turn the direction of writing."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def html(cell: Cell) -> str:
    """A cell of a table, escaped."""
    if cell is None:
        return ""
    return cell.html() if isinstance(cell, Number) else escape(plain(cell))


def markdown(cell: Cell) -> str:
    """A cell of a Markdown table: one line, nothing in it is markup."""
    text = "" if cell is None else cell.shown if isinstance(cell, Number) else plain(cell)
    return re.sub(r"([\\`*_\[\]<>|#&$])", r"\\\1", text.replace("\n", " "))


def fenced(text: str) -> str:
    """A Markdown block of code, whatever marks the text has."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{plain(text)}\n{fence}"


def _breakable(escaped: str) -> str:
    """A long name may be broken after its dots; no entity has one."""
    return re.sub(r"([._/])(?=[^<>]*(?:<|$))", r"\1<wbr>", escaped)


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = ""  # "lead" or "note"

    def html(self) -> str:
        """A paragraph."""
        return f'<p class="{escape(self.kind)}">{html(self.text)}</p>' if self.kind else f"<p>{html(self.text)}</p>"

    def markdown(self) -> str:
        """A paragraph."""
        return markdown(self.text)


@dataclass(frozen=True)
class Tiles:
    """A few numbers that matter most."""

    tiles: Sequence[tuple[str, Cell, str]]  # what it is, the number, a word on it

    def html(self) -> str:
        """A row of boxes that wraps."""
        boxes = "".join(
            f"<div><dt>{html(name)}</dt><dd>{html(value)}<small>{html(note)}</small></dd></div>"
            for name, value, note in self.tiles
        )
        return f'<dl class="tiles">{boxes}</dl>'

    def markdown(self) -> str:
        """A list."""
        return "\n".join(f"- {markdown(n)}: **{markdown(v)}** {markdown(note)}".rstrip() for n, v, note in self.tiles)


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    facts: Mapping[str, Cell]

    def html(self) -> str:
        """A list of definitions."""
        rows = "".join(f"<dt>{html(name)}</dt><dd>{html(value)}</dd>" for name, value in self.facts.items())
        return f'<dl class="facts">{rows}</dl>'

    def markdown(self) -> str:
        """A list."""
        return "\n".join(f"- {markdown(name)}: {markdown(value)}" for name, value in self.facts.items())


@dataclass(frozen=True)
class Table:
    """A table; every column but the first `words` holds numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: int = 1
    strong: frozenset[int] = frozenset()  # rows that matter

    def html(self) -> str:
        """A table that scrolls in its own box where it is too wide."""
        classes = ["" if i < self.words else ' class="n"' for i in range(len(self.header))]
        head = "".join(f'<th scope="col"{c}>{html(name)}</th>' for name, c in zip(self.header, classes, strict=True))
        body = ""
        for number, row in enumerate(self.rows):
            first, *rest = row
            cells = "".join(f"<td{c}>{html(cell)}</td>" for cell, c in zip(rest, classes[1:], strict=True))
            mark = ' class="strong"' if number in self.strong else ""
            body += f'<tr{mark}><th scope="row">{_breakable(html(first))}</th>{cells}</tr>'
        caption = f"<caption>{html(self.caption)}</caption>"
        return (
            f'<div class="scroll" tabindex="0"><table>{caption}<thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )

    def markdown(self) -> str:
        """A table."""
        lines = ["| " + " | ".join(markdown(name) for name in self.header) + " |", "|" + "---|" * len(self.header)]
        lines += ["| " + " | ".join(markdown(cell) for cell in row) + " |" for row in self.rows]
        return f"{markdown(self.caption)}\n\n" + "\n".join(lines)


@dataclass(frozen=True)
class Code:
    """A command."""

    text: str

    def html(self) -> str:
        """Wrapped, and read from left to right whatever it holds."""
        return f'<pre tabindex="0"><code>{html(self.text)}</code></pre>'

    def markdown(self) -> str:
        """A block of code."""
        return fenced(self.text)


@dataclass(frozen=True)
class Figure:
    """A drawing with what it shows in words; in Markdown its numbers stand in its place."""

    draw: Callable[[], str]  # makes the SVG (figures.py), which is asked for only where it is shown
    caption: str
    alt: str
    numbers: Table | None = None

    def html(self) -> str:
        """The drawing, and its numbers behind a fold."""
        drawing = f'<div role="img" aria-label="{escape(plain(self.alt))}">{self.draw()}</div>'
        fold = ""
        if self.numbers is not None:
            fold = f"<details><summary>The numbers</summary>{self.numbers.html()}</details>"
        return f"<figure>{drawing}<figcaption>{html(self.caption)}</figcaption>{fold}</figure>"

    def markdown(self) -> str:
        """What it shows, and the numbers."""
        words = f"{markdown(self.caption)}\n\n{markdown(self.alt)}"
        return words if self.numbers is None else f"{words}\n\n{self.numbers.markdown()}"


@dataclass(frozen=True)
class Row:
    """Figures beside each other where there is room."""

    parts: Sequence[Part]

    def html(self) -> str:
        """A grid."""
        return f'<div class="row">{"".join(part.html() for part in self.parts)}</div>'

    def markdown(self) -> str:
        """One after the other."""
        return "\n\n".join(part.markdown() for part in self.parts)


@dataclass(frozen=True)
class Stack:
    """Parts below each other, in one place of a row."""

    parts: Sequence[Part]

    def html(self) -> str:
        """One box."""
        return f"<div>{''.join(part.html() for part in self.parts)}</div>"

    def markdown(self) -> str:
        """One after the other."""
        return "\n\n".join(part.markdown() for part in self.parts)


@dataclass(frozen=True)
class Fold:
    """What few readers need."""

    title: str
    part: Part

    def html(self) -> str:
        """Shown when asked for."""
        return f"<details><summary>{html(self.title)}</summary>{self.part.html()}</details>"

    def markdown(self) -> str:
        """Shown."""
        return f"{markdown(self.title)}\n\n{self.part.markdown()}"


@dataclass(frozen=True)
class Section:
    """A heading with what follows it."""

    title: str
    parts: Sequence[Part]

    def html(self) -> str:
        """A section."""
        return f"<section><h2>{html(self.title)}</h2>{''.join(part.html() for part in self.parts)}</section>"

    def markdown(self) -> str:
        """A section."""
        return f"## {markdown(self.title)}\n\n" + "\n\n".join(part.markdown() for part in self.parts)


@dataclass(frozen=True)
class Report:
    """A whole page."""

    kind: str  # "transfer", "analysis", "benchmark"
    title: str
    lead: str
    sections: Sequence[Section]
    foot: str = ""
    badge: str = ""  # the verdict in two words
    good: bool | None = None  # and its colour

    def markdown(self) -> str:
        """The page as a text file."""
        parts = [f"# {markdown(self.title)}", markdown(self.lead), *(section.markdown() for section in self.sections)]
        return "\n\n".join([*parts, markdown(self.foot)]) + "\n"
