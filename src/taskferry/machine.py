"""How fast this machine is, in a second or two: the measured half of the cost model.

>>> machine = Machine.measure()
>>> machine.solve_seconds(tokens, d_A, d_B)
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from taskferry.procrustes import procrustes, procrustes_from_rows

SQUARE = (256, 768, 1536)  # widths at which a map is solved; between and beyond, a power law through two of them
ROWS = 256  # tokens of the factored maps that are timed


@dataclass(frozen=True)
class Machine:
    """Seconds and rates of what a transfer is made of."""

    product: float  # multiply-adds a second of float32 matrix products with many rows
    product64: float
    square: tuple[float, ...]  # seconds to solve a square map of each width of SQUARE
    rows: tuple[float, float]  # seconds of a factored map of ROWS tokens: (always, for each unit of d_A + d_B)
    hashing: float  # bytes a second

    @classmethod
    @lru_cache
    def measure(cls, device: str = "cpu") -> Machine:
        """Two seconds of small problems."""
        generator = torch.Generator().manual_seed(0)

        def random(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.randn(rows, columns, generator=generator, dtype=dtype).to(device)

        A, A64 = random(1024, 1024), random(768, 768, torch.float64)
        procrustes(random(64, 64))  # wakes the libraries
        covariances = [random(2 * n, n).T @ random(2 * n, n) for n in SQUARE]
        square = tuple(_seconds(partial(procrustes, C), 2) for C in covariances)
        thin = [_seconds(partial(procrustes_from_rows, X, X)) for X in (random(ROWS, 512), random(ROWS, 2048))]
        slope = max(0.0, thin[1] - thin[0]) / (2 * (2048 - 512))
        block = bytes(2**24)
        return cls(
            product=1024**3 / _seconds(lambda: A @ A),
            product64=768**3 / _seconds(lambda: A64 @ A64),
            square=square,
            rows=(max(0.0, thin[0] - slope * 1024), slope),
            hashing=len(block) / _seconds(lambda: hashlib.sha256(block).digest()),
        )

    def solve_seconds(self, tokens: int, d_A: int, d_B: int) -> float:
        """One map of so many tokens, by the solver that would be chosen."""
        n, m = min(d_A, d_B), max(d_A, d_B)
        if tokens * (d_A + d_B) <= d_A * d_B:
            always, slope = self.rows
            return always * math.pow(tokens / ROWS, 2.8) + slope * (d_A + d_B) * (tokens / ROWS) ** 2
        wider = (m - n) * n * n  # the Gram matrix and V in float64, R in float32
        return self._square_seconds(n) + wider * (1.6 / self.product64 + 1.0 / self.product)

    def _square_seconds(self, n: int) -> float:
        at = 0 if n < SQUARE[1] else 1
        (n_1, n_2), (t_1, t_2) = SQUARE[at : at + 2], self.square[at : at + 2]
        power = min(3.0, max(1.5, math.log(t_2 / t_1) / math.log(n_2 / n_1)))
        return t_2 * math.pow(n / n_2, power)


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
