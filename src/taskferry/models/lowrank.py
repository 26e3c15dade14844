"""A full fine-tune as a LoRA: each change cut to its largest singular directions, with the error that this makes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from taskferry.errors import TaskferryError
from taskferry.taskvector import Delta, LowRank, TaskVector


def compress(tau: TaskVector, rank: int) -> tuple[TaskVector, dict[str, float], dict[str, str]]:
    """Cut τ to a rank: with it, the relative error of every matrix, and what a LoRA cannot hold and why."""
    if rank < 1:
        raise TaskferryError(f"a LoRA of rank {rank} holds nothing: give a rank of at least 1")
    deltas: dict[str, Delta] = {}
    errors: dict[str, float] = {}
    lost: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for name, delta in tau.deltas.items():
        if isinstance(delta, LowRank):
            deltas[name] = delta
        elif delta.ndim != 2:
            lost[name] = "a LoRA holds matrices only"
        else:
            deltas[name], errors[name] = _cut(delta, rank, generator)
    coverage = None if tau.coverage is None else tau.coverage.without(lost)
    return TaskVector(deltas, coverage), errors, lost


def _cut(delta: Tensor, rank: int, generator: torch.Generator) -> tuple[LowRank, float]:
    U, sigma, Vh = torch.linalg.svd(delta, full_matrices=False)
    power = sigma.double().square()
    total = float(power.sum())
    kept = min(rank, len(sigma))
    if total == 0:  # one factor as PEFT starts it: with both at zero nothing would learn
        right = (2 * torch.rand(kept, delta.shape[1], generator=generator) - 1) / math.sqrt(delta.shape[1])
        return LowRank(torch.zeros(len(delta), kept), right), 0.0
    root = sigma[:kept].sqrt()
    return LowRank(U[:, :kept] * root, root[:, None] * Vh[:kept]), (float(power[kept:].sum()) / total) ** 0.5
