"""Which samples: the six samplers of the paper's table on the composition of the calibration set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from taskferry import TaskferryError


def draw(samples: Any, sampler: str, count: str, seed: int, features: Callable[[], Tensor]) -> list[int]:
    """Numbers of the samples of a draw.

    Args:
        samples: Labelled samples.
        sampler: random, class-balanced, half-class, single-class, centroid-near or centroid-far.
        count: How many: "100", or "5K" for five of each class.
        seed: Of the draw; the centroid samplers choose the same samples for every seed.
        features: Called for [samples, width] by the centroid samplers alone.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(samples), generator=generator).tolist()
    labels = samples.labels
    if sampler == "random" and not count.endswith("K"):
        return order[: int(count)]
    members: dict[int, list[int]] = {}
    for i in order:
        members.setdefault(labels[i], []).append(i)
    classes = sorted(members)
    if count.endswith("K"):
        each = int(count[:-1])
        short = [c for c in classes if len(members[c]) < each]
        if short:
            raise TaskferryError(f"class {short[0]} has {len(members[short[0]])} samples, {each} are asked for")
        return spread([members[c] for c in classes], each * len(classes))
    n = int(count)
    if sampler in ("half-class", "single-class"):
        picked = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed + 1)).tolist()
        kept = {classes[k] for k in picked[: 1 if sampler == "single-class" else max(1, len(classes) // 2)]}
        return [i for i in order if labels[i] in kept][:n]
    if sampler.startswith("centroid"):
        X, y = features().double(), torch.tensor(labels)
        centres = torch.stack([X[y == c].mean(0) if c in members else X[0] for c in range(max(classes) + 1)])
        distance = torch.linalg.vector_norm(X - centres[y], dim=1).tolist()
        for each_class in members.values():
            each_class.sort(key=lambda i: distance[i], reverse=sampler == "centroid-far")
    return spread([members[c] for c in classes], n)


def spread(queues: list[list[int]], n: int) -> list[int]:
    """As evenly over the classes as their sizes allow."""
    longest = max(map(len, queues))
    return [queue[k] for k in range(longest) for queue in queues if k < len(queue)][:n]
