"""Progress bars, in a terminal or a notebook: `fit(…, progress=True)`, `finetune(…, progress=True)`.

>>> with Bars() as tell:
...     tell("capture", 3, 10)
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from functools import wraps
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

from rich.console import Console
from rich.markup import escape as escaped
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from taskferry.display.html import escape, table, tag

Tell = Callable[..., None]  # (done, total), and the loss where there is one

STEPS = {
    "capture": "forward and backward",
    "solve": "maps",
    "scale": "scale",
    "check": "checking the output",
    "forward": "forward",
    "blocks": "blocks moved",
}
_EVERY = 0.1  # seconds between two drawings in a notebook, which go over a network


class Bars:
    """Called with (what, done, total, note); one bar for each `what`. Bars end with the `with` block."""

    def __init__(self, titles: Mapping[str, str] = STEPS, console: Console | None = None) -> None:
        console = console or Console()
        self.titles = titles
        self._drawn = _Notebook() if console.is_jupyter else _Terminal(console)

    def __enter__(self) -> Bars:
        self._drawn.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._drawn.stop()

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Move a bar."""
        name, comma, stage = what.partition(", ")  # a stage of a method: "capture, halfway"
        self._drawn.note("")
        self._drawn.draw(f"{self.titles.get(name, name)}{comma}{stage}", done, total, note)

    def note(self, what: str) -> None:
        """What takes a while and has no steps; shown until the next note or step."""
        self._drawn.note(what)


P = ParamSpec("P")
R = TypeVar("R")


def with_bars(function: Callable[P, R]) -> Callable[P, R]:
    """Bars while a function runs that is given `progress=True` and tells (what, done, total)."""

    @wraps(function)
    def run(*arguments: P.args, **settings: P.kwargs) -> R:
        if settings.get("progress") is not True:
            return function(*arguments, **settings)
        with Bars() as tell:
            settings["progress"] = tell
            return function(*arguments, **settings)

    return run


class _Terminal:
    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description:>22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self.progress = Progress(*columns, console=console)
        self.tasks: dict[str, TaskID] = {}

        self.waiting: TaskID | None = None

    def start(self) -> None:
        self.progress.start()

    def note(self, what: str) -> None:
        if self.waiting is not None:
            self.progress.remove_task(self.waiting)
        self.waiting = self.progress.add_task(escaped(what), total=None, note="") if what else None

    def stop(self) -> None:
        self.note("")
        self.progress.stop()

    def draw(self, title: str, done: int, total: int, note: str) -> None:
        if title not in self.tasks:
            self.tasks[title] = self.progress.add_task(title, total=total, note=note)
        self.progress.update(self.tasks[title], completed=done, total=total, note=note)


class _Notebook:
    """One HTML output that is drawn anew; needs no widgets, and stays as it ended when the notebook is saved."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}
        self.started: dict[str, float] = {}
        self.handle: Any = None
        self.last = 0.0

    def start(self) -> None:
        self.last = 0.0

    def stop(self) -> None:
        self._show()

    def note(self, what: str) -> None:
        """Cells of a notebook show that they run."""

    def draw(self, title: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        seconds = now - self.started.setdefault(title, now)
        self.lines[title] = [
            tag("td", escape(title), style="text-align:right"),
            tag("td", tag("progress", value=done, max=total, aria_label=title)),
            *(tag("td", escape(text)) for text in (f"{done}/{total}", f"{seconds:.0f} s", note)),
        ]
        if now - self.last >= _EVERY or done >= total:
            self.last = now
            self._show()

    def _show(self) -> None:
        if not self.lines:
            return
        ipython: Any = importlib.import_module("IPython.display")  # there, where a notebook runs
        drawn = ipython.HTML(table(self.lines.values()))
        if self.handle is None:
            self.handle = ipython.display(drawn, display_id=True)
        else:
            self.handle.update(drawn)


class Bar:
    """One bar, called with (done, total, loss); starts with the first call and ends with the last."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._bars: Bars | None = None

    def __call__(self, done: int, total: int, loss: float | None = None) -> None:
        """Move the bar."""
        if self._bars is None:
            self._bars = Bars().__enter__()
        self._bars(self.title, done, total, "" if loss is None else f"loss {loss:.3f}")
        if done >= total:
            self._bars.__exit__(None, None, None)
            self._bars = None


def told(progress: Tell | bool | None, title: str) -> Tell | None:
    """What to call: nothing, what was given, or a bar for `True`."""
    if progress is True:
        return Bar(title)
    return None if isinstance(progress, bool) else progress
