"""The strongest directions of a wide space: a map needs no more of them, and its decompositions shrink with them.

    >>> Q = strongest(lambda Y: S @ Y, width, count)          # [width, count], orthonormal, for a symmetric S

One product of S with random vectors lies, but for what is weak, in the span of its strongest directions (randomised
range finder); decomposing what S is there costs count³ in place of width³. The random vectors are always the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from taskferry.linalg.decompositions import by_eigh

Times = Callable[[Tensor], Tensor]  # a product of a matrix with columns
Parts = tuple[Tensor, Tensor, Tensor]  # U, σ, V
WIDER = 2  # times as many directions as are kept: below that, finding them costs what decomposing all would


def is_wide(width: int, most: int) -> bool:
    """Whether a space of so many directions is narrowed to the strongest; 0 keeps all."""
    return 0 < WIDER * most < width


def strongest(times: Times, width: int, count: int, like: Tensor) -> Tensor:
    """Q [width, count] in float64, orthonormal: nearly the span of the strongest directions of S, `times` Y = S Y."""
    return span(times(random(width, count, like)))


def spans(
    A: Times, B: Times, C: Times, widths: tuple[int, int], most: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Q_A and Q_B of two spaces, None where one is not wide, by products with X_Aᵀ X_A, X_Bᵀ X_B and X_Bᵀ X_A.

    Where both are wide, the second span is what the first one's random vectors become on the other side: two models
    that differ by a rotation then have spans that differ by it. Vectors of its own would find other mixtures.
    """
    wide_A, wide_B = (is_wide(width, most) for width in widths)
    Q_A = strongest(A, widths[0], most, like) if wide_A else None
    if not wide_B:
        return Q_A, None
    return Q_A, strongest(C, widths[0], most, like) if wide_A else strongest(B, widths[1], most, like)


def by_strongest(products: tuple[Times, Times], shape: tuple[int, int], count: int, like: Tensor) -> Parts:
    """U, σ, V of the strongest directions of C [d_A, d_B], fewer than its smaller side, by its products C Y and Cᵀ Y.

    Columns are made orthonormal between two products: C Cᵀ would square the spectrum, and weak directions that the
    tolerance of a map keeps would drown in the rounding of float32 sums.
    """
    times, back = products
    if shape[0] > shape[1]:
        V, sigma, U = by_strongest((back, times), (shape[1], shape[0]), count, like)
        return U, sigma, V
    Q = span(times(strongest(back, shape[0], count, like).to(like)))
    U, sigma, V = by_eigh(back(Q).mT)
    return Q @ U, sigma, V


def products(X: Tensor, Y: Tensor | None = None) -> tuple[Times, Times]:
    """C Z and Cᵀ Z in the precision of Z, of a matrix C = X, or of rows with C = Xᵀ Y, which is never formed."""
    if Y is None:
        return lambda Z: X.to(Z.dtype) @ Z, lambda Z: X.mT.to(Z.dtype) @ Z
    return lambda Z: X.mT.to(Z.dtype) @ (Y.to(Z.dtype) @ Z), lambda Z: Y.mT.to(Z.dtype) @ (X.to(Z.dtype) @ Z)


def random(width: int, count: int, like: Tensor) -> Tensor:
    """Always the same vectors [width, count]."""
    return torch.randn(width, count, generator=torch.Generator().manual_seed(0)).to(like)


def span(Y: Tensor) -> Tensor:
    """Orthonormal columns in float64."""
    Q: Tensor = torch.linalg.qr(Y.double())[0]
    return Q
