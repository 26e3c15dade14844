"""What a method is, and which there are: everything that is known of a method stands in its own file.

    >>> moved = run("theseus", Job.of(A, B, tau, calibration))

A method is a function of a `Job` and of its settings, which are its keyword arguments: their names, types, defaults
and help appear in the command, in YAML and in the documentation, and are checked before the method runs. Its decorator
says what it needs and how it is shown; plans, refusals, records, cards, benchmark rows and curves read that.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ConfigDict, ValidationError, create_model
from torch import nn

from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.collect.scale import LARGEST, ROUNDS, START, ScaleCurve, choose_scale
from taskferry.collect.solve import MapOptions
from taskferry.collect.statistics import Capture, Tokens
from taskferry.data.batch import Calibration
from taskferry.engines.pair import CannotMove, ModelPair, Moved, Work, shapes
from taskferry.engines.whole import WholePair, unchanged
from taskferry.errors import TaskferryError
from taskferry.layers import family_of
from taskferry.layers.family import HEAD
from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance
from taskferry.objectives.defaults import AnyObjective
from taskferry.taskvector import TaskVector

STANDARD = "standard"  # effort: a method's own defaults
FOLDS = 2
FEW = 50  # samples: with fewer no scale above the paper's 1 is tried; where half of them are as many, one half judges
MapRank = Annotated[RankPolicy, "directions kept: those the samples show, or all"]
Tolerance = Annotated[float, "smallest singular value kept, relative to the largest"]


@dataclass(frozen=True)
class Job:
    """What every method is given: a pair of base models, wherever it lives, and the source's task vector."""

    pair: ModelPair
    tau: TaskVector
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
    ) -> Job:
        """Of two models in memory; `work` bounds the bytes of sums, as for `fit`."""
        return cls(WholePair(source, target, calibration, objective, work=work), tau)

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
        """The samples, prepared for both models."""
        return self.pair.calibration

    def maps(self, rank: RankPolicy = "range", tolerance: float = DEFAULT_TOLERANCE) -> MapOptions:
        """How maps are made: as two factors where a low-rank change alone passes through them."""
        return MapOptions(rank, tolerance, factored=self.tau.low_rank and not self.every_site)

    @property
    def few(self) -> bool:
        """Whether there are too few samples to choose more than a scale of at most 1 on them.

        With one or two samples a class a larger scale lowers their loss and harms the classes that are not among them.
        """
        return sum(map(len, self.calibration.judging(1)[0])) < FEW

    def in_folds(self) -> Job:
        """With the samples in folds: whatever is chosen is then judged on samples that did not make the maps."""
        if self.calibration.folds > 1:
            return self
        return replace(self, pair=self.pair.with_calibration(self.calibration.in_folds(FOLDS, enough=FEW)))

    @property
    def judged(self) -> int:
        """How many of the folds a scale is chosen on."""
        return self.in_folds().calibration.judged

    def met(self, tokens: Tokens) -> Tokens:
        """Whose rows make the maps, where that is asked for: only prompts with answers have tokens that predict one."""
        return "answers" if tokens == "answers" and self.calibration.answers else "all"

    @property
    def still(self) -> dict[str, str]:
        """Target sites that nothing moves to, with the reason."""
        return {} if self.every_site else unchanged(self.pair.pairs, self.tau.deltas.keys())

    @property
    def wanted(self) -> list[Pair]:
        """The pairs that are fitted."""
        return self.pair.wanted(self.still)

    def move(
        self, capture: Capture, maps: MapOptions, stage: str = "", left_out: Mapping[str, str] | None = None
    ) -> Moved:
        """Fit what is needed, and move the task vector. `left_out`: target sites that stay, with the reason."""
        capture = replace(
            capture, folds=self.calibration.folds, judged=self.calibration.judged, tokens=self.met(capture.tokens)
        )
        return self.pair.move(self.tau, capture, maps, {**self.still, **(left_out or {})}, stage)

    def losses(self, changes: Sequence[TaskVector], scales: Sequence[float]) -> list[float]:
        """The mean loss at each scale; `changes` are `Moved.judged`."""
        return [self.mean(folds) for folds in self.pair.losses(changes, scales)]

    def best_scale(self, changes: Sequence[TaskVector], rounds: int = ROUNDS) -> ScaleCurve:
        """The scale with the lowest loss; `changes` are `Moved.judged`. The untouched target is looked at once."""
        changes = self.in_shares(changes)
        before = self.pair.untouched.get(len(changes))
        known: dict[float, list[float]] = {} if before is None else {0.0: before}

        def losses(scales: Sequence[float]) -> list[float]:
            new = [scale for scale in scales if scale not in known]
            known.update(zip(new, self.pair.losses(changes, new), strict=True))
            self.pair.untouched[len(changes)] = known[0.0]
            if self.pair.work.progress is not None:
                self.pair.work.progress("scale", len(known), max(len(known), len(START) + 3 * rounds))
            return [self.mean(known[scale]) for scale in scales]

        curve = choose_scale(losses, rounds=rounds, largest=1.0 if self.few else LARGEST, together=self.pair.walks)
        if self.pair.work.progress is not None:
            self.pair.work.progress("scale", len(known), len(known))  # the search may end early
        return replace(curve, folds=tuple(zip(known[0.0], known[curve.best], strict=True)) if curve.helps else ())

    def in_shares(self, changes: Sequence[TaskVector]) -> Sequence[TaskVector]:
        """One change for all folds is judged on each; one fold in two shares, of which one may say otherwise."""
        if len(changes) == 1 and self.calibration.folds > 1:
            return [*changes] * min(FOLDS, len(self.calibration.judging(1)[0]))
        return changes

    def mean(self, folds: Sequence[float]) -> float:
        """Of the losses of all folds, by their numbers of samples."""
        sizes = [sum(map(len, batches)) for batches in self.calibration.judging(len(folds))]
        return sum(size * loss for size, loss in zip(sizes, folds, strict=True)) / sum(sizes)


