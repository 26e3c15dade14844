"""The leading singular values of a task vector, averaged over its matrices: how many directions carry it.

>>> leading_values(tau.deltas.values())
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from taskferry.taskvector import Delta, LowRank, TaskVector

SHOWN = 32  # leading values
_OVERSAMPLED = 8  # more directions than are shown, for the accuracy of the last ones
_EXACT = 256  # up to this width all values are computed


def before_and_after(tau: TaskVector, moved: TaskVector) -> dict[str, list[float]]:
    """Of the changes that were taken from the source, and of what became of them in the target."""
    rows = () if moved.coverage is None else moved.coverage.rows
    taken = {name for row in rows for name in row.sources}
    used = [delta for name, delta in tau.deltas.items() if name in taken] or list(tau.deltas.values())
    return {"before": leading_values(used), "after": leading_values(moved.deltas.values())}


def leading_values(deltas: Iterable[Delta], count: int = SHOWN) -> list[float]:
    """The root mean square over all matrices of the 1st, 2nd, … singular value; vectors are left out."""
    total, matrices = torch.zeros(count, dtype=torch.float64), 0
    for delta in deltas:
        if len(delta.shape) > 1:
            values = singular_values(delta, count)
            total[: len(values)] += values.square().cpu()
            matrices += 1
    return (total / max(1, matrices)).sqrt().tolist()


def singular_values(delta: Delta, count: int = SHOWN) -> Tensor:
    """The largest of one change: exact for a LoRA and for small matrices, by random projections for large ones."""
    if isinstance(delta, LowRank):
        # The singular values of left @ right are those of R_left R_rightᵀ, of the rank's size.
        left, right = torch.linalg.qr(delta.left.double())[1], torch.linalg.qr(delta.right.double().T)[1]
        return _values(left @ right.T)[:count]
    matrix = delta.flatten(1).float()
    if min(matrix.shape) <= _EXACT:
        return _values(matrix.double())[:count]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, values, _ = torch.svd_lowrank(matrix, q=count + _OVERSAMPLED)
    return values[:count].double()


def _values(matrix: Tensor) -> Tensor:
    found: Tensor = torch.linalg.svdvals(matrix)
    return found
