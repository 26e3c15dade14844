"""What a transfer will cost, before it is done: memory and time from the sizes and a short measurement."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from taskferry.calibration.batch import Calibration
from taskferry.finding import find_sites
from taskferry.fitting import changed_pairs
from taskferry.pairing import Pair, pair_sites


@dataclass(frozen=True)
class Plan:
    """The work in numbers."""

    pairs: int
    sites: int
    tokens: int
    statistics_bytes: int
    weights_bytes: int
    flops_capture: float
    flops_solve: float
    seconds: float

    @property
    def memory_bytes(self) -> int:
        """Both models, the statistics, and the maps that they become."""
        return self.weights_bytes + 2 * self.statistics_bytes


def make_plan(
    source: nn.Module, target: nn.Module, calibration: Calibration, only: Collection[str] | None = None
) -> Plan:
    """From shapes, the calibration set and half a second of matrix products on this machine."""
    target_sites = find_sites(target)
    pairs, _ = pair_sites(find_sites(source), target_sites)
    weights = sum(p.source.shape[0] * p.source.shape[1] + p.target.shape[0] * p.target.shape[1] for p in pairs)
    if only is not None:
        pairs, _ = changed_pairs(pairs, only)
    tokens = sum(_tokens(B.inputs) for _, B in calibration)
    inputs, outputs = _map_shapes(pairs)
    products = sum(a * b for a, b in [*inputs, *outputs])
    capture = tokens * (4.0 * weights + 2.0 * products)  # forward and backward, then the cross-covariances
    solve = sum(12.0 * min(a, b) ** 2 * max(a, b) for a, b in [*inputs, *outputs])
    speed32, speed64 = _speed(torch.float32), _speed(torch.float64)
    return Plan(
        pairs=len(pairs),
        sites=len(target_sites),
        tokens=tokens,
        statistics_bytes=4 * products,
        weights_bytes=sum(p.numel() * p.element_size() for model in (source, target) for p in model.parameters()),
        flops_capture=capture,
        flops_solve=solve,
        seconds=capture / (0.5 * speed32) + solve / (0.3 * speed64),  # models reach about half of a bare product
    )


def _tokens(inputs: object) -> int:
    mapping: dict[str, torch.Tensor] = dict(inputs)  # type: ignore[call-overload]
    if "attention_mask" in mapping:
        return int(mapping["attention_mask"].sum())
    first = next(iter(mapping.values()))
    return first.shape[0] * (first[0].numel() // (3 * 16 * 16) + 1)  # images: patches of 16 pixels or so


def _map_shapes(pairs: Iterable[Pair]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(d_A, d_B) of the input maps, shared ones once, and of the output maps."""
    inputs: dict[tuple[object, ...], tuple[int, int]] = {}
    outputs = []
    for pair in pairs:
        a, b = pair.source.shape, pair.target.shape
        role = pair.target.role
        shared = {"q": "in", "k": "in", "v": "in", "gate": "in", "up": "in"}.get(role.rsplit(".", 1)[-1], role)
        inputs[pair.target.stack, pair.target.block, role.split(".")[0], shared] = (a[1], b[1])
        outputs.append((a[0], b[0]))
    return list(inputs.values()), outputs


def _speed(dtype: torch.dtype, size: int = 768) -> float:
    """FLOP/s of a bare matrix product here and now."""
    a = torch.randn(size, size, dtype=dtype)
    a @ a
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < 0.2:
        a @ a
        count += 1
    return 2.0 * size**3 * count / (time.perf_counter() - started)
