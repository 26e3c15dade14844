"""HTML for notebooks and pages. Text comes from files, so it goes through `escape`; attributes are escaped by `tag`.

>>> tag("td", escape(name), class_="n")
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from html import escape as _escape


def plain(text: object) -> str:
    """Text from a file as text: no control characters, no marks that turn the direction of writing."""
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in str(text))


def escape(text: object) -> str:
    """Text from a file as HTML."""
    return _escape(plain(text))


def tag(name: str, *inside: str, **attributes: object) -> str:
    """An element around HTML; `class_` and `aria_label` are spelled as HTML spells them, empty attributes left out."""
    given = [f'{key.rstrip("_").replace("_", "-")}="{escape(v)}"' for key, v in attributes.items() if v != ""]
    return f"<{' '.join([name, *given])}>{''.join(inside)}</{name}>"


def table(
    rows: Iterable[list[str]], head: Sequence[str] = (), caption: str = "", kind: str = "", strong: Container[int] = ()
) -> str:
    """A table of cells that `tag` has made; `strong` rows matter."""
    body = [tag("tr", *row, class_="strong" if number in strong else "") for number, row in enumerate(rows)]
    if head:
        body = [tag("thead", tag("tr", *head)), tag("tbody", *body)]
    return tag("table", tag("caption", escape(caption)) if caption else "", *body, class_=kind)
