"""Progress bars: `fit(…, progress=True)`, `finetune(…, progress=True)`, and the command.

>>> with Bars() as tell:
...     tell("capture", 3, 10)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import ParamSpec, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Tell = Callable[..., None]  # (done, total), and the loss where there is one

TITLES = {"capture": "forward and backward", "solve": "maps", "scale": "scale", "forward": "forward",
          "blocks": "blocks moved", "natural": "natural-gradient steps", "distil": "training steps",
          "generate": "writing samples", "answers": "answering prompts"}  # fmt: skip


class Bars:
    """Called with (what, done, total, note); one bar for each `what`. Bars end with the `with` block."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (
            TextColumn("{task.description:>22}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._progress = Progress(*columns, console=console or Console())
        self._tasks: dict[str, TaskID] = {}
        self._waiting: TaskID | None = None

    def __enter__(self) -> Bars:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.note("")
        self._progress.stop()

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Move a bar."""
        self.note("")
        if what not in self._tasks:
            self._tasks[what] = self._progress.add_task(escape(TITLES.get(what, what)), total=total, note=note)
        self._progress.update(self._tasks[what], completed=done, total=total, note=note)

    def note(self, what: str) -> None:
        """Show what takes a while and has no steps, until the next note or step."""
        if self._waiting in self._progress.task_ids:  # an interrupt may come between
            self._progress.remove_task(self._waiting)
        self._waiting = self._progress.add_task(escape(what), total=None, note="") if what else None


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
