"""Both models whole in memory: fit and apply.

>>> alignment = fit(A, B, calibration)
>>> alignment.apply(TaskVector.between(A, A_tuned)).add_to(B)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby

from torch import Tensor, nn

from taskferry.alignment import NO_CHANGE, Alignment
from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.collect.capture import BICO, Loss, Side, collect
from taskferry.collect.device import place_of
from taskferry.collect.progress import Progress, Steps
from taskferry.collect.routing import Meeting, match_experts
from taskferry.collect.scale import losses_at
from taskferry.collect.solve import Finished, GroupSums, MapOptions, Solved, Step, solve_group
from taskferry.collect.statistics import Capture, Statistics
from taskferry.data.batch import Batch, Calibration
from taskferry.disk.files import hash_parameters
from taskferry.display.bars import with_bars
from taskferry.engines.pair import ModelPair, Moved, Work
from taskferry.layers.pairing import DepthRule, Pair, Place, nearest_block
from taskferry.objectives.defaults import AnyObjective
from taskferry.objectives.objectives import ForwardOnly
from taskferry.taskvector import TaskVector


@with_bars
def fit(
    source: nn.Module,
    target: nn.Module,
    calibration: Calibration,
    objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None = None,
    *,
    capture: Capture = BICO,
    map_rank: RankPolicy = "range",
    tolerance: float = DEFAULT_TOLERANCE,
    depth_rule: DepthRule = nearest_block,
    only: Collection[str] | None = None,
    factored: bool = False,
    work: Work | None = None,
    progress: Progress | bool | None = None,
) -> Alignment:
    """All maps from one frozen forward and backward pass of both models on the calibration set.

    `map_rank` "range" keeps the directions the calibration set has seen; "full" is exactly as in the paper.
    `only` names the source parameters that will change: no other map is solved (a LoRA on q and v needs no MLP map).
    `factored` leaves maps as two factors: for low-rank task vectors, which pass through them for less than forming R.
    `capture` says what is aligned on each side; anything but the default is another method.
    `work` bounds the bytes of sums alive at once, and names a folder for finished groups of sites.
    `progress=True` shows bars; a function is called with what is done, the steps done and the steps in all.
    """
    work = work or Work()
    tell = work.progress if progress is None or isinstance(progress, bool) else progress
    work = Work(work.sums_memory, tell, work.resume)
    pair = WholePair(source, target, calibration, objective, depth_rule=depth_rule, work=work)
    left_out = {} if only is None else unchanged(pair.pairs, only)
    return pair.fit(capture, MapOptions(map_rank, tolerance, factored), left_out)


class WholePair(ModelPair):
    """Whole models in one process."""

    engine = "whole"
    exact = False  # whether sums are added in float64, so that the number of processes does not show
    first = True  # whether this process stores and gets the maps

    def meetings(self) -> dict[Place, Meeting]:
        """By forward passes over all samples, the same in every process."""
        sides = Side(self.source, self._forward_only[0]), Side(self.target, self._forward_only[1])
        return match_experts(sides, (self.source_sites, self.target_sites), self.pairs, self.calibration)

    def hash_of(self, side: int) -> str:
        """Made once: frozen models do not change."""
        return self._hashes[side]

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        return hash_parameters(self.source), hash_parameters(self.target)

    def move(self, tau: TaskVector, capture: Capture, maps: MapOptions, left_out: Mapping[str, str]) -> Moved:
        """Fit, then apply."""
        alignment = self.fit(capture, maps, left_out)
        return Moved(self.applied(alignment, tau), alignment, alignment.table(), provenance=alignment.provenance)

    def fit(self, capture: Capture, maps: MapOptions, left_out: Mapping[str, str]) -> Alignment:
        """All maps. The pairs go in groups whose sums fit into the memory for them."""
        pairs = self.wanted(left_out)
        groups = self.groups(pairs, capture)
        share, uncounted = self.share(), self.uncounted()
        capturing = Steps(self.work.progress, "capture", len(groups) * len(share))
        solving = Steps(self.work.progress, "solve", 2 * len(pairs))
        finished = Finished(self.work.resume, len(groups), repr((self.describe(capture.backward), maps, capture)))
        found = Solved()
        for number, group in enumerate(groups):
            done = finished.load(number, group) if self.first else None
            if self.told(done is not None):
                capturing.step(len(share))
                solving.step(2 * len(group))
                found.add(done or Solved())
                continue
            statistics = Statistics(exact=self.exact)
            collect(statistics, *self._sides(capture), group, share, capture, capturing.step, uncounted)
            sums = GroupSums.of(statistics, group)
            del statistics  # each sum goes with its map
            solved = self.solve(sums, group, maps, solving.step)
            if self.first:
                finished.save(number, group, solved)
            found.add(solved)
        return self.alignment(found, capture, maps, left_out)

    def groups(self, pairs: Sequence[Pair], capture: Capture) -> list[list[Pair]]:
        """Those that are captured together: their sums fit into the memory for them; a block is never split."""
        found: list[list[Pair]] = [[]]
        left = self.work.sums_memory
        for _, block in groupby(pairs, key=_block):
            members = list(block)
            size = self.sums_bytes(members, capture)
            if found[-1] and size > left:
                found.append([])
                left = self.work.sums_memory
            found[-1] += members
            left -= size
        return found

    def sums_bytes(self, pairs: Sequence[Pair], capture: Capture) -> int:
        """Of their sums, at most."""
        widest = max((p.element_size() for model in (self.source, self.target) for p in model.parameters()), default=4)
        rows = self.calibration.tokens()
        return (8 if self.exact else max(4, widest)) * sum(capture.numbers(pair, rows) for pair in pairs)

    def _sides(self, capture: Capture) -> tuple[Side, Side]:
        losses = self._bound if capture.backward or callable(self.objective) else self._forward_only
        return Side(self.source, losses[0], self.whole(0)), Side(self.target, losses[1], self.whole(1))

    @cached_property
    def _bound(self) -> tuple[Loss, Loss]:
        first, second = (
            objective.bind(model, on_device(self.calibration.side(side), model))
            for side, (objective, model) in enumerate(zip(self.objectives, (self.source, self.target), strict=True))
        )
        return first, second

    @cached_property
    def _forward_only(self) -> tuple[Loss, Loss]:
        return ForwardOnly().bind(self.source, ()), ForwardOnly().bind(self.target, ())

    def losses(self, change: TaskVector, scales: Sequence[float], samples: Calibration) -> list[float]:
        """Forward passes of the target, one scale after the other."""
        mine = self.mine(samples.side(1))
        means = losses_at(self.target, change, self._bound[1], mine, scales) if mine else [0.0] * len(scales)
        count = sum(map(len, mine))
        return [self.total(mean * count) / samples.samples for mean in means]

    # What ranks of a job do together; one process has every sample and solves every map.

    def share(self) -> list[tuple[Batch, Batch]]:
        """This process's micro-batches."""
        return list(self.calibration)

    def mine(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Its part of some micro-batches."""
        return batches

    def uncounted(self) -> list[tuple[Batch, Batch]]:
        """Micro-batches that it runs because others wait for its part of the weights; not counted."""
        return []

    def whole(self, side: int) -> Mapping[str, Tensor]:  # noqa: ARG002
        """What a pass uses in place of the sharded parameters of a model."""
        return {}

    def applied(self, alignment: Alignment, tau: TaskVector) -> TaskVector:
        """τ moved."""
        return alignment.apply(tau)

    def told(self, value: bool) -> bool:
        """What the first process says."""
        return value

    def total(self, value: float) -> float:
        """The sum over processes."""
        return value

    def solve(self, sums: GroupSums, group: list[Pair], maps: MapOptions, step: Step) -> Solved:
        """The maps of a group."""
        return solve_group(sums, group, maps, step)


def unchanged(pairs: Sequence[Pair], changed: Collection[str]) -> dict[str, str]:
    """Target sites whose source parameters are not among those that change, with the reason."""
    names = set(changed)
    still = [p for p in pairs if p.source.weight not in names and p.source.bias not in names]
    return dict.fromkeys((p.target.name for p in still), NO_CHANGE)


def on_device(batches: Sequence[Batch], model: nn.Module) -> list[Batch]:
    """Where the model's inputs belong."""
    place = place_of(model)
    return [batch.to(*place) for batch in batches]


def _block(pair: Pair) -> tuple[str, int | None]:
    return pair.target.stack, pair.target.block
