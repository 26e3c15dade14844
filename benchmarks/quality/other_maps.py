"""Maps from rows of both models, [M, d_A] and [M, d_B], that might be better than the paper's isometry.

>>> R = ridge(0.1)(X_A, X_B)                    # [d_A, d_B]
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.zoo_trial import Solve, isometry
from taskferry.linalg.whitening import Whitened


def centred(X_A: Tensor, X_B: Tensor) -> Tensor:
    return isometry(X_A - X_A.mean(0), X_B - X_B.mean(0))


def even(X_A: Tensor, X_B: Tensor) -> Tensor:
    """Every token counts alike, however large its gradient."""
    return isometry(F.normalize(X_A, dim=1), F.normalize(X_B, dim=1))


def whitened(X_A: Tensor, X_B: Tensor) -> Tensor:
    """Every direction counts alike, and every token."""
    sums = Whitened(X_A.shape[1], X_B.shape[1])
    sums.add(X_A, X_B)
    return sums.solve()[0].dense()


def halfway(X_A: Tensor, X_B: Tensor) -> Tensor:
    """Rows weighted by the root of their size."""
    a, b = X_A.norm(dim=1, keepdim=True), X_B.norm(dim=1, keepdim=True)
    return isometry(X_A / a.clamp_min(1e-12).sqrt(), X_B / b.clamp_min(1e-12).sqrt())


def above_noise(hard: bool) -> Solve:
    """σ against the σ of rows that belong to other tokens: what stands above it is kept, or kept in proportion."""

    def solve(X_A: Tensor, X_B: Tensor) -> Tensor:
        U, S, V = torch.linalg.svd((X_A.T @ X_B).double(), full_matrices=False)
        other = torch.randperm(len(X_B), generator=torch.Generator().manual_seed(0))
        noise = torch.linalg.svdvals(((X_A - X_A.mean(0)).T @ (X_B - X_B.mean(0))[other]).double())
        kept = (noise[0] < S).double() if hard else (1 - (noise / S.clamp_min(1e-30)).square()).clamp_min(0)
        return ((U * kept) @ V).float()

    return solve


def ridge(strength: float) -> Solve:
    """Between the isometry and the regression of source on target rows, as long as the isometry."""

    def solve(X_A: Tensor, X_B: Tensor) -> Tensor:
        BB = (X_B.T @ X_B).double()
        BB += strength * BB.diagonal().mean() * torch.eye(len(BB), dtype=BB.dtype)
        R = torch.linalg.solve(BB, (X_B.T @ X_A).double()).T
        return (R * (min(R.shape) ** 0.5 / R.norm())).float()

    return solve
