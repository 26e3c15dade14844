"""Task vectors τ = tuned − base (paper, equation 1): dense, or low-rank as in LoRA.

>>> tau = TaskVector.between(base, tuned)
>>> tau = TaskVector({"layers.0.q_proj.weight": LowRank(B * alpha / r, A)})
>>> (0.5 * tau_1 + tau_2).norm()
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from taskferry.disk.files import is_finite, is_kind, open_safetensors, write_safetensors
from taskferry.display.tables import ROWS, panel
from taskferry.errors import TaskferryError

if TYPE_CHECKING:
    from taskferry.coverage import Coverage

FORMAT = "taskferry task vector 1"


@dataclass(frozen=True)
class LowRank:
    """A change of one weight as left @ right, [rows, r] @ [r, columns], in the weight's stored orientation.

    Of experts stacked in one parameter: [experts, rows, r] @ [experts, r, columns].
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        left, right = self.left.shape, self.right.shape
        if len(left) not in (2, 3) or left[:-2] != right[:-2] or left[-1:] != right[-2:-1]:
            raise TaskferryError(f"factors {tuple(left)} and {tuple(right)} do not multiply")

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns) of the product, behind the number of experts where they are stacked."""
        return *self.left.shape[:-1], self.right.shape[-1]

    @property
    def rank(self) -> int:
        """Number of columns of the left factor."""
        return self.left.shape[-1]

    @property
    def T(self) -> LowRank:
        """The transpose, of every expert."""
        return LowRank(self.right.mT, self.left.mT)

    def expert(self, number: int) -> LowRank:
        """The change of one of several experts."""
        return LowRank(self.left[number], self.right[number])

    def dense(self) -> Tensor:
        """The product."""
        return self.left @ self.right

    def norm(self) -> float:
        """Frobenius norm, from two r × r matrices."""
        left, right = self.left.double(), self.right.double()
        return math.sqrt(max(0.0, float(((left.mT @ left) * (right @ right.mT).mT).sum())))


Delta = Tensor | LowRank


class LazyDeltas(Mapping[str, "Delta"]):
    """Changes that are read when they are asked for: of models larger than memory. All of them are matrices or vectors
    on disk; whoever walks over them holds one at a time.
    """

    def times(self, scale: float) -> LazyDeltas:
        """The same, multiplied as they are read."""
        return _Times(self, scale)

    def changed(self, name: str) -> bool:
        """Whether there is anything in it."""
        return bool(as_dense(self[name]).any())

    def __contains__(self, name: object) -> bool:
        """Without reading it."""
        return any(name == known for known in self)


@dataclass(frozen=True, eq=False)
class _Times(LazyDeltas):
    inner: LazyDeltas
    scale: float

    def __getitem__(self, name: str) -> Delta:
        return scale_delta(self.inner[name], self.scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


def as_dense(delta: Delta) -> Tensor:
    """A change as one tensor."""
    return delta.dense() if isinstance(delta, LowRank) else delta


def to_device(delta: Delta, device: torch.device) -> Delta:
    """A change on another device; a low-rank one by its factors."""
    return LowRank(delta.left.to(device), delta.right.to(device)) if isinstance(delta, LowRank) else delta.to(device)


def scale_delta(delta: Delta, scale: float) -> Delta:
    """A multiple of a change; a low-rank one stays low-rank."""
    return LowRank(delta.left * scale, delta.right) if isinstance(delta, LowRank) else delta * scale


def _norm(delta: Delta) -> float:
    return delta.norm() if isinstance(delta, LowRank) else float(torch.linalg.vector_norm(delta.double()))


@dataclass(frozen=True, repr=False)
class TaskVector:
    """Changes by parameter name, as the model stores its parameters. Absent parameters do not change."""

    deltas: Mapping[str, Delta]
    coverage: Coverage | None = field(default=None, compare=False)

    @classmethod
    def between(cls, base: nn.Module | Mapping[str, Tensor], tuned: nn.Module | Mapping[str, Tensor]) -> TaskVector:
        """τ = tuned − base, in float32 at least; parameters that did not change are left out."""
        before, after = _parameters(base), _parameters(tuned)
        missing = sorted(set(before) ^ set(after))
        if missing:
            raise TaskferryError(
                f"base and tuned model differ in {len(missing)} parameters ({', '.join(missing[:3])} …): "
                "give the base model that was tuned"
            )
        deltas: dict[str, Delta] = {}
        tied = _tied(before)
        for name, start in before.items():
            if name in tied:
                continue
            end = after[name]
            if start.shape != end.shape:
                raise TaskferryError(
                    f"{name} is {tuple(start.shape)} in the base and {tuple(end.shape)} in the tuned model: "
                    "give the base model that was tuned"
                )
            if start.is_floating_point():
                precision = torch.promote_types(torch.promote_types(start.dtype, end.dtype), torch.float32)
                change = end.detach().to(start.device, precision) - start.detach().to(precision)
                if bool(change.any()):
                    deltas[name] = change
        return cls(deltas)

    def __repr__(self) -> str:
        return f"TaskVector({len(self)} changes, {'low-rank' if self.low_rank else 'dense'}, norm {self.norm():.4g})"

    def _repr_html_(self) -> str:
        sizes = sorted(((_norm(delta), name) for name, delta in self.deltas.items()), reverse=True)
        rows = [
            (name, " × ".join(map(str, delta.shape)), delta.rank if isinstance(delta, LowRank) else "dense", norm)
            for norm, name in sizes[:ROWS]
            for delta in [self.deltas[name]]
        ]
        facts = {"changes": f"{len(self)} parameters", "norm": self.norm()}
        if self.coverage is not None:
            facts["coverage"] = self.coverage.summary().splitlines()[0]
        header = ("largest", "shape", "rank", "norm")
        return panel("Task vector", facts, header, rows, len(sizes) - len(rows))

    def __add__(self, other: TaskVector) -> TaskVector:
        deltas = dict(self.deltas)
        for name, delta in other.deltas.items():
            deltas[name] = _add(name, deltas[name], delta) if name in deltas else delta
        return TaskVector(deltas)

    def __sub__(self, other: TaskVector) -> TaskVector:
        return self + (-1.0) * other

    def __mul__(self, scale: float) -> TaskVector:
        if isinstance(self.deltas, LazyDeltas):
            return TaskVector(self.deltas.times(scale), self.coverage)
        scaled = {name: scale_delta(delta, scale) for name, delta in self.deltas.items()}
        return TaskVector(scaled, self.coverage)

    __rmul__ = __mul__

    def __neg__(self) -> TaskVector:
        return -1.0 * self

    def __len__(self) -> int:
        return len(self.deltas)

    def take(self, names: Iterable[str]) -> TaskVector:
        """The changes of some parameters, in memory; those that turn out to change nothing are left out."""
        found = {name: self.deltas[name] for name in names if name in self.deltas}
        return TaskVector({n: d for n, d in found.items() if isinstance(d, LowRank) or bool(d.any())}, self.coverage)

    def changed(self, name: str) -> bool:
        """Whether there is anything in the change of a parameter; one on disk may know without being read in full."""
        return self.deltas.changed(name) if isinstance(self.deltas, LazyDeltas) else bool(self.take([name]))

    @property
    def rank(self) -> int | None:
        """The largest rank of its low-rank parts; None where there are none."""
        return max((delta.rank for delta in self.deltas.values() if isinstance(delta, LowRank)), default=None)

    @property
    def low_rank(self) -> bool:
        """Whether every change of a matrix is low-rank."""
        if isinstance(self.deltas, LazyDeltas):
            return False
        changes = [delta for delta in self.deltas.values() if len(delta.shape) > 1]
        return bool(changes) and all(isinstance(delta, LowRank) for delta in changes)

    def norm(self) -> float:
        """‖τ‖ over all parameters."""
        return math.sqrt(sum(_norm(delta) ** 2 for delta in self.deltas.values()))

    def dense(self) -> TaskVector:
        """The same with every low-rank change multiplied out."""
        return TaskVector({name: as_dense(delta) for name, delta in self.deltas.items()}, self.coverage)

    @torch.no_grad()
    def add_to(self, model: nn.Module, scale: float = 1.0) -> nn.Module:
        """θ + scale · τ, in place (paper, equation 9); returns the model."""
        for _, parameter, delta in self.on(model):
            change = as_dense(delta)
            # Half-precision weights are summed in float32 and rounded once.
            precision = torch.promote_types(torch.promote_types(parameter.dtype, change.dtype), torch.float32)
            parameter.copy_(parameter.to(precision) + scale * change.to(parameter.device, precision))
        return model

    def on(self, model: nn.Module | Mapping[str, nn.Parameter]) -> list[tuple[str, nn.Parameter, Delta]]:
        """Every change with its name and the model's parameter; a tied weight once, and every shape checked."""
        parameters = model if isinstance(model, Mapping) else dict(model.named_parameters(remove_duplicate=False))
        renamed = match_names(self.deltas, parameters)
        found: dict[int, tuple[str, nn.Parameter, Delta]] = {}
        for name, delta in self.deltas.items():
            parameter = parameters[renamed[name]]
            if tuple(delta.shape) != tuple(parameter.shape):
                raise TaskferryError(
                    f"{name}: a change of shape {tuple(delta.shape)} on a parameter of {tuple(parameter.shape)}"
                )
            found.setdefault(id(parameter), (name, parameter, delta))
        return list(found.values())

    def save(self, path: str | Path) -> None:
        """One safetensors file; low-rank changes keep their two factors."""
        tensors: dict[str, Tensor] = {}
        for name, delta in self.deltas.items():
            if isinstance(delta, LowRank):
                tensors[f"left/{name}"], tensors[f"right/{name}"] = delta.left, delta.right
            else:
                tensors[f"dense/{name}"] = delta
        write_safetensors(path, tensors, {"format": FORMAT})

    @classmethod
    def load(cls, path: str | Path) -> TaskVector:
        """The inverse of `save`."""
        parts: dict[str, dict[str, Tensor]] = {}
        with open_safetensors(path, FORMAT) as (file, _):
            for key in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                kind, _, name = key.partition("/")
                parts.setdefault(name, {})[kind] = file.get_tensor(key)
        return cls({name: _delta(f"{path}: {name}", found) for name, found in parts.items()})


