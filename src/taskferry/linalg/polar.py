"""The partial isometry of C by matrix products alone: what GPUs do best.

    >>> X = polar(C / sigma_1, tolerance=1e-6)        # U Vᵀ over the singular directions above the tolerance

An odd polynomial p(X) = a X + b X Xᵀ X + c (X Xᵀ)² X acts on the singular values alone. A chain of them, each the
best fit of 1 on the interval that the last one left (equal ripple, found by exchange), brings every kept value to 1;
a last few steps x³ (5 − 3x²) / 2 push what is below the cut to 0 and leave 1 in place. Float64: a direction at the
tolerance is then still exact to 1e-9.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

Quintic = tuple[float, float, float]

CUT: Quintic = (0.0, 2.5, -1.5)  # pushes values below √(2/3) to 0 and above to 1, without overshoot
CUTS = 6
CUT_AT = (2.0 / 3.0) ** 0.5
CLOSE = 1e-10  # the ripple at which the chain ends


def polar(C: Tensor, *, tolerance: float) -> tuple[Tensor, Tensor]:
    """(R, σ_1): R = U Vᵀ over σ > tolerance · σ_1, for C [..., d_A, d_B]; three products a step.

    The cut is sharp to a few per cent of the tolerance.
    """
    if C.shape[-2] > C.shape[-1]:
        R, sigma = polar(C.mT, tolerance=tolerance)
        return R.mT, sigma
    X = C.double()
    sigma = largest_singular_value(X)
    X = X / sigma.clamp_min(torch.finfo(X.dtype).tiny)[..., None, None]
    for a, b, c in (*schedule(tolerance), *[CUT] * CUTS):
        A = X @ X.mT
        B = A @ A
        X = a * X + (b * A + c * B) @ X
    return X, sigma


def largest_singular_value(X: Tensor, steps: int = 60) -> Tensor:
    """σ_1 of [..., n, m] by power iteration, to about a per cent from below."""
    v = torch.randn(*X.shape[:-1], 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(X)
    sigma = X.new_zeros(X.shape[:-2])
    for _ in range(steps):
        v = X @ (X.mT @ v)
        norm = torch.linalg.vector_norm(v, dim=-2, keepdim=True)
        v = v / norm.clamp_min(torch.finfo(X.dtype).tiny)
        sigma = norm[..., 0, 0].sqrt()
    return sigma


@lru_cache
def schedule(tolerance: float) -> tuple[Quintic, ...]:
    """The chain whose value at the tolerance is the cut's own threshold: bisection over where the chain begins."""
    steps = len(_chain(tolerance))
    low, high = tolerance, 0.9
    for _ in range(40):
        middle = (low * high) ** 0.5
        if _value(_chain(middle, steps), tolerance) > CUT_AT:
            low = middle
        else:
            high = middle
    return _chain(high, steps)


def _value(chain: tuple[Quintic, ...], x: float) -> float:
    for a, b, c in chain:
        x = a * x + b * x**3 + c * x**5
    return x


def _chain(lower: float, steps: int | None = None) -> tuple[Quintic, ...]:
    """So many polynomials that bring [lower, 1] close to 1, or as many as bring it within `CLOSE`."""
    found: list[Quintic] = []
    upper = 1.02  # power iteration may miss a little of σ_1
    while len(found) < steps if steps is not None else upper - lower > CLOSE:
        found.append(best_quintic(lower, upper))
        ripple = abs(1.0 - _value((found[-1],), lower))
        lower, upper = 1.0 - ripple, 1.0 + ripple
    return tuple(found)


def best_quintic(lower: float, upper: float) -> Quintic:
    """a x + b x³ + c x⁵ with the smallest largest distance from 1 on [lower, upper]: the exchange algorithm."""
    if upper - lower < 1e-4 * upper:  # the limit: value 1 and two zero derivatives at 1
        return 15 / 8, -10 / 8, 3 / 8
    q, r = lower + 0.25 * (upper - lower), lower + 0.75 * (upper - lower)
    a = b = c = 0.0
    for _ in range(60):
        points = torch.tensor([lower, q, r, upper], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        matrix = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, _ = torch.linalg.solve(matrix, torch.ones(4, dtype=torch.float64)).tolist()
        root = max(9 * b * b - 20 * a * c, 0.0) ** 0.5  # p' = a + 3 b x² + 5 c x⁴ vanishes at the two inner extremes
        inner = sorted(max(u, 0.0) ** 0.5 for u in ((-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)))
        moved = max(abs(inner[0] - q), abs(inner[1] - r))
        q, r = inner
        if moved < 1e-13:
            break
    return a, b, c
