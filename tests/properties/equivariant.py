"""A transformer for which rotating every basis is an exact symmetry, so that the true transfer is known.

Attention sees q and k only through inner products, the normalisation only lengths, and the hidden units are gated by
their common length. An elementwise nonlinearity (GELU, ReLU) has no such symmetry: of the rotations of its hidden
basis only permutations keep the function. With `gelu=True` the residual stream can still be rotated, the hidden layer
cannot.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from taskferry import Batch, Calibration, TaskVector

INPUTS, OUTPUTS = 14, 13  # at least the residual width: else activations or gradients could not span it


@dataclass(frozen=True)
class Widths:
    residual: int = 12
    attention: int = 10
    value: int = 9
    hidden: int = 12


class Block(nn.Module):
    def __init__(self, w: Widths, gelu: bool) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(w.residual, w.attention), nn.Linear(w.residual, w.attention)
        self.v, self.o = nn.Linear(w.residual, w.value), nn.Linear(w.value, w.residual)
        self.up, self.down = nn.Linear(w.residual, w.hidden), nn.Linear(w.hidden, w.residual)
        self.gelu = gelu

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(x, dim=-1)
        scores = self.q(z) @ self.k(z).mT
        x = x + self.o(scores.softmax(-1) @ self.v(z))
        h = self.up(F.normalize(x, dim=-1))
        h = F.gelu(h) if self.gelu else h * torch.tanh(torch.linalg.vector_norm(h, dim=-1, keepdim=True))
        return x + self.down(h)


class Equivariant(nn.Module):
    def __init__(self, widths: Widths, depth: int = 3, gelu: bool = False) -> None:
        super().__init__()
        self.widths = widths
        self.start = nn.Linear(INPUTS, widths.residual)
        self.blocks = nn.ModuleList(Block(widths, gelu) for _ in range(depth))
        self.readout = nn.Linear(widths.residual, OUTPUTS)
        for name, parameter in self.named_parameters():
            # Well-conditioned spaces: a direction that is 1e-5 as strong as the first drowns in float32.
            if name.endswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for block in self.blocks:
            x = block(x)
        return self.readout(F.normalize(x, dim=-1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Every token has its own target, so gradients have full rank."""
    return (model(batch.inputs["x"]) - batch.inputs["y"]).square().sum()


def isometry(d_A: int, d_B: int, generator: torch.Generator) -> Tensor:
    """Q: [d_A, d_B] with Q Qᵀ = I, random."""
    return torch.linalg.qr(torch.randn(d_B, d_B, generator=generator, dtype=torch.float64))[0][:d_A]


class Embedding:
    """Random isometries of every space of a model into the spaces of one at least as wide."""

    def __init__(self, narrow: Widths, wide: Widths, depth: int, seed: int = 0, hidden: bool = True) -> None:
        g = torch.Generator().manual_seed(seed)
        residual = isometry(narrow.residual, wide.residual, g)
        self.maps: dict[str, tuple[Tensor, Tensor]] = {}  # layer -> (Q_out, Q_in)
        eye = torch.eye
        self.maps["start"] = (residual, eye(INPUTS, dtype=torch.float64))
        self.maps["readout"] = (eye(OUTPUTS, dtype=torch.float64), residual)
        for i in range(depth):
            qk = isometry(narrow.attention, wide.attention, g)
            value = isometry(narrow.value, wide.value, g)
            inner = isometry(narrow.hidden, wide.hidden, g) if hidden else eye(narrow.hidden, dtype=torch.float64)
            self.maps |= {
                f"blocks.{i}.q": (qk, residual),
                f"blocks.{i}.k": (qk, residual),
                f"blocks.{i}.v": (value, residual),
                f"blocks.{i}.o": (residual, value),
                f"blocks.{i}.up": (inner, residual),
                f"blocks.{i}.down": (residual, inner),
            }

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or a change of one, of the narrow model in the wide one's bases."""
        layer, kind = name.rsplit(".", 1)
        Q_out, Q_in = (Q.to(tensor) for Q in self.maps[layer])
        return Q_out.T @ tensor @ Q_in if kind == "weight" else tensor @ Q_out

    def model(self, narrow: Equivariant, wide: Widths, gelu: bool = False) -> Equivariant:
        copy = Equivariant(wide, len(narrow.blocks), gelu).to(next(narrow.parameters()).dtype)
        copy.load_state_dict({name: self(name, p.detach()) for name, p in narrow.named_parameters()})
        return copy

    def task_vector(self, tau: TaskVector) -> TaskVector:
        return TaskVector({name: self(name, delta) for name, delta in tau.deltas.items()})  # type: ignore[arg-type]


def calibration(samples: int = 100, micro_batch: int = 8, dtype: torch.dtype = torch.float64) -> Calibration:
    batches = []
    for start in range(0, samples, micro_batch):
        ids = range(start, min(start + micro_batch, samples))
        rows = [torch.randn(6, INPUTS + OUTPUTS, generator=torch.Generator().manual_seed(i)) for i in ids]
        x = torch.stack(rows).to(dtype)
        batches.append(Batch({"x": x[..., :INPUTS], "y": x[..., INPUTS:]}, ids=tuple(ids)))
    return Calibration([(batch, batch) for batch in batches])


def random_task_vector(model: nn.Module, seed: int = 3) -> TaskVector:
    g = torch.Generator().manual_seed(seed)
    return TaskVector({n: torch.randn(p.shape, generator=g).to(p) for n, p in model.named_parameters()})


def distance(a: TaskVector, b: TaskVector) -> float:
    """‖a − b‖ / ‖b‖ over all parameters."""
    assert a.deltas.keys() == b.deltas.keys()
    return (a.dense() - b.dense()).norm() / b.norm()
