"""An engine is where a pair of models lives: whole in memory, or block by block from disk.

    >>> pair = WholePair(A, B, calibration, objective)           # layers, pairs and objectives are bound once
    >>> pair.move(tau, Maps())                                   # the same for every engine
    >>> pair.losses(tau_B, [0, 0.5, 1, 2], held_out)             # all scales of a round together

A method asks a pair to move and for losses, and never which engine it runs on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from taskferry.alignment import NO_CHANGE, Alignment
from taskferry.collect.device import device_of
from taskferry.collect.maps import Maps
from taskferry.collect.progress import Progress
from taskferry.collect.scale import ScaleCurve
from taskferry.coverage import reasons_to_keep
from taskferry.data.batch import Calibration
from taskferry.errors import TaskferryError
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import DepthRule, Pair, nearest_block, pair_sites
from taskferry.layers.site import Site
from taskferry.models.peft import prefix_of
from taskferry.objectives.objectives import AnyObjective, ForwardOnly, Objective, both_objectives
from taskferry.taskvector import TaskVector
from taskferry.version import __version__


class CannotMove(TaskferryError):
    """A method cannot handle this pair; the message says why in one sentence."""


@dataclass(frozen=True)
class Moved:
    """What a method moved, and what it knows about it."""

    tau: TaskVector
    alignment: Alignment | None = None  # where it has maps that another change can pass through
    sites: Sequence[Mapping[str, Any]] = ()  # the table of its maps
    curve: ScaleCurve | None = None  # where the method has chosen the scale itself: τ is at its best
    provenance: Mapping[str, Any] = field(default_factory=dict)
    notes: Mapping[str, Any] = field(default_factory=dict)  # for the record


@dataclass(frozen=True)
class Work:
    """How much memory a pair may take for sums, who is told of progress, and where finished groups are stored."""

    sums_memory: int = 4 * 2**30  # bytes of sums at once: where they do not fit, layers are visited in groups
    progress: Progress | None = None
    resume: Path | None = None


class ModelPair(ABC):
    """Two base models, the samples that a change is made from, and their objectives."""

    engine: ClassVar[str]

    def __init__(
        self,
        source: nn.Module,
        target: nn.Module,
        calibration: Calibration,
        objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None = None,
        *,
        depth_rule: DepthRule = nearest_block,
        work: Work | None = None,
    ) -> None:
        self.source, self.target = source, target
        self.calibration, self.objective = calibration, objective
        self.work = work or Work()
        self.depth_rule = depth_rule
        self.source_sites, self.target_sites = find_sites(source), find_sites(target)
        self.pairs, self.reasons = pair_sites(self.source_sites, self.target_sites, depth_rule)
        if not self.pairs:
            raise TaskferryError(
                f"no linear layer of {type(target).__name__} has a partner in {type(source).__name__}: "
                "their blocks or roles have no name in common"
            )

    @abstractmethod
    def move(self, tau: TaskVector, maps: Maps, changed: Collection[str] | None = None) -> Moved:
        """Make maps, and move through them: τ_B = R_outᵀ τ_A R_in.

        `changed` names the parameters of the source that change: no other layer gets a map. None: all do.
        """

    @abstractmethod
    def losses(self, change: TaskVector, scales: Sequence[float], samples: Calibration) -> list[float]:
        """The mean loss a sample of the target + scale · change, at each scale."""

    @abstractmethod
    def hash_of(self, side: int) -> str:
        """sha256 over names, shapes, types and bytes of all parameters of the source (0) or the target (1)."""

    @cached_property
    def objectives(self) -> tuple[Objective, Objective]:
        """Of the source and of the target."""
        return both_objectives(self.objective, self.source, self.target, self.calibration)

    def placement(self) -> dict[str, dict[str, str]]:
        """Device and precision of either model."""
        return {"source": _placed(self.source), "target": _placed(self.target)}

    def still(self, changed: Collection[str] | None) -> dict[str, str]:
        """Layers of the target that nothing moves to, because their source does not change, with the reason."""
        if changed is None:
            return {}
        return {
            pair.target.name: NO_CHANGE
            for pair in self.pairs
            if pair.source.weight not in changed and pair.source.bias not in changed
        }

    def wanted(self, changed: Collection[str] | None) -> list[Pair]:
        """The pairs that get maps."""
        still = self.still(changed)
        return [pair for pair in self.pairs if pair.target.name not in still]

    def describe(self, gradients: bool = True) -> dict[str, Any]:
        """What a result rests on: both models, objectives, samples, versions."""
        needed = gradients or self.objective is not None
        objectives: Sequence[Objective] = self.objectives if needed else (ForwardOnly(), ForwardOnly())
        return {
            "engine": self.engine,
            "source": self._model(0),
            "target": self._model(1),
            "objective": [objective.describe() for objective in objectives],
            "calibration": {"samples": self.calibration.samples, "sha256": self.calibration.identity()},
            "versions": {"taskferry": __version__, "torch": torch.__version__},
        }

    def provenance(self, maps: Maps) -> dict[str, Any]:
        """What maps rest on."""
        rule = getattr(self.depth_rule, "__name__", repr(self.depth_rule))
        settings = {"map_rank": maps.rank, "tolerance": maps.tolerance, "depth_rule": rule}
        return {"settings": settings, **self.describe(maps.backward)}

    def _model(self, side: int) -> dict[str, str]:
        model = (self.source, self.target)[side]
        precision = self.placement()["source" if side == 0 else "target"]["dtype"]
        told = {} if precision == "float32" else {"dtype": precision}  # the hash is of the weights in it
        return {"class": type(model).__name__, "prefix": prefix_of(model), "sha256": self.hash_of(side), **told}


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all parameters by name."""
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def parameter_reasons(model: nn.Module, sites: Sequence[Site], reasons: Mapping[str, str]) -> dict[str, str]:
    """Parameter, or parameter#part of a packed one -> why it is not moved."""
    by_parameter = reasons_to_keep(model)
    for site in sites:
        part = site.name.partition("#")[2]
        for parameter in (site.weight, site.bias):
            if parameter is not None and site.name in reasons:
                by_parameter[parameter] = reasons[site.name]
                if part:
                    by_parameter[f"{parameter}#{part}"] = reasons[site.name]
    return by_parameter


def _placed(model: nn.Module) -> dict[str, str]:
    precisions = {str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()}
    return {"device": str(device_of(model)), "dtype": " and ".join(sorted(precisions))}
