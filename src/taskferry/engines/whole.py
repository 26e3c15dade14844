"""Both models whole in memory: fit and apply.

>>> alignment = fit(A, B, calibration)
>>> alignment.apply(TaskVector.between(A, A_tuned)).add_to(B)
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby
from pathlib import Path

from torch import nn

from taskferry.alignment import Alignment
from taskferry.collect.capture import Loss, Side, collect
from taskferry.collect.device import place_of
from taskferry.collect.maps import UNREACHED, Maps, Sums
from taskferry.collect.progress import Progress, Steps
from taskferry.collect.scale import losses_at
from taskferry.data.batch import Batch, Calibration
from taskferry.disk.files import hash_parameters
from taskferry.display.bars import with_bars
from taskferry.engines.pair import ModelPair, Moved, Work, parameter_reasons, shapes
from taskferry.errors import TaskferryError
from taskferry.layers.pairing import DepthRule, Pair, nearest_block
from taskferry.linalg.sums import CrossCovariance
from taskferry.objectives.objectives import AnyObjective, ForwardOnly
from taskferry.taskvector import TaskVector

BICO = Maps()


@with_bars
def fit(
    source: nn.Module,
    target: nn.Module,
    calibration: Calibration,
    objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None = None,
    *,
    maps: Maps = BICO,
    depth_rule: DepthRule = nearest_block,
    only: Collection[str] | None = None,
    work: Work | None = None,
    progress: Progress | bool | None = None,
) -> Alignment:
    """All maps from one frozen forward and backward pass of both models on the calibration set.

    `maps` says what is aligned on each side, and which directions are kept: `Maps(rank="full")` as in the paper.
    `only` names the source parameters that will change: no other map is solved (a LoRA on q and v needs no MLP map).
    `work` bounds the bytes of sums alive at once, and names a folder for finished groups of layers.
    `progress=True` shows bars; a function is called with what is done, the steps done and the steps in all.
    """
    work = work or Work()
    if progress is not None and not isinstance(progress, bool):
        work = replace(work, progress=progress)
    return WholePair(source, target, calibration, objective, depth_rule=depth_rule, work=work).fit(maps, only)


class WholePair(ModelPair):
    """Whole models in one process."""

    engine = "whole"

    def move(self, tau: TaskVector, maps: Maps, changed: Collection[str] | None = None) -> Moved:
        """Fit, then apply."""
        alignment = self.fit(maps, changed)
        return Moved(alignment.apply(tau), alignment, alignment.table(), provenance=alignment.provenance)

    def fit(self, maps: Maps, changed: Collection[str] | None = None) -> Alignment:
        """All maps. The pairs go in groups whose sums fit into the memory for them."""
        pairs = self.wanted(changed)
        groups = list(self._groups(pairs))
        capturing = Steps(self.work.progress, "capture", len(groups) * len(self.calibration))
        solving = Steps(self.work.progress, "solve", 2 * len(pairs))
        rests_on = repr((self.describe(maps.backward), maps))
        found: Alignment | None = None
        for number, group in enumerate(groups):
            file = self._file(number, len(groups))
            part = None if file is None else _finished(file, rests_on, group)
            if part is None:
                sums = Sums()
                collect(sums, *self._sides(maps), group, self.calibration, maps, capturing.step)
                part = sums.solve(group, maps, solving.step)
                if file is not None:
                    replace(part, provenance={"rests on": _key(rests_on, group)}).save(file)
            else:
                capturing.step(len(self.calibration))
                solving.step(2 * len(group))
            found = part if found is None else found.joined(part)
        if found is None:
            found = Sums().solve([], maps)
        elif not found.pairs and set(found.reasons.values()) == {UNREACHED}:
            names = " or of ".join(dict.fromkeys(type(model).__name__ for model in (self.source, self.target)))
            raise TaskferryError(f"the loss of {names} does not depend on any of its linear layers")
        reasons = {**self.reasons, **self.still(changed), **found.reasons}
        return replace(
            found,
            source_parameters=shapes(self.source),
            target_parameters=shapes(self.target),
            reasons=parameter_reasons(self.target, self.target_sites, reasons),
            provenance=self.provenance(maps),
        )

    def losses(self, change: TaskVector, scales: Sequence[float], samples: Calibration) -> list[float]:
        """Forward passes of the target, one scale after the other."""
        return losses_at(self.target, change, self._bound[1], samples.side(1), scales)

    def hash_of(self, side: int) -> str:
        """Made once: frozen models do not change."""
        return self._hashes[side]

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        return hash_parameters(self.source), hash_parameters(self.target)

    @cached_property
    def _bound(self) -> tuple[Loss, Loss]:
        models = (self.source, self.target)
        first, second = (
            objective.bind(model, _on_device(self.calibration.side(side), model))
            for side, (objective, model) in enumerate(zip(self.objectives, models, strict=True))
        )
        return first, second

    def _sides(self, maps: Maps) -> tuple[Side, Side]:
        if maps.backward or callable(self.objective):
            return Side(self.source, self._bound[0]), Side(self.target, self._bound[1])
        loss = ForwardOnly()
        return Side(self.source, loss.bind(self.source, ())), Side(self.target, loss.bind(self.target, ()))

    def _groups(self, pairs: Sequence[Pair]) -> Iterator[list[Pair]]:
        """Pairs that are captured together: their sums fit into the memory for them; a block is never split."""
        models = (self.source, self.target)
        size = max([4, *(p.element_size() for model in models for p in model.parameters())])
        rows, group, left = self.calibration.tokens(), list[Pair](), self.work.sums_memory
        for _, block in groupby(pairs, key=lambda pair: (pair.target.stack, pair.target.block)):
            members = list(block)
            sides = [(p.source.shape[side], p.target.shape[side]) for p in members for side in (0, 1)]
            needed = size * sum(CrossCovariance.numbers(a, b, rows) for a, b in sides)
            if group and needed > left:
                yield group
                group, left = [], self.work.sums_memory
            group += members
            left -= needed
        if group:
            yield group

    def _file(self, number: int, groups: int) -> Path | None:
        """Where a finished group is stored; a single one is not, for there would be nothing to go on with."""
        if self.work.resume is None or groups < 2:
            return None
        return self.work.resume / f"group-{number + 1}-of-{groups}.alignment"


def _finished(file: Path, rests_on: str, group: Sequence[Pair]) -> Alignment | None:
    """The maps of a group that an earlier run has stored, if they rest on the same."""
    if not file.is_file():
        return None
    try:
        part = Alignment.load(file)
    except TaskferryError:
        return None  # half-written: solve it again
    return part if part.provenance.get("rests on") == _key(rests_on, group) else None


def _key(rests_on: str, group: Sequence[Pair]) -> str:
    names = [(pair.source.name, pair.target.name) for pair in group]
    return hashlib.sha256(repr((rests_on, names)).encode()).hexdigest()


def _on_device(batches: Sequence[Batch], model: nn.Module) -> list[Batch]:
    place = place_of(model)
    return [batch.to(*place) for batch in batches]
