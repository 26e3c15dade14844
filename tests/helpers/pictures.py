"""Random pictures of three classes, and a network small enough to train on them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from taskferry import Batch


class Pictures:
    """A data set of random images with a class that can be seen."""

    def __init__(self, n: int = 40, size: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(n) % 3
        self.pixels = torch.randn(n, 3, size, size, generator=generator) + self.labels[:, None, None, None].float()

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Sequence[int]) -> Batch:
        chosen = torch.tensor(list(indices))
        return Batch({"x": self.pixels[chosen]}, self.labels[chosen], tuple(indices))


class Small(nn.Module):
    """Two blocks of a plain network with dropout, so that a resumed run must repeat its noise."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(3 * 16 * 16, 12), nn.Linear(12, 12)])
        self.drop = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.blocks[0](x.flatten(1)))
        return torch.tanh(self.blocks[1](self.drop(hidden)))
