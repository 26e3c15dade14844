"""What every verb needs of a terminal, without torch: plain text, JSON, and a line to see while the rest loads."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape


def plain(text: object) -> str:
    """Text from files and models as text: no markup, no control characters."""
    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in str(text)))


def warn(console: Console, lines: Iterable[str]) -> None:
    """Print what nobody should overlook, a line each."""
    for text in lines:
        console.print(f"[bold yellow]warning[/]  {plain(text)}")


def print_json(data: Any) -> None:
    """Plain JSON on standard output."""
    from taskferry.disk.files import as_json

    print(as_json(data))


def command_line() -> str:
    """The command as it was typed."""
    return shlex.join(["taskferry", *sys.argv[1:]])


@contextmanager
def waiting(silent: bool = False, what: str = "starting: importing torch") -> Iterator[Callable[[], None]]:
    """A line on the terminal while inside, or until what it gives is called; nothing in a pipe."""
    console = Console(stderr=True)
    if silent or not console.is_terminal:
        yield lambda: None
        return
    with console.status(f"[dim]{escape(what)}[/]") as status:
        yield status.stop
