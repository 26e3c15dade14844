"""A few numbers of each parameter of a task vector, to tell later whether another one is the same."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import numpy as np
from torch import Tensor

PRODUCTS = 8


def fingerprint(deltas: Mapping[str, Tensor]) -> dict[str, list[float]]:
    """Of every parameter ‖Δ‖, then ⟨z, Δ⟩ / ‖Δ‖ for each of its own standard-normal directions z."""
    found = {}
    for name, delta in deltas.items():
        flat = delta.detach().double().flatten().numpy()
        norm = float(np.linalg.norm(flat))
        found[name] = [norm, *(_directions(name, flat.size) @ flat / norm).round(11).tolist()]
    return found


def distances(deltas: Mapping[str, Tensor], known: Mapping[str, list[float]]) -> dict[str, float]:
    """An estimate of ‖Δ − Δ₀‖ / ‖Δ₀‖ for every parameter, from Δ and the fingerprint of Δ₀.

    ⟨z, Δ − Δ₀⟩ has mean 0 and variance ‖Δ − Δ₀‖², whatever the direction of the change, so the mean square of eight of
    them is ‖Δ − Δ₀‖² χ²₈ / 8: the estimate is above a tenth and below two and a half times the truth but for one
    parameter in five million.
    """
    if deltas.keys() != known.keys():
        raise AssertionError(f"other parameters have moved: {sorted(deltas.keys() ^ known.keys())}")
    found = {}
    for name, numbers in fingerprint(deltas).items():
        (norm, *now), (norm_0, *before) = numbers, known[name]
        differences = [norm * a - norm_0 * b for a, b in zip(now, before, strict=True)]
        found[name] = math.sqrt(sum(d * d for d in differences) / PRODUCTS) / norm_0
    return found


def _directions(name: str, size: int) -> np.ndarray:
    """[PRODUCTS, size]. numpy keeps the numbers of a RandomState for good; torch's may change with a release."""
    return np.random.RandomState(zlib.crc32(name.encode())).standard_normal((PRODUCTS, size))
