"""Fine-tuning for benchmarks by the paper's protocol: AdamW, linear warm-up, half a cosine, nine tenths of the samples.

>>> train(model, pool, objective.bind(model, []), Protocol(steps=300))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from taskferry import Batch, Pool


@dataclass(frozen=True)
class Protocol:
    """The defaults are the paper's."""

    steps: int = 2000
    batch: int = 128
    learning_rate: float = 1e-5
    weight_decay: float = 0.1
    warmup: int = 200
    left_out: float = 0.1  # of the samples
    precision: str = "float32"  # or "bfloat16", in products
    train: str = "all"  # or "blocks": parameters of numbered blocks alone
    head_rate: float = 10.0  # times the learning rate
    seed: int = 0


def train(
    model: nn.Module,
    data: Pool,
    loss: Callable[[Batch], Tensor],
    protocol: Protocol,
    head: nn.Module | None = None,
    told: Callable[[int, float], None] | None = None,
) -> None:
    """Train in place what requires a gradient; `loss` is summed over samples, `head` is a new one."""
    torch.manual_seed(protocol.seed)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if protocol.train == "blocks":
        named = {name: p for name, p in named.items() if any(part.isdigit() for part in name.split("."))}
    groups: list[dict[str, Any]] = [{"params": list(named.values()), "lr": protocol.learning_rate}]
    if head is not None:
        groups.append({"params": list(head.parameters()), "lr": protocol.learning_rate * protocol.head_rate})
    optimiser = torch.optim.AdamW(groups, weight_decay=protocol.weight_decay)

    def rate(step: int) -> float:
        if step < protocol.warmup:
            return (step + 1) / protocol.warmup
        rest = max(1, protocol.steps - protocol.warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - protocol.warmup) / rest)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, rate)
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(protocol.seed)
    kept = torch.randperm(len(data), generator=generator)[round(protocol.left_out * len(data)) :]
    order: list[int] = []
    model.train()
    for step in range(protocol.steps):
        while len(order) < protocol.batch:
            order += kept[torch.randperm(len(kept), generator=generator)].tolist()
        chosen, order = order[: protocol.batch], order[protocol.batch :]
        # Half precision is twice as fast on a CPU, but not in the fused attention, whose backward pass is slow there.
        half = protocol.precision == "bfloat16"
        with (
            torch.autocast(device.type, torch.bfloat16, enabled=half),
            sdpa_kernel(SDPBackend.MATH) if half and device.type == "cpu" else nullcontext(),
        ):
            value = loss(data.batch(chosen).to(device)) / len(chosen)
        optimiser.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
        if told is not None:
            told(step + 1, value.item())
    model.eval()
    optimiser.zero_grad()
