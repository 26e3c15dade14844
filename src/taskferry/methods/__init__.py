"""Methods that move a task vector, behind one interface: one file and one decorator each.

    >>> moved = run("theseus", Job(A, B, tau, calibration))

A method is a function of a `Job` and of its settings, which are its keyword arguments: their names, types, defaults
and help appear in the command, in YAML and in the documentation, and are checked before the method runs.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import ConfigDict, ValidationError, create_model
from torch import nn

from taskferry.calibration.batch import Calibration
from taskferry.capture import Loss
from taskferry.errors import TaskferryError
from taskferry.fitting import AnyObjective, Progress, both_objectives
from taskferry.taskvector import TaskVector


class CannotMove(TaskferryError):
    """A method cannot handle this pair; the message says why in one sentence."""


@dataclass(frozen=True)
class Job:
    """What every method is given: two base models, the source's task vector, and the calibration set."""

    source: nn.Module
    target: nn.Module
    tau: TaskVector
    calibration: Calibration
    objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None = None
    progress: Progress | None = None
    keep: Path | None = None  # a folder for finished groups of sites, so that a job that was killed goes on

    def target_loss(self) -> Loss:
        """The target's loss on a micro-batch, summed over its samples."""
        objective = both_objectives(self.objective, self.source, self.target, self.calibration)[1]
        return objective.bind(self.target, self.calibration.side(1))


@dataclass(frozen=True)
class Method:
    """A registered method: its function and its settings."""

    name: str
    function: Callable[..., TaskVector]
    summary: str
    settings: Mapping[str, tuple[Any, Any, str]]  # name -> (type, default, help)

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


_METHODS: dict[str, Method] = {}


def method(function: Callable[..., TaskVector]) -> Callable[..., TaskVector]:
    """Register a function `(job, *, settings…) -> TaskVector` under its name."""
    settings = {}
    for parameter in list(inspect.signature(function, eval_str=True).parameters.values())[1:]:
        kind, text = parameter.annotation, ""
        if get_origin(kind) is Annotated:
            kind, text = get_args(kind)[0], str(get_args(kind)[1])
        settings[parameter.name] = (kind, parameter.default, text)
    name = function.__name__.replace("_", "-")
    summary = (inspect.getdoc(function) or "").split("\n")[0]
    _METHODS[name] = Method(name, function, summary, settings)
    return function


def need_equal_shapes(name: str, job: Job) -> None:
    """Refuse a pair whose parameters do not all have the same names and shapes."""
    A, B = ({n: tuple(p.shape) for n, p in m.named_parameters()} for m in (job.source, job.target))
    for parameter in [*B, *A]:
        if A.get(parameter) != B.get(parameter):
            shapes = [str(side.get(parameter, "no such parameter")) for side in (A, B)]
            raise CannotMove(
                f"{name} needs models of equal shape: {parameter} is {shapes[0]} in the source, "
                f"{shapes[1]} in the target"
            )


def methods() -> dict[str, Method]:
    """All methods by name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(_METHODS.items()))


def find(name: str) -> Method:
    """A method by name."""
    known = methods()
    if name not in known:
        raise TaskferryError(f"no method '{name}': one of {', '.join(known)}")
    return known[name]


def run(name: str, job: Job, **settings: Any) -> TaskVector:
    """Move a job's task vector by a method; the result carries its coverage."""
    chosen = find(name)
    return chosen.function(job, **chosen.checked(settings))
