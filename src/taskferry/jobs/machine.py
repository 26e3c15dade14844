"""How fast this machine is, in a few seconds: the measured half of the cost model.

>>> machine = Machine.of("cpu")
>>> machine.solve_seconds(tokens, d_A, d_B)
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from taskferry.linalg.procrustes import procrustes, procrustes_from_rows
from taskferry.linalg.subspace import is_wide
from taskferry.methods import Cost

SQUARE = (64, 256, 768, 1536)  # widths at which a map is solved; between and beyond, a power law through two of them
ROWS = (64, 256, 1024)  # tokens of the factored maps that are timed, between spaces twice as wide
QR = 4.0  # multiply-adds of a tall factor's QR, in units of tokens² · width


class Machine:
    """Seconds and rates of what a transfer is made of. Each is measured when it is first asked for, and kept:
    small models need no more than milliseconds of it.
    """

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self._known: dict[tuple[str, int], float] = {}

    @staticmethod
    @cache
    def of(device: str) -> Machine:
        """The same one for all plans of a process."""
        return Machine(device)

    @cached_property
    def product(self) -> float:
        """Multiply-adds a second of float32 matrix products with many rows."""
        A = self._random(1024, 1024)
        return 1024**3 / _seconds(lambda: A @ A)

    @cached_property
    def product64(self) -> float:
        """The same in float64."""
        A = self._random(768, 768).double()
        return 768**3 / _seconds(lambda: A @ A)

    @cached_property
    def hashing(self) -> float:
        """Bytes a second."""
        block = bytes(2**24)
        return len(block) / _seconds(lambda: hashlib.sha256(block).digest())

    def solve_seconds(self, tokens: int, d_A: int, d_B: int, directions: int = 0) -> float:
        """One map of so many tokens, by the solver that would be chosen."""
        n, m = min(d_A, d_B), max(d_A, d_B)
        if tokens * (d_A + d_B) <= d_A * d_B:
            wider = max(0, d_A + d_B - 4 * tokens) * tokens * tokens
            return self._power_law(ROWS, self._rows, tokens) + QR * wider / self.product64
        if is_wide(n, directions):
            found = 3 * d_A * d_B * directions / self.product + QR * directions**2 * m / self.product64
            return found + self._power_law(SQUARE, self._square, directions)
        wider = (m - n) * n * n  # the Gram matrix and V in float64, R in float32
        return self._power_law(SQUARE, self._square, n) + wider * (1.6 / self.product64 + 1.0 / self.product)

    def solving_seconds(self, cost: Cost, tokens: int, d_A: int, d_B: int) -> float:
        """One map by a method: rough ones on the way, then that of the rows of all captures."""
        rows = max(1, cost.captures) * tokens
        seconds = self.solve_seconds(rows, d_A, d_B, cost.directions)
        if cost.judged:
            left = rows * (cost.folds - 1) // cost.folds
            seconds += cost.judged * self.solve_seconds(left, d_A, d_B, cost.directions)
        return cost.rough * self.solve_seconds(tokens, d_A, d_B, cost.directions) + cost.solves * seconds

    def _power_law(self, sizes: Sequence[int], measure: Callable[[int], float], n: int) -> float:
        """Through the two measured sizes next to n, or the two largest; never steeper than a cube."""
        at = next((i for i, size in enumerate(sizes[1:]) if n <= size), len(sizes) - 2)
        n_1, n_2 = sizes[at : at + 2]
        t_1, t_2 = measure(n_1), measure(n_2)
        return t_2 * math.pow(n / n_2, min(3.0, max(1.5, math.log(t_2 / t_1) / math.log(n_2 / n_1))))

    def _square(self, n: int) -> float:
        return self._kept("square", n, lambda: partial(procrustes, self._random(2 * n, n).T @ self._random(2 * n, n)))

    def _rows(self, n: int) -> float:
        return self._kept(
            "rows", n, lambda: partial(procrustes_from_rows, self._random(n, 2 * n), self._random(n, 2 * n))
        )

    def _kept(self, kind: str, n: int, work: Callable[[], Callable[[], object]]) -> float:
        if (kind, n) not in self._known:
            self._known[kind, n] = _seconds(work(), 2)
        return self._known[kind, n]

    def _random(self, rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(self.device)


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of a few, after one to warm up."""
    work()
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best
