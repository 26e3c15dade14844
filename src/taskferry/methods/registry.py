"""What a method is, and which there are: everything that is known of a method stands in its own file.

    >>> moved = run("theseus", Job.of(A, B, tau, calibration))

A method is a function of a `Job` and of its settings, which are its keyword arguments: their names, types, defaults
and help appear in the command, in YAML and in the documentation, and are checked before the method runs. Its decorator
says what it needs and what a card says of it.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ConfigDict, ValidationError, create_model
from torch import nn

from taskferry.choices import RankPolicy
from taskferry.collect.maps import Maps
from taskferry.collect.progress import Steps
from taskferry.collect.scale import EVALUATIONS, LARGEST, ScaleCurve, choose_scale
from taskferry.data.batch import Calibration
from taskferry.engines.pair import CannotMove, ModelPair, Moved, Work, shapes
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.layers.family import HEAD
from taskferry.layers.pairing import Pair
from taskferry.objectives.objectives import AnyObjective
from taskferry.taskvector import TaskVector

FEW = 50  # samples: with fewer no scale above the paper's 1 is tried
MapRank = Annotated[RankPolicy, "directions kept: those the samples show, or all"]
Tolerance = Annotated[float, "smallest singular value kept, relative to the largest"]


@dataclass(frozen=True)
class Job:
    """What every method is given: a pair of base models, wherever it lives, and the source's task vector."""

    pair: ModelPair  # its samples make the change
    tau: TaskVector
    held_out: Calibration | None = None  # samples that a scale is chosen on; those of the pair where there are none
    every_site: bool = False  # maps for any fine-tune of the source, to be saved, and not for this one alone

    @classmethod
    def of(
        cls,
        source: nn.Module,
        target: nn.Module,
        tau: TaskVector,
        calibration: Calibration,
        objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None = None,
        work: Work | None = None,
        held_out: Calibration | None = None,
    ) -> Job:
        """Two models in memory; `work` bounds the bytes of sums, as for `fit`."""
        return cls(WholePair(source, target, calibration, objective, work=work), tau, held_out)

    @property
    def source(self) -> nn.Module:
        """The source's base."""
        return self.pair.source

    @property
    def target(self) -> nn.Module:
        """The target's base."""
        return self.pair.target

    @property
    def calibration(self) -> Calibration:
        """The samples that the change is made from, prepared for both models."""
        return self.pair.calibration

    @property
    def judging(self) -> Calibration:
        """The samples that losses are taken on."""
        return self.pair.calibration if self.held_out is None else self.held_out

    @property
    def changed(self) -> Collection[str] | None:
        """Names of the source's parameters that change; None where maps are for any fine-tune."""
        return None if self.every_site else self.tau.deltas.keys()

    @property
    def wanted(self) -> list[Pair]:
        """The pairs that get maps."""
        return self.pair.wanted(self.changed)

    def move(self, maps: Maps) -> Moved:
        """Make the maps that are needed, as two factors where a low-rank change alone passes through them; move."""
        maps = replace(maps, factored=self.tau.low_rank and not self.every_site)
        return self.pair.move(self.tau, maps, self.changed)

    def losses(self, change: TaskVector, scales: Sequence[float]) -> list[float]:
        """The mean loss at each scale, on the samples held out."""
        return self.pair.losses(change, scales, self.judging)

    def best_scale(self, change: TaskVector) -> ScaleCurve:
        """The scale with the lowest loss on the samples held out.

        With one or two samples a class a scale above 1 lowers their loss and harms the classes that are not among them.
        """
        steps = Steps(self.pair.work.progress, "scale", EVALUATIONS)

        def losses(scales: Sequence[float]) -> list[float]:
            found = self.losses(change, scales)
            steps.step(len(scales))
            return found

        few = self.calibration.samples + (0 if self.held_out is None else self.held_out.samples) < FEW
        curve = choose_scale(losses, largest=1.0 if few else LARGEST)
        steps.end()
        return curve


@dataclass(frozen=True)
class Needs:
    """What a method asks for."""

    samples: bool = True  # whether the result depends on the calibration samples
    gradients: bool = False
    dense: bool = False  # its change of a LoRA is none
    whole: bool = False  # the models themselves, in the memory of one process
    maps: bool = False  # whether it leaves maps that another change can pass through


