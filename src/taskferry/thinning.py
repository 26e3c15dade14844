"""Fewer tokens, the same sum on average: far above the width, more tokens say little more.

    >>> chosen, weight = thin(norms_A * norms_B, keep=512, seed=0)
    >>> (X_A[chosen] * weight[:, None]).T @ X_B[chosen]            # X_Aᵀ X_B in expectation

Priority sampling: rows with a large product of norms are always kept, the others by lot and with a weight, so
that each is counted once on average. A class token, whose gradient is far larger than a patch's, is never lost.
"""

from __future__ import annotations

import torch
from torch import Tensor


def thin(size: Tensor, keep: int, seed: int) -> tuple[Tensor, Tensor]:
    """(indices, weights) of `keep` rows out of more, for rows that add `size` [M] > 0 each to a sum."""
    generator = torch.Generator().manual_seed(seed)
    lot = torch.rand(size.shape, generator=generator).to(size)
    best = torch.topk(size / lot.clamp_min(torch.finfo(size.dtype).tiny), keep + 1)
    threshold, chosen = best.values[-1], best.indices[:-1].sort().values
    return chosen, (threshold / size[chosen]).clamp_min(1.0)  # 1 / the chance of being kept
