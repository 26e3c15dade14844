"""Find the base of a fine-tune, and check the two against each other: a wrong base of the right shape passes all else.

>>> config = with_base(config)                      # an adapter names its base
>>> losses = source_losses(pair, tuned)
>>> losses.acts
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from taskferry.collect.scale import calibration_loss, moved_by
from taskferry.config import FitSettings, TransferSettings
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

C = TypeVar("C", TransferSettings, FitSettings)
_COPY = re.compile("(-unsloth)?-bnb-[48]bit$")  # of a name: quantised weights of the same model, for training
MOST = 32  # samples
LEAST = 0.01  # of the base's loss: a fine-tune that takes less off does nothing for these samples


def with_base(config: C) -> C:
    """Take the source base that an adapter names, where none is given."""
    if config.source_base:
        return config
    missing, needed = "--source-base is missing", "give the model that was tuned"
    given = config.source_tuned
    if given is None:
        raise TaskferryError(f"{missing}: {needed}")
    folder = Path(resolved("source_tuned", given))
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
    return config.model_copy(update={"source_base": named})


def resolved(name: str, given: str) -> str:
    """Where a model lies; a mistake names its option."""
    try:
        return resolve(given)
    except TaskferryError as error:
        raise TaskferryError(f"--{name.replace('_', '-')}: {error}") from error


def base_of(folder: Path) -> str | None:
    """The base model that an adapter names, with `@revision` where it is one of a hub."""
    config = read_json(folder / CONFIG)
    name, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(name, str) or not name:
        return None
    return f"{name}@{revision}" if revision and hub_id(name) == name else name


def base_doubts(config: TransferSettings | FitSettings, found: Mapping[str, str]) -> list[str]:
    """Say where an adapter names another base than the one that is given; `found` is where the models lie."""
    tuned = found.get("source_tuned")
    named = base_of(Path(tuned)) if tuned is not None and is_adapter(Path(tuned)) else None
    if named is None or _alike(named, config.source_base, found["source_base"]):
        return []
    said = f"{config.source_tuned} was made on {named}, as its {CONFIG} says"
    if _alike(named, config.target_base, found["target_base"]):
        return [f"{said}, which is --target-base here: --source-base and --target-base look swapped"]
    return [
        f"{said}, and --source-base is {config.source_base}: give the base that it was made on, unless both are the "
        "same model"
    ]


def _alike(named: str, *given: str) -> bool:
    """True for the same place, or for the same name of a model on a hub or in a folder."""
    places = Path(named).resolve() in {Path(each).resolve() for each in given}
    return places or any(not _names(named).isdisjoint(_names(each)) for each in given)


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

    loss_base: float
    loss_tuned: float
    unit: str
    samples: int

    @property
    def acts(self) -> bool:
        """True where the fine-tune beats its base; a loss that is no number beats nothing."""
        return self.loss_tuned <= (1.0 - LEAST) * self.loss_base

    def sentence(self, config: TransferSettings) -> str:
        """Say both losses, and what to check."""
        return (
            f"{config.source_tuned} does nothing on the samples: on {self.samples} of them the loss of "
            f"{config.source_base} is {self.loss_base:.4g} {self.unit} without it and {self.loss_tuned:.4g} with it, "
            f"where it should fall by {LEAST:.0%} at least; check that --source-base is the model that was tuned, and "
            "that the samples are of the task"
        )

    def record(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def source_losses(pair: ModelPair, tuned: Tuned) -> SourceLosses | None:
    """The losses of the source by its own objective; None where that is not measured.

    Heads that are made from the samples fit any features, so their loss says little of a base; block by block it would
    take two more walks over the weights.
    """
    objective = pair.objectives[0]
    if pair.engine != WholePair.engine or (isinstance(objective, Classifier) and objective.fitted):
        return None
    change = _with_head(pair, tuned)
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


def _with_head(pair: ModelPair, tuned: Tuned) -> TaskVector | None:
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
