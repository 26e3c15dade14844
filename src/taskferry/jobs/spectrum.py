"""How large a task vector is and in how many directions: its leading singular values, and the share of it that moved.

>>> leading_values(tau.deltas.values())
>>> energy_moved(tau, moved)
{'moved': 0.33, 'stayed': {'mlp.experts.down_proj': 0.67}}
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from taskferry.taskvector import Delta, LazyDeltas, LowRank, TaskVector

SHOWN = 32  # leading values
_OVERSAMPLED = 8  # more directions than are shown, for the accuracy of the last ones
_SLICE = re.compile(r"(?P<across>:,)?(?P<from>\d+):(?P<to>\d+)")
_EXACT = 256  # up to this width all values are computed


def energy_moved(tau: TaskVector, moved: TaskVector) -> dict[str, Any]:
    """The share of ‖τ‖² that had a place in the target, and the rest by where it stands in the source's blocks.

    Parameters alone do not say it: most of a change may sit in few of them. Nothing is said of changes on disk, which
    would have to be read again, nor by a method that does not say which changes it took.
    """
    taken = _taken(moved)
    total = 0.0 if isinstance(tau.deltas, LazyDeltas) or not taken else tau.norm() ** 2
    if not total:
        return {}
    stayed: dict[str, dict[str, Delta]] = {}
    left: dict[str, list[str]] = {}
    for part in () if moved.coverage is None else moved.coverage.unused:
        name, inside, at = part.partition("#")
        left.setdefault(name, []).extend([at] if inside else [])
    for name, delta in tau.deltas.items():
        if name not in taken:
            stayed.setdefault(_without_numbers(name), {})[name] = delta
        else:  # some experts, or some rows of a packed matrix, may have found no place
            own = {f"{name}#{at}": _part(delta, at) for at in left.get(name, ())}
            stayed.setdefault(_without_numbers(name), {}).update(own)
    shares = {where: TaskVector(deltas).norm() ** 2 / total for where, deltas in stayed.items() if deltas}
    return {
        "moved": max(0.0, 1.0 - sum(shares.values())),
        "stayed": dict(sorted(shares.items(), key=lambda item: -item[1])),
    }


def _part(delta: Delta, at: str) -> Delta:
    """What an alignment calls `weight#3`, an expert, or `weight#64:96` and `weight#:,64:96`, outputs of a matrix."""
    found = _SLICE.fullmatch(at)
    if found is None:
        return delta.expert(int(at)) if isinstance(delta, LowRank) else delta[int(at)]
    own = slice(int(found["from"]), int(found["to"]))
    if not isinstance(delta, LowRank):
        return delta[:, own] if found["across"] else delta[own]
    return LowRank(delta.left, delta.right[:, own]) if found["across"] else LowRank(delta.left[own], delta.right)


def _without_numbers(name: str) -> str:
    """A place in a block: `mlp.experts.down_proj` of `model.layers.3.mlp.experts.down_proj`."""
    parts = name.removesuffix(".weight").split(".")
    first = next((i + 1 for i, part in enumerate(parts) if part.isdigit()), 0)
    return ".".join(part for part in parts[first:] if not part.isdigit()) or name.removesuffix(".weight")


def before_and_after(tau: TaskVector, moved: TaskVector) -> dict[str, list[float]]:
    """Of the changes that were taken from the source, and of what became of them in the target."""
    taken = _taken(moved)
    used = [delta for name, delta in tau.deltas.items() if name in taken] or list(tau.deltas.values())
    return {"before": leading_values(used), "after": leading_values(moved.deltas.values())}


def _taken(moved: TaskVector) -> set[str]:
    """The parameters of the source whose changes have moved."""
    rows = () if moved.coverage is None else moved.coverage.rows
    return {name for row in rows if row.status != "kept" for name in row.sources}


def leading_values(deltas: Iterable[Delta], count: int = SHOWN) -> list[float]:
    """The root mean square over all matrices of the 1st, 2nd, … singular value; vectors are left out."""
    total, matrices = torch.zeros(count, dtype=torch.float64), 0
    for delta in (each for whole in deltas for each in _matrices(whole)):
        if len(delta.shape) > 1:
            values = singular_values(delta, count)
            total[: len(values)] += values.square().cpu()
            matrices += 1
    return (total / max(1, matrices)).sqrt().tolist()


def _matrices(delta: Delta) -> list[Delta]:
    """The changes of experts one by one; any other as it is."""
    if len(delta.shape) != 3:
        return [delta]
    return [delta.expert(i) if isinstance(delta, LowRank) else delta[i] for i in range(delta.shape[0])]


def singular_values(delta: Delta, count: int = SHOWN) -> Tensor:
    """The largest of one change: exact for a LoRA and for small matrices, by random projections for large ones."""
    if isinstance(delta, LowRank):
        # The singular values of left @ right are those of R_left R_rightᵀ, of the rank's size.
        left, right = torch.linalg.qr(delta.left.double())[1], torch.linalg.qr(delta.right.double().T)[1]
        return _values(left @ right.T)[:count]
    matrix = delta.flatten(1).float()
    if min(matrix.shape) <= _EXACT:
        return _values(matrix.double())[:count]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, values, _ = torch.svd_lowrank(matrix, q=count + _OVERSAMPLED)
    return values[:count].double()


def _values(matrix: Tensor) -> Tensor:
    found: Tensor = torch.linalg.svdvals(matrix)
    return found
