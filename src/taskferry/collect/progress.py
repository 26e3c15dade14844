"""Steps of long work, counted for whoever shows them."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (what, done, total)


class Steps:
    """Counts steps for the progress callback."""

    def __init__(self, progress: Progress | None, what: str, total: int) -> None:
        self.progress, self.what, self.done, self.total = progress, what, 0, total

    def step(self, count: int = 1) -> None:
        """So many more are done."""
        self.done += count
        self.total = max(self.done, self.total)
        if self.progress is not None:
            self.progress(self.what, self.done, self.total)

    def end(self) -> None:
        """It took no more than has been done."""
        self.total = self.done
        self.step(0)
