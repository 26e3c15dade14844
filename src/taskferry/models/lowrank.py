"""A full fine-tune as a LoRA: each change cut to its largest singular directions, with the error that this makes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.taskvector import Delta, LowRank, TaskVector


def compress(tau: TaskVector, rank: int) -> tuple[TaskVector, dict[str, float], dict[str, str]]:
    """(τ of that rank, relative error of every matrix, what a LoRA cannot hold and why)."""
    if rank < 1:
        raise TaskferryError(f"a LoRA of rank {rank} holds nothing: give a rank of at least 1")
    deltas: dict[str, Delta] = {}
    errors: dict[str, float] = {}
    lost: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for name, delta in tau.deltas.items():
        if isinstance(delta, LowRank):
            deltas[name] = delta
        elif delta.ndim not in (2, 3):  # 3: experts stacked in one parameter
            lost[name] = "a LoRA holds matrices only"
        else:
            deltas[name], errors[name] = _cut(delta, rank, generator)
    coverage = None if tau.coverage is None else tau.coverage.without(lost)
    return TaskVector(deltas, coverage), errors, lost


def fresh(weight: Tensor, rank: int, generator: torch.Generator) -> LowRank:
    """No change, with one factor zero and the other uniform, as PEFT starts a LoRA."""
    *experts, out, into = weight.shape
    A = (2 * torch.rand(*experts, rank, into, generator=generator) - 1) / math.sqrt(into)
    return LowRank(torch.zeros(*experts, out, rank), A.to(torch.float32))


def _cut(delta: Tensor, rank: int, generator: torch.Generator) -> tuple[LowRank, float]:
    U, sigma, Vh = torch.linalg.svd(delta, full_matrices=False)
    power = sigma.double().square()
    total = float(power.sum())
    kept = min(rank, sigma.shape[-1])
    root = sigma[..., :kept].sqrt()
    error = (max(0.0, float(power[..., kept:].sum())) / total) ** 0.5 if total else 0.0
    right = root[..., None] * Vh[..., :kept, :]
    still = power.sum(-1)[..., None, None] == 0  # where nothing changes: with both factors at zero nothing would learn
    right = torch.where(still, fresh(delta, kept, generator).right.to(right), right)
    return LowRank(U[..., :kept] * root[..., None, :], right), error
