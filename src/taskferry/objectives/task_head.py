"""The task head of a classification adapter: W_B = W_A R, with R the map between what the two heads read.

    >>> head = TaskHead.of(adapter, source, target)           # refuses before any work
    >>> moved = head.move(calibration, tau_A, tau_B)          # moved.tensors: "classifier.weight" and its bias

Its outputs are the classes, the same on both sides, so the map there is the identity and a bias is copied. What the
heads read is looked at where they are used: behind the tuned source, and behind the target with the moved change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from taskferry.collect.device import frozen, place_of, wide
from taskferry.collect.halving import Halving
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch, Calibration
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.linalg.sums import CrossCovariance
from taskferry.models import Adapter, Loaded
from taskferry.models.adapters import HEADS
from taskferry.models.classifiers import headed, same_labels
from taskferry.taskvector import TaskVector


@dataclass(frozen=True)
class MovedHead:
    """The head of the target, and how good its map is."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]  # for the record


@dataclass(frozen=True)
class TaskHead:
    """A head of one linear layer on two models of known kinds."""

    name: str  # "classifier" or "score"
    weight: Tensor  # [classes, d_A]
    bias: Tensor | None
    models: tuple[nn.Module, nn.Module]  # with a layer of that name
    bodies: tuple[nn.Module, nn.Module]  # whose parameters task vectors name

    @classmethod
    def of(cls, adapter: Adapter | None, source: Loaded, target: Loaded) -> TaskHead:
        """The head that an adapter brings; refused where it cannot move."""
        every = {} if adapter is None else adapter.saved
        saved = {name: tensor for name, tensor in every.items() if name.partition(".")[0] in HEADS}
        weights = [name for name, tensor in saved.items() if name.endswith(".weight") and tensor.ndim == 2]
        name = weights[0].removesuffix(".weight") if weights else ""
        if len(weights) != 1 or "." in name or set(saved) - {f"{name}.weight", f"{name}.bias"}:
            found = ", ".join(saved) or "none"
            raise TaskferryError(
                f"a head moves where an adapter brings one linear layer (classifier or score) as modules_to_save; this "
                f"one brings {found}: give --head keep"
            )
        weight = saved[f"{name}.weight"].float()
        first, second = (headed(each, name, len(weight)) for each in (source, target))
        same_labels(source, target)
        if first.get_submodule(name).in_features != weight.shape[1]:
            raise TaskferryError(
                f"the head {name} reads {weight.shape[1]} numbers, that of {source.given} "
                f"{first.get_submodule(name).in_features}: give the base that the adapter was made on as --source-base"
            )
        bias = saved.get(f"{name}.bias")
        return cls(name, weight, None if bias is None else bias.float(), (first, second), (source.model, target.model))

    def move(self, calibration: Calibration, tau_A: TaskVector, tau_B: TaskVector) -> MovedHead:
        """By what both tuned models show their heads on the samples."""
        read = []
        for side, tau in enumerate((tau_A, tau_B)):
            with moved_by(self.bodies[side], tau) as set_scale:
                set_scale(1.0)
                read.append(head_inputs(self.models[side], self.name, calibration.side(side)))
        W, facts = carried(self.weight, read[0], read[1])
        bias = 0.0 if self.bias is None else self.bias
        said = [(X.cpu() @ V.T + bias).argmax(1) for X, V in zip(read, (self.weight, W), strict=True)]
        tensors = {f"{self.name}.weight": W} | ({} if self.bias is None else {f"{self.name}.bias": self.bias})
        agreement = round(float((said[0] == said[1]).double().mean()), 4)
        return MovedHead(tensors, {"layer": self.name, "classes": len(W), "agreement": agreement, **facts})


def carried(weight: Tensor, X_A: Tensor, X_B: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """W_A R [classes, d_B] and the quality of R, for samples X_A [N, d_A] and X_B [N, d_B] that two heads read."""
    sums = CrossCovariance(X_A.shape[1], X_B.shape[1])
    sums.add(X_A.cpu(), X_B.cpu())
    R, quality = sums.solve()
    return R(weight.cpu()), {"rank": quality.rank, "residual": round(quality.residual, 6)}


class _Seen(Exception):
    pass


def head_inputs(model: nn.Module, head: str, batches: Sequence[Batch]) -> Tensor:
    """[N, d] what a head reads of each sample; of tokens the last one, which such classifiers score."""
    family, place = family_of(model), place_of(model)
    seen: list[Tensor] = []

    def look(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0])
        raise _Seen

    def read(batch: Batch) -> Tensor:
        here = batch.to(*place)
        with suppress(_Seen):
            model(**family.arguments(model, here))
        x = wide(seen.pop())
        if x.ndim == 3:
            mask = here.inputs.get("attention_mask", torch.ones(x.shape[:2], device=x.device))
            last = (mask * torch.arange(1, x.shape[1] + 1, device=x.device)).argmax(1)
            x = x[torch.arange(len(x), device=x.device), last]
        return x

    handle = model.get_submodule(head).register_forward_pre_hook(look)
    try:
        with torch.no_grad(), frozen(model):
            return torch.cat(Halving().each(read, batches))
    finally:
        handle.remove()