@dataclass(frozen=True)
class Method:
    """A registered method: its function, its settings, and all that is known of it."""

    name: str
    function: Callable[..., Moved]
    summary: str
    settings: Mapping[str, tuple[Any, Any, str]]  # name -> (type, default, help)
    needs: Needs
    card: str  # what a model card says of it, behind its name
    paper: Mapping[str, Any] | None = None  # what --paper fixes, where this is the published method

    def checked(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Settings with defaults filled in; unknown names and wrong values fail, all together."""
        fields: dict[str, Any] = {name: (kind, default) for name, (kind, default, _) in self.settings.items()}
        model = create_model(f"{self.name} settings", __config__=ConfigDict(extra="forbid"), **fields)
        try:
            return dict(model(**given))
        except ValidationError as error:
            wrong = []
            for item in error.errors():
                name = ".".join(map(str, item["loc"]))
                unknown = item["type"] == "extra_forbidden"
                known = ", ".join(self.settings) or "none"
                wrong.append(f"unknown setting '{name}' (known: {known})" if unknown else f"{name}: {item['msg']}")
            raise TaskferryError(f"method {self.name}: {'; '.join(wrong)}") from error

    def refuse(self, engine: str, *, save: bool = False) -> None:
        """One sentence where the method cannot run on an engine, before any work."""
        if self.needs.whole and engine != WholePair.engine:
            raise TaskferryError(
                f"the method {self.name} needs both models whole in one process, it does not run on the engine "
                f"'{engine}': leave that out, or choose one of {', '.join(m.name for m in with_maps())}"
            )
        if save and not self.needs.maps:
            raise TaskferryError(
                f"the method {self.name} leaves no maps to save: use `taskferry transfer`, or fit with one of "
                f"{', '.join(m.name for m in with_maps())}"
            )

    def move(self, job: Job, given: Mapping[str, Any]) -> Moved:
        """Run it; what it moved carries its coverage, and where it came from."""
        self.refuse(job.pair.engine)
        settings = self.checked(given)
        moved = self.function(job, **settings)
        known = moved.provenance or job.pair.describe(self.needs.gradients)
        own = {**known.get("settings", {}), **settings}
        provenance = {**known, **moved.notes, "method": self.name, "settings": own}
        alignment = None if moved.alignment is None else replace(moved.alignment, provenance=provenance)
        return replace(moved, alignment=alignment, provenance=provenance)


_METHODS: dict[str, Method] = {}


def method(
    *, needs: Needs, card: str = "nothing was trained", paper: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Moved]], Callable[..., Moved]]:
    """Register a function `(job, *, settings…) -> Moved` under its name."""

    def register(function: Callable[..., Moved]) -> Callable[..., Moved]:
        settings = {}
        for parameter in list(inspect.signature(function, eval_str=True).parameters.values())[1:]:
            kind, text = parameter.annotation, ""
            if get_origin(kind) is Annotated:
                kind, text, *bounds = get_args(kind)
                for bound in bounds:
                    kind = Annotated[kind, bound]
            settings[parameter.name] = (kind, parameter.default, text)
        name = function.__name__.replace("_", "-")
        summary = (inspect.getdoc(function) or "").split("\n")[0]
        _METHODS[name] = Method(name, function, summary, settings, needs, card, paper)
        return function

    return register


def methods() -> dict[str, Method]:
    """All methods by name."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"{__package__}.{module.name}")
    return dict(sorted(_METHODS.items()))


def with_maps() -> list[Method]:
    """Those whose maps can be saved, and that run on every engine."""
    return [known for known in methods().values() if known.needs.maps]


def published() -> Method:
    """The paper's own."""
    return next(known for known in methods().values() if known.paper is not None)


def find(name: str) -> Method:
    """A method by name."""
    known = methods()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise TaskferryError(f"no method '{name}'{meant}: one of {', '.join(known)}")
    return known[name]


def run(name: str, job: Job, **settings: Any) -> Moved:
    """Move a job's task vector by a method."""
    return find(name).move(job, settings)


def need_equal_shapes(name: str, job: Job) -> dict[str, str]:
    """Refuse a pair whose parameters differ in name or shape; returns the changes that stay behind, with the reason.

    Only what moves has to be equal: what the task vector changes, and every layer that could take a change. A head
    that differs stays as it is.
    """
    A, B = shapes(job.source), shapes(job.target)
    heads = {n for model in (job.source, job.target) for n in shapes(model) if family_of(model).is_head(n)}
    layers = {n for pair in job.pair.pairs for site in (pair.source, pair.target) for n in (site.weight, site.bias)}
    for parameter in (n for n in [*B, *A] if n in layers | job.tau.deltas.keys() and n not in heads):
        if A.get(parameter) != B.get(parameter):
            found = [str(side.get(parameter, "no such parameter")) for side in (A, B)]
            raise CannotMove(
                f"{name} needs models of equal shape: {parameter} is {found[0]} in the source, {found[1]} in the target"
            )
    return {n: HEAD for n in job.tau.deltas if A.get(n) != B.get(n)}
