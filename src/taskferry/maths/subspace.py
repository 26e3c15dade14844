"""The strongest directions of a wide space: a map needs no more of them, and its decompositions shrink with them.

    >>> Q = strongest(lambda Y: S @ Y, width, count)          # [width, count], orthonormal, for a symmetric S

One product of S with random vectors lies, but for what is weak, in the span of its strongest directions (randomised
range finder); decomposing what S is there costs count³ in place of width³. The random vectors are always the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from taskferry.maths.decompositions import by_eigh

WIDER = 2  # times as many directions as are kept: below that, finding them costs what decomposing all would


def is_wide(width: int, most: int) -> bool:
    """Whether a space of so many directions is narrowed to the strongest; 0 keeps all."""
    return 0 < WIDER * most < width


def strongest(times: Callable[[Tensor], Tensor], width: int, count: int, like: Tensor) -> Tensor:
    """Q [width, count] in float64, orthonormal: nearly the span of the strongest directions of S, `times` Y = S Y."""
    Y = torch.randn(width, count, generator=torch.Generator().manual_seed(0)).to(like)
    Q: Tensor = torch.linalg.qr(times(Y).double())[0]
    return Q


def narrow_moment(S: Tensor, most: int) -> tuple[Tensor, Tensor | None, float]:
    """QᵀSQ of a second moment S [d, d] in float64, with Q (None: all of it), and the mean variance of a direction."""
    mean = float(S.diagonal().double().mean())
    if not is_wide(S.shape[0], most):
        return S.double(), None, mean
    Q = strongest(lambda Y: S @ Y, S.shape[0], most, S)
    return Q.T @ (S.double() @ Q), Q, mean


def narrow_rows(X: Tensor, most: int) -> tuple[Tensor, Tensor | None, float]:
    """The same for rows X [M, d], as X Q: the d × d matrix is never formed."""
    mean = float(X.double().square().sum()) / X.shape[1]
    if not is_wide(X.shape[1], most):
        return X.double(), None, mean
    Q = strongest(lambda Y: X.T @ (X @ Y), X.shape[1], most, X)
    return X.double() @ Q, Q, mean


def by_strongest(C: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V of the strongest directions of C [d_A, d_B], fewer than its smaller side."""
    if C.shape[0] > C.shape[1]:
        V, sigma, U = by_strongest(C.T, count)
        return U, sigma, V
    Q = strongest(lambda Y: C @ (C.T @ Y), C.shape[0], count, C)
    U, sigma, V = by_eigh(Q.T @ C.double())
    return Q @ U, sigma, V
