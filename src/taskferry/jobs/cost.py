"""A plan in numbers, and the small sums that plans are made of."""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from taskferry.collect.statistics import Tokens
from taskferry.data.batch import Batch, Calibration
from taskferry.linalg.subspace import is_wide
from taskferry.linalg.sums import CrossCovariance


@dataclass(frozen=True)
class Plan:
    """The work in numbers."""

    pairs: int
    sites: int
    tokens: int  # rows of the map that sees most
    statistics_bytes: int  # of all cross-covariances
    weights_bytes: int
    memory_bytes: int  # resident at the peak
    stages: dict[str, float]  # seconds
    device_bytes: int = 0  # of all devices together at the peak, where models lie on some
    engines: dict[str, int] = field(default_factory=dict)  # the same by engine, where nothing but sizes is known
    groups: int = 1  # of layers, each captured by passes of its own
    sums_bytes: int = 0  # the memory for sums with which one group would do
    limit: float | None = None  # GB of the device that was asked about

    def fits(self, engine: str) -> bool:
        """Whether an engine stays below the limit; a tenth is left for kernels and the allocator."""
        return self.limit is None or 1.1 * self.engines[engine] <= self.limit * 1e9

    @property
    def seconds(self) -> float:
        """All stages together."""
        return sum(self.stages.values())

    def after(self, stage: str, seconds: float | None) -> Plan:
        """With a stage before all others, where there is one."""
        return self if seconds is None else replace(self, stages={stage: seconds, **self.stages})


def apply_cost(source: tuple[int, int], target: tuple[int, int]) -> int:
    """Multiply-adds of R_outᵀ τ R_in in its cheaper order."""
    (a, b), (c, d) = source, target
    return min(a * b * d + a * c * d, a * b * c + b * c * d)


def sums_bytes(kind: type[CrossCovariance], rows: int, d_A: int, d_B: int, folds: int = 1, directions: int = 0) -> int:
    """Of the sums of one map, those of each fold; their total is made when its map is solved."""
    return 4 * folds * kind.numbers_of(rows // folds, d_A, d_B, directions)


def as_rows(kind: type[CrossCovariance], rows: int, a: int, b: int, directions: int) -> bool:
    """Whether sums are kept as rows."""
    return kind.numbers_of(rows, a, b, directions) == rows * (a + b) != kind.numbers(a, b)


def directions_kept(width: int, directions: int) -> int:
    """How many directions of a space a map keeps at most."""
    return directions if is_wide(width, directions) else width


def map_rank(rows: int, a: int, b: int, directions: int) -> int:
    """The most directions that a map of so many rows has."""
    return min(rows, directions_kept(min(a, b), directions))


def map_bytes(rows: int, a: int, b: int, directions: int) -> int:
    """Of a map as two factors, or as one matrix where that is smaller."""
    return 4 * min(map_rank(rows, a, b, directions) * (a + b), a * b)


def workspace_bytes(
    kind: type[CrossCovariance], rows: int, a: int, b: int, directions: int, products: bool = False
) -> int:
    """What a decomposition holds at once beside the sums; `products`: of a device that makes it by matrix products."""
    n, whitened = min(a, b), len(kind.moments) > 1
    p, q = directions_kept(a, directions), directions_kept(b, directions)
    if as_rows(kind, rows, a, b, directions):
        if rows <= directions or not is_wide(max(a, b) if whitened else n, directions):
            return 8 * 3 * rows * (a + b)  # the rows in float64, and two factors of them
        if whitened:
            return 8 * (rows * (max(a, b) + p + q) + a * p + b * q)  # one side's rows in float64, both in their spans
        return 8 * (rows * max(a, b) + 3 * directions * (a + b))
    if whitened:  # one moment and its span; C beside both narrow moments; then roots and factors of those
        return 8 * max(b * b + 2 * b * q, a * a + 2 * a * p, a * b + p * p + q * q + a * p + b * q,
                       3 * (p * p + q * q) + 3 * p * q)  # fmt: skip
    if is_wide(n, directions):
        return 8 * (a * b + 3 * directions * (a + b))
    eigh = max(8 * (2 * a * b + n * n), 8 * (a * b + 2 * n * n), 12 * (n * n + a * b))  # C, Gram matrix, U, V
    return 8 * 3 * (a * b + n * n) if products else eigh  # X three times, and three products of it


def size(batch: Batch) -> int:
    """What a pass costs in proportion to: tokens with their padding, or samples of one size."""
    ids = batch.inputs.get("input_ids")
    return len(batch) if ids is None else ids.numel()


def rows_met(calibration: Calibration, tokens: Tokens) -> int:
    """Rows of the target that a map sees at most: of all tokens, or of those that predict an answer."""
    total = 0
    for _, B in calibration:
        mask = B.inputs.get("attention_mask") if tokens == "all" else B.predicting
        total += size(B) if mask is None else int(mask.sum())
    return total


def resident() -> int:
    """Bytes of memory this process holds now; at its peak so far where the system does not say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    return peak()


def peak() -> int:
    """The most bytes that this process has held so far (0 where the system does not say)."""
    try:
        import resource
    except ImportError:  # no such thing on Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