def is_task_vector(path: str | Path) -> bool:
    """Whether this is a file that `TaskVector.save` wrote, damaged or not."""
    return is_kind(path, FORMAT)


def _delta(what: str, parts: Mapping[str, Tensor]) -> Delta:
    """A change out of the tensors of its file."""
    for tensor in parts.values():
        if not tensor.is_floating_point() or not tensor.numel() or not is_finite(tensor):
            raise TaskferryError(
                f"{what}: {tensor.dtype} of {tuple(tensor.shape)} with numbers that are not finite, or none"
            )
    wide = {kind: tensor.float() if tensor.dtype.itemsize < 2 else tensor for kind, tensor in parts.items()}
    if set(wide) == {"dense"}:
        return wide["dense"]
    if set(wide) == {"left", "right"}:
        return LowRank(
            *(wide[side].to(torch.promote_types(wide["left"].dtype, wide["right"].dtype)) for side in ("left", "right"))
        )
    raise TaskferryError(f"{what} is in the parts {', '.join(sorted(wide))}: a damaged task vector")


def match_names(names: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """Each name as the other side spells it: with or without a prefix such as `bert.` or `model.`."""
    known = list(known)
    exact = set(known)
    by_tail: dict[str, list[str]] = {}
    for name in known:
        by_tail.setdefault(_tail(name), []).append(name)
    found: dict[str, str] = {}
    for name in names:
        if name in exact:
            found[name] = name
            continue
        fits = [k for k in by_tail.get(_tail(name), []) if k.endswith(f".{name}") or name.endswith(f".{k}")]
        if len(fits) != 1:
            raise TaskferryError(
                f"'{name}' is {'ambiguous' if fits else 'not a parameter'} here"
                f"{': ' + ', '.join(fits[:3]) if fits else ''}: was this task vector made on another base model?"
            )
        found[name] = fits[0]
    return found


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])


def _parameters(model: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else dict(model)


def _tied(state: Mapping[str, Tensor]) -> set[str]:
    """Names of tensors that stand in the dictionary under an earlier name already, as tied weights do."""
    seen: set[tuple[object, ...]] = set()
    again = set()
    for name, tensor in state.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride())
        if place in seen and tensor.numel():
            again.add(name)
        seen.add(place)
    return again


def _add(name: str, a: Delta, b: Delta) -> Delta:
    if tuple(a.shape) != tuple(b.shape):
        raise TaskferryError(f"{name}: cannot add changes of shapes {tuple(a.shape)} and {tuple(b.shape)}")
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return LowRank(torch.cat([a.left, b.left], -1), torch.cat([a.right, b.right], -2))
    return as_dense(a) + as_dense(b)
