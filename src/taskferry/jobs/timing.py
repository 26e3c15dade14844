"""How long each stage of a job takes, and the memory at its peak: a reporter that passes everything on.

>>> timing = Timing(reporter)
>>> transfer(..., reporter=timing)
>>> timing.work()                       # {"seconds": {"prepare": …, "capture": …}, "peak_bytes": …}
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from taskferry.jobs.record import Reporter


class Timing(Reporter):
    """The time between two steps belongs to the stage of the second."""

    def __init__(self, inner: Reporter) -> None:
        self.inner = inner
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def plan(self, lines: Mapping[str, str]) -> None:
        """What comes before the work: models loaded, samples prepared."""
        self.ends("prepare")
        self.inner.plan(lines)

    def step(self, what: str, done: int, total: int) -> None:
        """A step of a stage."""
        self.ends(what)
        self.inner.step(what, done, total)

    def note(self, what: str) -> None:
        """Pass it on."""
        self.inner.note(what)

    def warning(self, what: str) -> None:
        """Pass it on."""
        self.inner.warning(what)

    def ends(self, what: str) -> None:
        """All time since the last step was spent on this."""
        now = time.perf_counter()
        self.seconds[what] = self.seconds.get(what, 0.0) + now - self._last
        self._last = now

    def work(self) -> dict[str, Any]:
        """Seconds by stage, and the most memory that the process has held so far (0 where the system does not say)."""
        return {"seconds": {what: round(t, 3) for what, t in self.seconds.items()}, "peak_bytes": peak()}


def peak() -> int:
    """The most bytes that this process has held so far (0 where the system does not say)."""
    try:
        import resource
    except ImportError:  # no such thing on Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
