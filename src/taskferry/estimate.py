"""A rough estimate of a transfer: sizes from the shapes of the models, time from one micro-batch or a product.

>>> estimate(pair, pairs, source_passes=3, target_passes=6)
Estimate(pairs=42, layers=43, weights_bytes=…, memory_bytes=…, seconds=…)
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from taskferry.collect.device import frozen, place_of
from taskferry.data.batch import Batch
from taskferry.engines.blocks import BlockPair
from taskferry.engines.pair import ModelPair
from taskferry.layers.discovery import block_paths
from taskferry.layers.pairing import Pair
from taskferry.objectives.objectives import ForwardOnly

BACKWARD = 3.0  # a pass with gradients takes about as long as three without
EFFICIENCY = 0.6  # of a bare matrix product, in a model's own passes
READING = 1e9  # bytes a second, from disk
SOLVING = 40.0  # multiply-adds of one map of widths a <= b, in units of a² b


@dataclass(frozen=True)
class Estimate:
    """The size of the work. Memory is that of weights and sums; activations of a micro-batch come on top."""

    pairs: int  # layers of the target that take a change
    layers: int  # of the target
    weights_bytes: int  # of both models
    memory_bytes: int  # at the peak
    seconds: float


def estimate(
    pair: ModelPair, pairs: Sequence[Pair], *, source_passes: float, target_passes: float, maps: bool = True
) -> Estimate:
    """Estimate a run that takes so many forward passes over all samples (one with gradients counts as three)."""
    A = torch.ones(512, 512)
    started = time.perf_counter()
    A @ A
    products = 512**3 / (time.perf_counter() - started)  # multiply-adds a second
    widths = [(p.source.shape[side], p.target.shape[side]) for p in pairs for side in (0, 1)] if maps else []
    sums = 4 * sum(a * b for a, b in widths)
    seconds = sum(SOLVING * min(a, b) ** 2 * max(a, b) for a, b in widths) / products
    weights, memory = 0, 0
    for side, passes in enumerate((source_passes, target_passes)):
        batches = pair.calibration.side(side)
        if isinstance(pair, BlockPair):
            lazy, sites = pair.lazy[side], (pair.source_sites, pair.target_sites)[side]
            numbers = sum(map(math.prod, lazy.shapes.values()))
            own = lazy.precision.itemsize * numbers
            memory += own // max(1, len(block_paths(sites)))
            seconds += passes * (sum(map(_size, batches)) * numbers / (EFFICIENCY * products) + own / READING)
        else:
            model = (pair.source, pair.target)[side]
            own = sum(p.numel() * p.element_size() for p in model.parameters())
            memory += own
            loss, first = ForwardOnly().bind(model, ()), batches[0].to(*place_of(model))
            with torch.no_grad(), frozen(model):
                started = time.perf_counter()
                loss(first)
                took = time.perf_counter() - started
            seconds += passes * took * sum(map(_size, batches)) / _size(first)
        weights += own
    return Estimate(
        len(pairs), len(pair.target_sites), weights, memory + min(sums, pair.work.sums_memory), round(seconds, 1)
    )


def _size(batch: Batch) -> int:
    """Tokens with their padding, or samples of one size: what a pass costs in proportion to."""
    ids = batch.inputs.get("input_ids")
    return len(batch) if ids is None else ids.numel()
