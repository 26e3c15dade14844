"""The one-to-one assignment with the largest sum, exactly: for experts, of which there are at most a few hundred.

>>> assign(torch.tensor([[0.1, 0.9], [0.8, 0.7]]))
[1, 0]
"""

from __future__ import annotations

import torch
from torch import Tensor


def assign(gain: Tensor) -> list[int]:
    """The column of each row of a square matrix: shortest augmenting paths, one row after the other."""
    n = gain.shape[0]
    if gain.shape != (n, n) or not bool(torch.isfinite(gain).all()):
        raise ValueError(f"a square matrix of finite numbers is needed, not {tuple(gain.shape)}")
    cost = -gain.double().cpu()
    rows, columns = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)  # prices
    owner = [-1] * n  # the row of each column
    for row in range(n):
        reach = torch.full((n,), torch.inf, dtype=torch.float64)  # the shortest way to each column
        before = torch.full((n,), -1, dtype=torch.long)  # the column in front of it
        done = torch.zeros(n, dtype=torch.bool)
        at, column, length = row, -1, 0.0
        while at >= 0:
            ways = length + cost[at] - rows[at] - columns
            better = ~done & (ways < reach)
            reach[better], before[better] = ways[better], column
            column = int(torch.where(done, torch.inf, reach).argmin())
            length, done[column], at = float(reach[column]), True, owner[column]
        for j in done.nonzero().flatten().tolist():
            if owner[j] >= 0:
                rows[owner[j]] += length - reach[j]
            columns[j] -= length - reach[j]
        rows[row] += length
        while column >= 0:
            previous = int(before[column])
            owner[column] = owner[previous] if previous >= 0 else row
            column = previous
    found = [0] * n
    for column, row in enumerate(owner):
        found[row] = column
    return found
