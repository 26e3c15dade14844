"""Means and covariances of two sets of rows as streaming sums, and linear CKA from them.

    >>> moments = Moments.of(X_A, X_B)                # [M, d_A] and [M, d_B], row by row the same token
    >>> moments.merge(Moments.of(more_A, more_B))
    >>> moments.cka()

No row is kept: a d × d matrix for each side and one between them hold all that CKA needs, because
‖K_A K_B‖ of M × M kernels is ‖X_Aᵀ X_B‖² of d_A × d_B features (Kornblith et al., 2019).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from taskferry.linalg.procrustes import Map


@dataclass
class Moments:
    """n rows: their means, and their sums of products about the means."""

    n: int
    mean_A: Tensor  # [d_A]
    mean_B: Tensor  # [d_B]
    A: Tensor  # [d_A, d_A], Σ (x − mean)(x − mean)ᵀ
    B: Tensor  # [d_B, d_B]
    AB: Tensor  # [d_A, d_B]

    @classmethod
    def of(cls, X_A: Tensor, X_B: Tensor) -> Moments:
        """Of one micro-batch. Centred before they are multiplied, so a large mean costs no digits."""
        if X_A.ndim != 2 or X_B.ndim != 2 or X_A.shape[0] != X_B.shape[0]:
            raise ValueError(f"rows {tuple(X_A.shape)} and {tuple(X_B.shape)} are not of the same tokens")
        X_A, X_B = (X.to(torch.promote_types(X.dtype, torch.float32)) for X in (X_A, X_B))
        mean_A, mean_B = X_A.double().mean(0), X_B.double().mean(0)
        A, B = X_A - mean_A.to(X_A), X_B - mean_B.to(X_B)
        dtype = torch.promote_types(A.dtype, B.dtype)
        between = (A.to(dtype).T @ B.to(dtype)).double()
        return cls(X_A.shape[0], mean_A, mean_B, (A.T @ A).double(), (B.T @ B).double(), between)

    def merge(self, other: Moments) -> None:
        """Add other rows: the products about the new means (Chan et al.)."""
        n = self.n + other.n
        if other.n == 0 or n == 0:
            return
        delta_A, delta_B = other.mean_A - self.mean_A, other.mean_B - self.mean_B
        weight = self.n * other.n / n
        self.A += other.A + weight * torch.outer(delta_A, delta_A)
        self.B += other.B + weight * torch.outer(delta_B, delta_B)
        self.AB += other.AB + weight * torch.outer(delta_A, delta_B)
        self.mean_A += other.n / n * delta_A
        self.mean_B += other.n / n * delta_B
        self.n = n

    def cka(self, R: Map | None = None) -> float:
        """Linear CKA of the two sides, or of X_A R and X_B: 1 where they differ by a rotation, a scale and a shift."""
        A, AB = self.A, self.AB
        if R is not None:
            A, AB = R(R.columns(A)), R.columns(AB)
        energy = float(torch.linalg.matrix_norm(A)) * float(torch.linalg.matrix_norm(self.B))
        return float(AB.square().sum()) / energy if energy > 0 else 0.0

    def second_moment(self) -> Tensor:
        """Σ x xᵀ of the source's rows as they are, not about their mean: [d_A, d_A]."""
        return self.A + self.n * torch.outer(self.mean_A, self.mean_A)
