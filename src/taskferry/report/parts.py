"""The parts of a report, each as HTML and as Markdown. All text comes from files, so all of it is escaped here.

>>> Section("Cost", [Facts({"time": "3 s"})]).html()
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from taskferry.display.html import escape, plain, table, tag


@dataclass(frozen=True)
class Number:
    """A number as people read it, with the value of the file behind it."""

    value: float
    shown: str
    share: float | None = None  # how dark its ground is in a heat map

    def html(self) -> str:
        """The page keeps the exact value."""
        return tag("data", escape(self.shown), value=repr(self.value))


@dataclass(frozen=True)
class Mark:
    """A sign and a colour for a word; the colour says nothing that the sign does not."""

    shown: str
    word: str

    def html(self) -> str:
        """Whoever cannot see the sign is told the word."""
        return tag("span", self.shown, aria_hidden="true") + tag("i", self.word)


Cell = str | Number | Mark | None


class Part(Protocol):
    """Something that a report shows."""

    def html(self) -> str:
        """For the page."""

    def markdown(self) -> str:
        """For a text file."""


def html(cell: Cell) -> str:
    """A cell of a table, escaped."""
    return "" if cell is None else cell.html() if isinstance(cell, Number | Mark) else escape(cell)


def markdown(cell: Cell) -> str:
    """A cell of a Markdown table: one line, nothing in it is markup."""
    text = "" if cell is None else cell.shown if isinstance(cell, Number | Mark) else plain(cell)
    return re.sub(r"([\\`*_\[\]<>|#&$])", r"\\\1", text.replace("\n", " "))


def fenced(text: str) -> str:
    """A Markdown block of code, whatever marks the text has."""
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
    return f"{fence}\n{plain(text)}\n{fence}"


def _cell(cell: Cell, kind: str) -> str:
    share = cell.share if isinstance(cell, Number) else None
    style = "" if share is None else f"--v:{share:.3f}"
    return tag("td", html(cell), class_=cell.word if isinstance(cell, Mark) else kind, style=style)


def _breakable(escaped: str) -> str:
    """A long name may be broken after its dots; no entity has one."""
    return re.sub(r"([._/])(?=[^<>]*(?:<|$))", r"\1<wbr>", escaped)


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    kind: str = ""  # "lead", "note" or "warning"

    def html(self) -> str:
        """A paragraph."""
        return tag("p", escape(self.text), class_=self.kind)

    def markdown(self) -> str:
        """A paragraph."""
        return markdown(self.text)


@dataclass(frozen=True)
class Tiles:
    """A few numbers that matter most."""

    tiles: Sequence[tuple[str, Cell, str]]  # what it is, the number, a word on it

    def html(self) -> str:
        """A row of boxes that wraps."""
        boxes = (
            tag("div", tag("dt", escape(name)), tag("dd", html(value), tag("small", escape(note))))
            for name, value, note in self.tiles
        )
        return tag("dl", *boxes, class_="tiles")

    def markdown(self) -> str:
        """A list."""
        return "\n".join(f"- {markdown(n)}: **{markdown(v)}** {markdown(note)}".rstrip() for n, v, note in self.tiles)


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    facts: Mapping[str, Cell]

    def html(self) -> str:
        """A list of definitions."""
        rows = (tag("dt", escape(name)) + tag("dd", html(value)) for name, value in self.facts.items())
        return tag("dl", *rows, class_="facts")

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
    kind: str = ""  # "grid heat" or "grid status"

    def html(self) -> str:
        """A table that scrolls in its own box where it is too wide."""
        kinds = ["" if i < self.words else "n" for i in range(len(self.header))]
        head = [tag("th", escape(name), scope="col", class_=c) for name, c in zip(self.header, kinds, strict=True)]
        rows = (
            [tag("th", _breakable(html(first)), scope="row")]
            + [_cell(cell, kind) for cell, kind in zip(rest, kinds[1:], strict=True)]
            for first, *rest in self.rows
        )
        return tag("div", table(rows, head, self.caption, self.kind, self.strong), class_="scroll", tabindex=0)

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
        return tag("pre", tag("code", escape(self.text)), tabindex=0)

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
        drawing = tag("div", self.draw(), role="img", aria_label=self.alt)
        fold = "" if self.numbers is None else Fold("The numbers", self.numbers).html()
        return tag("figure", drawing, tag("figcaption", escape(self.caption)), fold)

    def markdown(self) -> str:
        """What it shows, and the numbers."""
        words = f"{markdown(self.caption)}\n\n{markdown(self.alt)}"
        return words if self.numbers is None else f"{words}\n\n{self.numbers.markdown()}"


@dataclass(frozen=True)
class Row:
    """Figures beside each other where there is room."""

    parts: Sequence[Part]
    kind: ClassVar[str] = "row"

    def html(self) -> str:
        """One box."""
        return tag("div", *(part.html() for part in self.parts), class_=self.kind)

    def markdown(self) -> str:
        """One after the other."""
        return "\n\n".join(part.markdown() for part in self.parts)


class Stack(Row):
    """Parts below each other, in one place of a row."""

    kind = ""


@dataclass(frozen=True)
class Fold:
    """What few readers need."""

    title: str
    part: Part

    def html(self) -> str:
        """Shown when asked for."""
        return tag("details", tag("summary", escape(self.title)), self.part.html())

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
        return tag("section", tag("h2", escape(self.title)), *(part.html() for part in self.parts))

    def markdown(self) -> str:
        """A section."""
        return f"## {markdown(self.title)}\n\n" + "\n\n".join(part.markdown() for part in self.parts)


@dataclass(frozen=True)
class Report:
    """A whole page."""

    kind: str  # "transfer"
    title: str
    lead: str
    sections: Sequence[Section]
    foot: str = ""
    badge: str = ""  # the verdict in two words
    colour: str = ""  # of the badge: "good", "open" or "bad"

    def markdown(self) -> str:
        """The page as a text file."""
        parts = [f"# {markdown(self.title)}", markdown(self.lead), *(section.markdown() for section in self.sections)]
        return "\n\n".join([*parts, markdown(self.foot)]) + "\n"
