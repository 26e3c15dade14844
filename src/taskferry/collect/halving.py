"""Out of memory is an answer: a micro-batch that does not fit on a device is run again in halves.

    >>> halving = Halving()
    >>> losses = halving.run(lambda part: loss(part), batch)          # one of each part, in order

The result stays: losses and sums are sums over samples. What fitted once is remembered for the micro-batches after it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch

from taskferry.data.batch import Batch
from taskferry.errors import TaskferryError, TaskferryWarning

T = TypeVar("T")
NO_ROOM = (
    "a single sample does not fit into the memory of the device beside what lies there: give --dtype bfloat16, put the "
    "models on two devices with --source-device and --target-device, or transfer with --engine blockwise, which needs "
    "one block of each model at a time"
)
TOO_MANY = (
    "a micro-batch of {} pairs does not fit into the memory of the device, and fewer would be other candidates: give a "
    "smaller --micro-batch"
)


class Halving:
    """Runs work on micro-batches, in parts where they do not fit."""

    def __init__(self, cut: bool = True) -> None:
        """`cut`: whether a micro-batch may be cut; not where other processes wait for its passes."""
        self.cut = cut
        self.most: int | None = None  # samples that fit, once that is known
        self.rows = range(0)  # of the micro-batch, that are worked on

    def within(self, rows: range) -> bool:
        """Whether what is worked on is a part of these."""
        return rows.start <= self.rows.start and self.rows.stop <= rows.stop

    def run(self, work: Callable[..., T], *batches: Batch, start: int = 0) -> list[T]:
        """The work on these samples (of each model), or on their parts one after the other."""
        size = len(batches[0])
        if self.most is not None and size > self.most:
            return self._halves(work, batches, start)
        self.rows = range(start, start + size)
        try:
            return [work(*batches)]
        except torch.OutOfMemoryError as error:
            if not self.cut:
                raise
            if batches[0].texts > 1:
                raise TaskferryError(TOO_MANY.format(size)) from error
            if size == 1:
                raise TaskferryError(NO_ROOM) from error
        # Behind the handler: an error holds the frames that it came through, and they all their tensors.
        self.most = (size + 1) // 2
        release()
        warnings.warn(
            f"out of memory with {size} samples at once: going on with {self.most}, which changes the time alone; "
            f"--micro-batch {self.most} takes so many from the start",
            TaskferryWarning,
            stacklevel=2,
        )
        return self._halves(work, batches, start)

    def each(self, work: Callable[[Batch], T], batches: Iterable[Batch]) -> list[T]:
        """The work on one model's micro-batches, of each part in order."""
        return [part for batch in batches for part in self.run(work, batch)]

    def _halves(self, work: Callable[..., T], batches: tuple[Batch, ...], start: int) -> list[T]:
        size = len(batches[0])
        middle = (size + 1) // 2
        found: list[T] = []
        for part in (range(middle), range(middle, size)):
            found += self.run(work, *(batch.take(part) for batch in batches), start=start + part.start)
        return found


def release() -> None:
    """Give unused memory of the devices back to them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
