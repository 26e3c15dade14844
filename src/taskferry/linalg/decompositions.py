"""Decompositions behind a Procrustes map, for C [..., d_A, d_B] = U Σ Vᵀ: each equal to the SVD where it is used.

| solver     | what it does                                     | chosen for                                       |
|------------|--------------------------------------------------|--------------------------------------------------|
| "svd"      | `torch.linalg.svd` in float64: the reference     | float64 statistics, and rank policy "full"       |
| "eigh"     | symmetric eigenproblem of the smaller Gram matrix| float32 statistics on a CPU                      |
| "products" | polar iteration by matrix products (polar.py)    | float32 statistics on a GPU                      |
| of rows    | QR of two tall factors and a small SVD           | fewer tokens than half the width, on any device  |

Pure functions of tensors. The leading dimensions are a batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

Solver = Literal["auto", "svd", "eigh", "products"]
STRIP = 512  # columns of a symmetric matrix made at once: above the diagonal strips nothing is computed


def choose_solver(C: Tensor, full: bool) -> Solver:
    """The fastest one that equals the reference on the kept directions."""
    # float32 statistics carry 1e-7 of rounding noise, above what squaring C loses in float64, so there the
    # symmetric eigenproblem gives the same map. "full" needs the null space too.
    if full or C.dtype == torch.float64:
        return "svd"
    return "products" if C.device.type == "cuda" else "eigh"


def by_svd(C: Tensor, full: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V by the SVD in float64; `full` asks for orthonormal columns where σ = 0 as well."""
    C = C.double()
    try:
        U, sigma, Vh = torch.linalg.svd(C, full_matrices=False)
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        # LAPACK's divide and conquer may fail on many equal singular values, as near-isometries have them.
        if full:
            raise ValueError(
                "the SVD does not converge: take the rank policy 'range', which has another way"
            ) from error
        return by_eigh(C)
    return U, sigma, Vh.mT


def by_eigh(C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V by the eigenproblem of the smaller Gram matrix, in float64; columns with σ = 0 are zero."""
    if C.shape[-2] > C.shape[-1]:
        V, sigma, U = by_eigh(C.mT)
        return U, sigma, V
    C = C.double()
    U = torch.linalg.eigh(gram(C))[1].flip(-1)  # eigh is ascending, singular values descend
    V = C.mT @ U  # columns v_i σ_i: their lengths are σ_i, more exact than the roots of the eigenvalues
    sigma = torch.linalg.vector_norm(V, dim=-2)
    return U, sigma, V.div_(sigma.clamp_min(torch.finfo(sigma.dtype).tiny).unsqueeze(-2))


def of_rows(X_A: Tensor, X_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, σ, V of X_Aᵀ X_B from rows [M, d_A] and [M, d_B], M < d: X_Aᵀ = Q_A T_A, X_Bᵀ = Q_B T_B, then T_A T_Bᵀ."""
    Q_A, T_A = torch.linalg.qr(X_A.double().mT)
    Q_B, T_B = torch.linalg.qr(X_B.double().mT)
    U, sigma, V = by_svd(T_A @ T_B.mT)
    return Q_A @ U, sigma, Q_B @ V


def gram(C: Tensor) -> Tensor:
    """The lower triangle of C Cᵀ, strip by strip; what stands above the diagonal strips is not set."""
    n = C.shape[-2]
    if n <= STRIP:
        return C @ C.mT
    G = C.new_zeros(*C.shape[:-1], n)
    for start, stop in strips(n):
        G[..., start:, start:stop] = C[..., start:, :] @ C[..., start:stop, :].mT
    return G


def strips(n: int) -> Iterator[tuple[int, int]]:
    """The columns of each strip of a symmetric matrix, which lie below its first row."""
    return ((start, min(start + STRIP, n)) for start in range(0, n, STRIP))
