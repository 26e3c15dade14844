"""A progress bar for the long functions of this room: `finetune(…, progress=True)`."""

from __future__ import annotations

from collections.abc import Callable

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

Tell = Callable[..., None]  # (done, total), and the loss where there is one


class Bar:
    """Called with (done, total, loss); starts with the first call and ends with the last."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __call__(self, done: int, total: int, loss: float | None = None) -> None:
        """Move the bar."""
        if self._progress is None or self._task is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[loss]}"),
            )
            self._progress = Progress(*columns)
            self._task = self._progress.add_task(self.title, total=total, loss="")
            self._progress.start()
        shown = "" if loss is None else f"loss {loss:.3f}"
        self._progress.update(self._task, completed=done, total=total, loss=shown)
        if done >= total:
            self._progress.stop()
            self._progress = self._task = None


def told(progress: Tell | bool | None, title: str) -> Tell | None:
    """What to call: nothing, what was given, or a bar for `True`."""
    if progress is True:
        return Bar(title)
    return None if isinstance(progress, bool) else progress
