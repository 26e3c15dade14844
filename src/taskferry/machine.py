"""How fast this machine is, in a few seconds: the measured half of the cost model.

>>> machine = Machine.measure()
>>> machine.solve_seconds(tokens, d_A, d_B)
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from taskferry.procrustes import procrustes, procrustes_from_rows

SQUARE = (256, 768, 1536)  # widths at which a map is solved; between and beyond, a power law through two of them
ROWS = (256, 1024)  # tokens of the factored maps that are timed, between spaces twice as wide
QR = 4.0  # multiply-adds of a tall factor's QR, in units of tokens² · width


@dataclass(frozen=True)
class Machine:
    """Seconds and rates of what a transfer is made of."""

    product: float  # multiply-adds a second of float32 matrix products with many rows
    product64: float
    square: tuple[float, ...]  # seconds to solve a square map of each width of SQUARE
    rows: tuple[float, ...]  # seconds of a factored map of each number of ROWS
    hashing: float  # bytes a second

    @classmethod
    @lru_cache
    def measure(cls, device: str = "cpu") -> Machine:
        """A few seconds of small problems."""
        generator = torch.Generator().manual_seed(0)

        def random(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=dtype).to(device)

        A, A64 = random(1024, 1024), random(768, 768, torch.float64)
        procrustes(random(64, 64))  # wakes the libraries
        covariances = [random(2 * n, n).T @ random(2 * n, n) for n in SQUARE]
        square = tuple(_seconds(partial(procrustes, C), 2) for C in covariances)
        few = [random(n, 2 * n) for n in ROWS]
        block = bytes(2**24)
        return cls(
            product=1024**3 / _seconds(lambda: A @ A),
            product64=768**3 / _seconds(lambda: A64 @ A64),
            square=square,
            rows=tuple(_seconds(partial(procrustes_from_rows, X, X), 2) for X in few),
            hashing=len(block) / _seconds(lambda: hashlib.sha256(block).digest()),
        )

    def solve_seconds(self, tokens: int, d_A: int, d_B: int) -> float:
        """One map of so many tokens, by the solver that would be chosen."""
        n, m = min(d_A, d_B), max(d_A, d_B)
        if tokens * (d_A + d_B) <= d_A * d_B:
            wider = max(0, d_A + d_B - 4 * tokens) * tokens * tokens
            return _power_law(ROWS, self.rows, tokens) + QR * wider / self.product64
        wider = (m - n) * n * n  # the Gram matrix and V in float64, R in float32
        at = 0 if n < SQUARE[1] else 1
        square = _power_law(SQUARE[at : at + 2], self.square[at : at + 2], n)
        return square + wider * (1.6 / self.product64 + 1.0 / self.product)


def _power_law(sizes: Sequence[int], seconds: Sequence[float], n: int) -> float:
    """Through two measured sizes, never steeper than a cube."""
    (n_1, n_2), (t_1, t_2) = sizes, seconds
    return t_2 * math.pow(n / n_2, min(3.0, max(1.5, math.log(t_2 / t_1) / math.log(n_2 / n_1))))


def _seconds(work: Callable[[], object], repeats: int = 3) -> float:
    """The fastest of a few, after one to warm up."""
    work()
    best = math.inf
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best
