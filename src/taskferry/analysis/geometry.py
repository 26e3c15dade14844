"""Whether maps keep lengths and angles (paper, appendix D): R Rᵀ = I, on the directions that a map knows.

>>> worst = max(isometries(alignment), key=lambda row: row.error)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from taskferry.alignment import Alignment
from taskferry.linalg.procrustes import Map


@dataclass(frozen=True)
class Isometry:
    """One map: how far it is from keeping every length on its range."""

    side: str  # "in" or "out"
    site: str  # the key of the map
    widths: tuple[int, int]
    rank: int
    error: float  # ‖R Rᵀ R − R‖ / ‖R‖: 0 for a partial isometry, whose range keeps all lengths and angles
    whole: bool  # its range is all of the narrower space, as in the paper


def isometries(alignment: Alignment) -> list[Isometry]:
    """Every map of an alignment."""
    sides: tuple[tuple[str, Mapping[str, Map]], ...] = (("in", alignment.R_in), ("out", alignment.R_out))
    return [_isometry(side, key, R) for side, maps in sides for key, R in maps.items()]


def _isometry(side: str, key: str, R: Map) -> Isometry:
    dense = R.dense().double()
    size = float(torch.linalg.matrix_norm(dense))
    error = float(torch.linalg.matrix_norm(dense @ (dense.T @ dense) - dense))
    rank = round(size**2)  # ‖R‖² of a partial isometry is its rank
    return Isometry(side, key, R.shape, rank, error / size if size else 0.0, rank == min(R.shape))
