"""One natural-gradient step of a linear layer with Kronecker factors (K-FAC), dense or as a LoRA.

    >>> A, S = Factor.of_rows(x, 0.1), Factor.of_rows(e, 0.1, count=N, span=g)
    >>> left, right = lowest_rank(whitened(g, x, S, A), S, A, rank=8)

A task vector is a sum of gᵀx (paper, equation 5). The target's own sum comes from one pass: inputs x [M, d_in] of a
layer y = x Wᵀ, gradients g [M, d_out] of the loss at y, and probes e [M, d_out] with E[eᵀe] = Σ Jᵀ F J, the Fisher
information F of the model's outputs pulled back to y. The plain sum ignores the metric of either space:

    A  = xᵀx / M,   S = eᵀe / N                                  the Kronecker factors of the layer's curvature
    Â  = A + ρ mean diag A = L_A L_Aᵀ,   Ŝ = S + ρ mean diag S = L_S L_Sᵀ
    ΔW = −Ŝ⁻¹ (gᵀx) Â⁻¹ = L_S⁻ᵀ K L_A⁻¹,   K = −L_S⁻¹ (gᵀx) L_A⁻ᵀ

The length of ΔW in its own metric is ‖L_Sᵀ ΔW L_A‖ = ‖K‖, so the best change of rank r has the r largest singular
values of K. Rows fewer than directions span few of them: all is then done in an orthonormal basis of that span, and
neither a d × d matrix nor ΔW is formed. Pure functions of tensors; decompositions in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TINY = 1e-30  # in place of a diagonal that is zero: nothing reached the layer


@dataclass(frozen=True)
class Factor:
    """A damped factor Ĉ = C + ρ mean diag C of one side of a layer, by its Cholesky factor."""

    root: Tensor  # L [k, k], lower: Ĉ = L Lᵀ in the coordinates of the basis
    basis: Tensor | None = None  # [d, k] orthonormal columns; None where k = d

    @classmethod
    def of(cls, C: Tensor, damping: float) -> Factor:
        """Damp a second moment C [d, d] and factor it."""
        return cls(_cholesky(C, damping * float(C.diagonal().mean())))

    @classmethod
    def of_rows(cls, rows: Tensor, damping: float, *, count: float | None = None, span: Tensor | None = None) -> Factor:
        """Damp and factor C = rowsᵀ rows / count, in the span of the rows where they are fewer than directions.

        Args:
            rows: [M, d].
            damping: ρ.
            count: The divisor; M by default.
            span: Further rows [·, d] that will be whitened, which must lie in the span too.
        """
        count = len(rows) if count is None else count
        both = rows if span is None else torch.cat([rows, span])
        if 2 * len(both) > rows.shape[1]:  # a basis of the rows would cost what all directions do
            return cls.of(rows.T @ rows / count, damping)
        basis = torch.linalg.qr(both.T)[0]
        inside = rows @ basis
        C = inside.T @ inside / count
        return cls(_cholesky(C, damping * float(C.trace()) / rows.shape[1]), basis)

    def whiten(self, rows: Tensor) -> Tensor:
        """Rows [m, d] in coordinates [m, k] where Ĉ is the identity: rows L⁻ᵀ."""
        inside = rows if self.basis is None else rows @ self.basis
        solved: Tensor = torch.linalg.solve_triangular(self.root, inside.T, upper=False)
        return solved.T

    def unwhiten(self, rows: Tensor) -> Tensor:
        """Whitened rows [m, k] of a change in the layer's space [m, d]: rows L⁻¹."""
        inside: Tensor = torch.linalg.solve_triangular(self.root, rows, upper=False, left=False)
        return inside if self.basis is None else inside @ self.basis.T

    def gram(self, rows: Tensor) -> Tensor:
        """rows Ĉ rowsᵀ for rows [m, d] of a change, in float64."""
        inside = ((rows if self.basis is None else rows @ self.basis) @ self.root).double()
        return inside @ inside.T


def whitened(g: Tensor, x: Tensor, S: Factor, A: Factor) -> Tensor:
    """K = −L_S⁻¹ (gᵀx) L_A⁻ᵀ from rows g [M, d_out] and x [M, d_in]."""
    return -S.whiten(g).T @ A.whiten(x)


def whitened_product(G: Tensor, S: Factor, A: Factor) -> Tensor:
    """K from the product G = gᵀx [d_out, d_in]."""
    return -A.whiten(S.whiten(G.T).T)


def full_step(K: Tensor, S: Factor, A: Factor) -> Tensor:
    """ΔW = L_S⁻ᵀ K L_A⁻¹ as a matrix [d_out, d_in]."""
    return S.unwhiten(A.unwhiten(K).T).T


def lowest_rank(K: Tensor, S: Factor, A: Factor, rank: int) -> tuple[Tensor, Tensor, float]:
    """ΔW cut to a rank with the least error in the metric of the step.

    Returns:
        left [d_out, r] and right [r, d_in], and the slope ⟨gᵀx, ΔW⟩ of the loss along it.
    """
    tall = K.shape[0] >= K.shape[1]
    gram = (K.T @ K if tall else K @ K.T).double()  # eigenvectors of the smaller side: few singular values are wanted
    V = torch.linalg.eigh(gram)[1].flip(1)[:, :rank].to(K)
    U = K @ V if tall else K.T @ V
    sigma = torch.linalg.vector_norm(U, dim=0)
    root = sigma.sqrt()
    U, V = U / sigma.clamp_min(TINY) * root, V * root
    U, V = (U, V) if tall else (V, U)
    return S.unwhiten(U.T).T, A.unwhiten(V.T), -float(sigma.square().sum())


def cut(left: Tensor, right: Tensor, S: Tensor, A: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """A low-rank change left @ right cut to a smaller rank with the least error in a metric.

    Args:
        left: [d_out, k].
        right: [k, d_in].
        S: leftᵀ Ŝ left [k, k], `Factor.gram` of the columns of left.
        A: right Â rightᵀ [k, k].
        rank: What is kept.
    """
    P, P_inverse = _root_and_inverse(S)
    Q, Q_inverse = _root_and_inverse(A)
    U, sigma, Vh = torch.linalg.svd(P.T @ Q)
    root = sigma[:rank].sqrt()
    into_left, into_right = P_inverse.T @ (U[:, :rank] * root), (root[:, None] * Vh[:rank]) @ Q_inverse
    return left @ into_left.to(left), into_right.to(right) @ right


def fisher_root(scores: Tensor, signs: Tensor) -> Tensor:
    """v = √p ∘ u − p ⟨√p, u⟩ for each row of scores, p their softmax: E[v vᵀ] = diag p − p pᵀ over random signs u."""
    p = scores.detach().softmax(-1)
    root = p.sqrt()
    return root * signs - p * (root * signs).sum(-1, keepdim=True)


def _cholesky(C: Tensor, damping: float) -> Tensor:
    damped = C.double()
    damped = damped.clone() if damped is C else damped
    damped.diagonal().add_(damping + TINY)
    root: Tensor = torch.linalg.cholesky(damped)
    return root.to(C)


def _root_and_inverse(C: Tensor) -> tuple[Tensor, Tensor]:
    """P and P⁻¹ of C = P Pᵀ in float64; directions that C does not have are 0 in both."""
    power, V = torch.linalg.eigh(C.double())
    alive = power > 1e-12 * power[-1].clamp_min(TINY)
    root = torch.where(alive, power.clamp_min(TINY).sqrt(), 0.0)
    return V * root, torch.where(alive, 1 / root.clamp_min(TINY), 0.0)[:, None] * V.T