@dataclass(frozen=True)
class Needs:
    """What a method asks for."""

    samples: bool = True  # whether the result depends on the calibration samples
    gradients: bool = False
    captures: int = 0  # how often both models are seen
    training: bool = False
    dense: bool = False  # its change of a LoRA is none
    whole: bool = False  # the models themselves, in the memory of one process
    maps: bool = False  # whether it leaves maps that another change can pass through
    change: bool = True  # what was learned at the source; where not, it is a start for training alone


@dataclass(frozen=True)
class TableRow:
    """A row of benchmark tables: the method with some settings."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    auto_scale: bool = False
    teacher: bool = False  # labels from the tuned source, whatever the data says
    passes: tuple[float, float] = (1.0, 1.0)  # of the source and the target, in forward and backward passes
    beats: tuple[str, ...] = ()  # rows that it must be above on the smallest benchmark
    reaches: tuple[str, ...] = ()  # rows that it must not be below there by more than a point
    curve: int | None = None  # its colour and mark in figures; None: in tables alone
    compared: bool = False  # held to the tuned target in an analysis


@dataclass(frozen=True)
class Shown:
    """How a method is shown."""

    place: int  # among the methods of a table
    card: str  # what a model card says of it, behind its name
    rows: tuple[TableRow, ...] = ()


@dataclass(frozen=True)
class Cost:
    """What a method costs beside one moved change, for the plan."""

    captures: int = 0  # each adds rows to the sums, those of augmented views as well
    solves: int = 0  # of the maps of all rows, in units of a plain one
    evaluations: float = 0  # of the target's loss, in forward passes over all samples
    folds: int = 1  # of the samples
    judged: int = 0  # folds that losses are taken on: every map is solved without each of them as well
    rough: int = 0  # plain maps of one capture that are solved on the way
    sums: type[CrossCovariance] = CrossCovariance  # of the output side
    directions: int = 0  # the most that a map of wide spaces has; 0: as many as there are
    tokens: Tokens = "all"  # whose rows make the maps
    training: float = 0  # passes of the target over all samples, with the gradients of its weights

    @property
    def versions(self) -> int:
        """Of every map: of all samples, then without each fold that is judged on."""
        return 1 + self.judged


@dataclass(frozen=True)
class Method:
    """A registered method: its function, its settings, and all that is known of it."""

    name: str
    function: Callable[..., Moved]
    summary: str
    settings: Mapping[str, tuple[Any, Any, str]]  # name -> (type, default, help)
    needs: Needs
    shown: Shown
    costs: Callable[..., Cost] | None = None
    paper: Mapping[str, Any] | None = None  # what --paper fixes, where this is the published method
    efforts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # beside its defaults: name -> settings

    def at(self, effort: str) -> dict[str, Any]:
        """Its settings at an effort; a method that has one effort alone takes the standard one."""
        if effort != STANDARD and effort not in self.efforts:
            able = ", ".join(known.name for known in methods().values() if effort in known.efforts)
            raise TaskferryError(f"the method {self.name} has no effort '{effort}': leave --effort out ({able} has it)")
        return dict(self.efforts.get(effort, {}))

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
        job.pair.untouched.clear()  # of a target that may have been another then
        moved = self.function(job, **settings)
        known = moved.provenance or job.pair.describe(self.needs.gradients)
        own = {**known.get("settings", {}), **settings}
        provenance = {**known, **moved.notes, "method": self.name, "settings": own}
        alignment = None if moved.alignment is None else replace(moved.alignment, provenance=provenance)
        return replace(moved, alignment=alignment, provenance=provenance)

    def cost(self, job: Job, given: Mapping[str, Any]) -> Cost:
        """What it will take."""
        if self.costs is not None:
            return self.costs(job, **self.checked(given))
        return Cost(self.needs.captures, min(1, self.needs.captures))


_METHODS: dict[str, Method] = {}


def method(
    *,
    needs: Needs,
    shown: Shown,
    costs: Callable[..., Cost] | None = None,
    paper: Mapping[str, Any] | None = None,
    efforts: Mapping[str, Mapping[str, Any]] | None = None,
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
        _METHODS[name] = Method(name, function, summary, settings, needs, shown, costs, paper, efforts or {})
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


def without_move() -> Method:
    """The one that moves nothing, for training from scratch."""
    return next(each for each in methods().values() if not each.needs.change)


def find(name: str) -> Method:
    """A method by name."""
    known = methods()
    if name not in known:
        close = difflib.get_close_matches(name, known, 1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise TaskferryError(f"no method '{name}'{meant}: one of {', '.join(known)}; `taskferry methods` tells of them")
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
