"""Rows of the tokens that a router sends to one expert, and the tokens that two models have in common there.

>>> X_A, X_B = paired_rows(match, Routed(h_A, tokens_A, …), Routed(h_B, tokens_B, …))

All tokens of a micro-batch reach an attention layer; an expert sees a few of them, and another model sends others to
the expert that is paired with it. Sums are taken over those that reach both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from taskferry.layers.tokens import TokenMatch


@dataclass(frozen=True)
class Routed:
    """Rows [m, d] of an expert, with the places of their tokens among the n · L of a micro-batch."""

    rows: Tensor
    tokens: Tensor  # [m]
    weights: Tensor  # [m], what the router gives each
    samples: int
    length: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the rows of all tokens."""
        return self.samples, self.length, self.rows.shape[-1]

    def dense(self) -> Tensor:
        """[n, L, d + 1]: zero where a token is not here, and a last column that says where one is."""
        rows = torch.cat([self.rows, self.rows.new_ones(len(self.rows), 1)], 1)
        whole = rows.new_zeros(self.samples * self.length, rows.shape[1])
        whole[self.tokens] = rows
        return whole.view(self.samples, self.length, -1)


Rows = Tensor | Routed  # [n, L, d] of all tokens, or of those that are routed


def paired_rows(match: TokenMatch, A: Rows, B: Rows) -> tuple[Tensor, Tensor]:
    """[M, d_A] and [M, d_B], row by row the same token, for the tokens that reach both."""
    if isinstance(A, Tensor) and isinstance(B, Tensor):
        return match.source(A), match.target(B)
    if match.weights is None:
        at_A, at_B = _places(A), _places(B).to(_device(A))
        both = (at_A >= 0) & (at_B >= 0)
        if match.keep is not None:
            both &= match.keep.to(both.device).expand(A.shape[:2]).reshape(-1)
        return _flat(A)[at_A[both]], _flat(B)[at_B[both].to(_device(B))]
    X_A, X_B = match.source(_dense(A)), match.target(_dense(B))
    here = (X_A[:, -1] > 0) & (X_B[:, -1] > 0).to(X_A.device)
    # A target token takes the mean of those of its source tokens that are here.
    return X_A[here, :-1] / X_A[here, -1:], X_B[here.to(X_B.device), :-1]


def _places(rows: Rows) -> Tensor:
    """[n · L]: which row each token has, −1 for none."""
    if isinstance(rows, Tensor):
        return torch.arange(rows.shape[0] * rows.shape[1], device=rows.device)
    places = torch.full((rows.samples * rows.length,), -1, device=rows.rows.device)
    places[rows.tokens] = torch.arange(len(rows.tokens), device=rows.rows.device)
    return places


def _flat(rows: Rows) -> Tensor:
    return rows.reshape(-1, rows.shape[-1]) if isinstance(rows, Tensor) else rows.rows


def _dense(rows: Rows) -> Tensor:
    return torch.cat([rows, torch.ones_like(rows[..., :1])], -1) if isinstance(rows, Tensor) else rows.dense()


def _device(rows: Rows) -> torch.device:
    return rows.device if isinstance(rows, Tensor) else rows.rows.device
