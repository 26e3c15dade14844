"""Checks of a fine-tune against its base, before any map is made: a wrong base of the right shape passes all others.

>>> losses = source_losses(models.pair, models.tuned)
>>> losses.acts, losses.sentence(settings)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from taskferry.collect.scale import calibration_loss, moved_by
from taskferry.data.batch import Batch
from taskferry.disk.files import read_json
from taskferry.engines.pair import ModelPair
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.integrations.hub import hub_id
from taskferry.models import Tuned, is_adapter
from taskferry.models.models import resolve
from taskferry.models.peft import CONFIG
from taskferry.objectives.objectives import Classifier, Head
from taskferry.taskvector import Delta, TaskVector

if TYPE_CHECKING:
    from taskferry.jobs.settings import FitSettings, TransferSettings

S = TypeVar("S", "TransferSettings", "FitSettings")
_COPY = re.compile("(-unsloth)?-bnb-[48]bit$")  # of a name: quantised weights of the same model, for training
MOST = 32  # samples
LEAST = 0.01  # of the base's loss: a fine-tune that takes less off does nothing for these samples


def with_base(settings: S) -> S:
    """Settings with the source base that an adapter names, where none is given."""
    if settings.source_base:
        return settings
    missing, needed = "--source-base is missing", "give the model that was tuned"
    given = settings.source_tuned
    if given is None:
        raise TaskferryError(f"{missing}: {needed}")
    folder = Path(resolve(given))
    if not is_adapter(folder):
        raise TaskferryError(f"{missing}: {given} is no adapter, whose {CONFIG} would name it; {needed}")
    named = base_of(folder)
    if named is None:
        raise TaskferryError(f"{missing}: {folder / CONFIG} names no base_model_name_or_path; {needed}")
    if _COPY.search(named.casefold()):
        raise TaskferryError(f"{missing}: {given} names {named}, a quantised copy; give the 16-bit original of it")
    try:
        resolve(named)
    except TaskferryError as error:
        raise TaskferryError(f"{missing}: {given} names {named}, which is not here ({error}); {needed}") from error
    return settings.model_copy(update={"source_base": named})


def base_of(folder: Path) -> str | None:
    """The base model that an adapter names, with `@revision` where it is one of a hub."""
    config = read_json(folder / CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        return None
    return f"{name}@{revision}" if revision and hub_id(name) == name else name


def base_doubts(settings: TransferSettings | FitSettings, found: Mapping[str, str]) -> list[str]:
    """Where an adapter names another base than the one that is given; `found` is where the models lie."""
    tuned = found.get("source_tuned")
    named = base_of(Path(tuned)) if tuned is not None and is_adapter(Path(tuned)) else None
    if named is None:
        return []
    source, target = ({settings.source_base, found["source_base"]}, {settings.target_base, found["target_base"]})
    for alike in (_same_place, _same_name):
        if any(alike(named, each) for each in source):
            return []
        if any(alike(named, each) for each in target):
            return [
                f"{settings.source_tuned} was made on {named}, as its {CONFIG} says, which is --target-base here: "
                "--source-base and --target-base look swapped"
            ]
    return [
        f"{settings.source_tuned} was made on {named}, as its {CONFIG} says, and --source-base is "
        f"{settings.source_base}: give the base that it was made on, unless both are the same model"
    ]


def _same_place(one: str, other: str) -> bool:
    return Path(one).resolve() == Path(other).resolve()


def _same_name(one: str, other: str) -> bool:
    return not _names(one).isdisjoint(_names(other))


def _names(given: str) -> set[str]:
    """Names of a model: the last part of its path, or of its name on a hub."""
    path = Path(hub_id(given) or given)
    names = {path.name, path.resolve().name} - {""}
    if path.parent.name == "snapshots":  # of the hub's cache: models--org--name/snapshots/commit
        names = {path.parent.parent.name.rpartition("--")[2]}
    return {_COPY.sub("", name.casefold()) for name in names}


@dataclass(frozen=True)
class SourceLosses:
    """Mean losses of the source base and of the tuned source on the same samples."""

    base: float
    tuned: float
    unit: str
    samples: int

    @property
    def acts(self) -> bool:
        """True where the fine-tune beats its base; a loss that is no number beats nothing."""
        return self.tuned <= (1.0 - LEAST) * self.base

    def sentence(self, settings: TransferSettings) -> str:
        """Say both losses, and what to check."""
        return (
            f"{settings.source_tuned} does nothing on the samples: on {self.samples} of them the loss of "
            f"{settings.source_base} is {self.base:.4g} {self.unit} without it and {self.tuned:.4g} with it, where it "
            f"should fall by {LEAST:.0%} at least; check that --source-base is the model that was tuned, and that the "
            "samples are of the task"
        )

    def record(self) -> dict[str, Any]:
        """Both losses."""
        return {"loss_base": self.base, "loss_tuned": self.tuned, "unit": self.unit, "samples": self.samples}


def source_losses(pair: ModelPair, tuned: Tuned) -> SourceLosses | None:
    """The losses of the source by its own objective; None where that is not measured.

    Heads that are made from the samples fit any features, so their loss says little of a base; block by block it would
    take two more walks over the weights.
    """
    objective = pair.objectives[0]
    if pair.engine != WholePair.engine or (isinstance(objective, Classifier) and objective.fitted):
        return None
    change = _change(pair, tuned)
    if change is None:
        return None
    model, batches = pair.source, list(_first(pair.calibration.side(0), MOST))
    samples, units = sum(map(len, batches)), max(1, objective.units(pair.source, batches))
    found = []
    with moved_by(model, change) as set_scale:
        for scale in (0.0, 1.0):
            set_scale(scale)
            loss = objective.bind(model, batches)  # again: a text tower that was tuned makes another zero-shot head
            found.append(calibration_loss(model, loss, batches) * samples / units)
    return SourceLosses(found[0], found[1], objective.unit, samples)


def _change(pair: ModelPair, tuned: Tuned) -> TaskVector | None:
    """The change of the source, with the head that was trained beside it; None where that head does not fit."""
    if not isinstance(pair.objectives[0], Head) or not tuned.beside:
        return tuned.tau
    own = dict(pair.source.named_parameters())
    saved = {} if tuned.adapter is None else tuned.adapter.saved
    if any(name not in saved or name not in own or own[name].shape != saved[name].shape for name in tuned.beside):
        return None
    heads: dict[str, Delta] = {name: tensor.to(own[name]) - own[name].detach() for name, tensor in saved.items()}
    return TaskVector({**tuned.tau.deltas, **heads})


def _first(batches: Sequence[Batch], most: int) -> Iterator[Batch]:
    """The first micro-batches with so many samples; those of pairs stay whole, which is part of their loss."""
    for batch in batches:
        if most <= 0:
            return
        yield batch if len(batch) <= most or batch.texts > 1 else batch.take(range(most))
        most -= len(batch)
