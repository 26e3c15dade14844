"""Which samples: the six samplers of the paper's table on calibration composition.

>>> choose(labels, 100, sampler="class-balanced", seed=0)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import get_args

import torch
from torch import Tensor

from taskferry.choices import Sampler
from taskferry.errors import TaskferryError


def choose(
    total: int,
    n: int,
    *,
    labels: Sequence[int] | None = None,
    per_class: int | None = None,
    sampler: Sampler = "random",
    seed: int = 0,
    features: Callable[[], Tensor] | None = None,
) -> list[int]:
    """Indices of the samples to use, in random order, the same for the same seed.

    `per_class` takes that many of each class and overrides `n`. `features` gives [total, d] and is called for the
    centroid samplers only, whose samples are the same for every seed. All samples are used where there are no more
    than asked for.
    """
    if sampler not in get_args(Sampler):
        raise TaskferryError(f"no sampler '{sampler}': one of {', '.join(get_args(Sampler))}")
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed)).tolist()
    if per_class is not None and sampler in ("half-class", "single-class"):
        raise TaskferryError(f"the sampler '{sampler}' leaves classes out: leave per_class out, or the sampler")
    if sampler == "random" and per_class is None:
        return order[:n]
    if labels is None:
        raise TaskferryError(f"the sampler '{sampler}' needs labels: use sampler=random with a number of samples")
    by_class: dict[int, list[int]] = {}
    for i in order:
        by_class.setdefault(labels[i], []).append(i)
    classes = sorted(by_class)
    if per_class is not None:
        short = [c for c in classes if len(by_class[c]) < per_class]
        if short:
            raise TaskferryError(f"class {short[0]} has {len(by_class[short[0]])} samples, {per_class} are asked for")
        n = per_class * len(classes)
    if sampler in ("half-class", "single-class"):
        picked = [classes[k % len(classes)] for k in _shuffled(len(classes), seed)]
        kept = picked[: 1 if sampler == "single-class" else max(1, len(classes) // 2)]
        return [i for i in order if labels[i] in kept][:n]
    if sampler in ("centroid-near", "centroid-far"):
        if features is None:
            raise TaskferryError(f"the sampler '{sampler}' needs features")
        distance = _distance_to_centroid(features(), labels)
        for members in by_class.values():
            members.sort(key=lambda i: distance[i], reverse=sampler == "centroid-far")
        chosen = set(_round_robin([by_class[c] for c in classes], n))
        return [i for i in order if i in chosen]
    return _round_robin([by_class[c] for c in classes], n)


def _round_robin(queues: list[list[int]], n: int) -> list[int]:
    """As evenly over the classes as their sizes allow."""
    longest = max(map(len, queues))
    return [queue[k] for k in range(longest) for queue in queues if k < len(queue)][:n]


def _shuffled(n: int, seed: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + 1)).tolist()


def _distance_to_centroid(features: Tensor, labels: Sequence[int]) -> list[float]:
    y = torch.tensor(labels)
    distance = torch.zeros(len(y), dtype=torch.float64)
    for c in sorted(set(labels)):
        members = features[y == c].double()
        distance[y == c] = torch.linalg.vector_norm(members - members.mean(0), dim=1)
    return distance.tolist()
