"""Both models whole in memory: fit and apply.

>>> alignment = fit(A, B, calibration)
>>> alignment.apply(TaskVector.between(A, A_tuned)).add_to(B)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from torch import Tensor, nn

from taskferry.alignment import NO_CHANGE, Alignment
from taskferry.choices import DEFAULT_TOLERANCE, RankPolicy
from taskferry.collect.capture import BICO, Loss, Side, collect
from taskferry.collect.device import place_of
from taskferry.collect.progress import Progress, Steps
from taskferry.collect.routing import Meeting, match_experts
from taskferry.collect.scale import losses_at, moved_by
from taskferry.collect.solve import Finished, GroupSums, MapOptions, Solved, Step, solve_group
from taskferry.collect.statistics import Capture, Point, Statistics
from taskferry.data.batch import Batch, Calibration
from taskferry.disk.files import hash_parameters
from taskferry.display.bars import with_bars
from taskferry.engines.memory import freed
from taskferry.engines.pair import ModelPair, Moved, Work, in_place, shapes
from taskferry.layers.pairing import DepthRule, Pair, Place, nearest_block
from taskferry.objectives.defaults import AnyObjective
from taskferry.objectives.objectives import Classifier, ForwardOnly, teacher_labels
from taskferry.taskvector import TaskVector, match_names


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
    by_block = True  # whether the maps of one block can be solved before those of the next
    _sums: tuple[str, list[str], Statistics] | None = None  # of the last single group, for a fit that adds a point

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

    def move(
        self, tau: TaskVector, capture: Capture, maps: MapOptions, left_out: Mapping[str, str], stage: str = ""
    ) -> Moved:
        """Fit, then apply.

        Only the maps of all samples stay, and not where another point will be added: all others are let go as soon as
        the change has passed through them.
        """
        stays, names = Solved(), match_names(tau.deltas, shapes(self.source))
        passed = [TaskVector({}) for _ in range(capture.versions)]
        for version, solved in self._solved(capture, maps, left_out, stage):
            if version == 0 and not capture.again:
                stays.add(solved)
                continue
            part = in_place(solved.alignment(shapes(self.source), shapes(self.target), {}, {}), capture)
            takes = {name for pair in part.pairs for name in (pair.source.weight, pair.source.bias)}
            passed[version] += self.applied(part, tau.take(name for name in tau.deltas if names[name] in takes))
            size = solved.bytes
            del part, solved  # before the next are made
            freed(size)
        if capture.again:
            return Moved(passed[0])
        alignment = self.alignment(stays, capture, maps, left_out)
        moved = self.applied(alignment, tau)
        return Moved(moved, tuple(passed[1:]), alignment, alignment.table(), provenance=alignment.provenance)

    def fit(self, capture: Capture, maps: MapOptions, left_out: Mapping[str, str]) -> Alignment:
        """The maps of all samples."""
        stays = Solved()
        for version, solved in self._solved(capture, maps, left_out):
            if version == 0:
                stays.add(solved)
        return self.alignment(stays, capture, maps, left_out)

    def _solved(
        self, capture: Capture, maps: MapOptions, left_out: Mapping[str, str], stage: str = ""
    ) -> Iterator[tuple[int, Solved]]:
        """Maps with the number of their version: 0 of all samples, the others without a fold each.

        The pairs go in groups whose sums fit into the memory for them, each seen at every point of the capture.
        """
        pairs = self.wanted(left_out)
        groups = self.groups(pairs, capture)
        share, uncounted = self.share(), self.uncounted()
        suffix = f", {stage}" if stage else ""
        known = 0 if self._known(groups, capture) is None else len(capture.points) - 1
        passes = (len(capture.points) - known) * len(share)
        capturing = Steps(self.work.progress, f"capture{suffix}", len(groups) * passes)
        solving = Steps(self.work.progress, f"solve{suffix}", capture.versions * 2 * len(pairs))
        rests_on = repr((self.describe(capture.backward), maps, capture.key()))
        folder = self.work.resume if self.work.resume is None or not stage else self.work.resume / stage
        finished = Finished(folder, len(groups), rests_on)
        # Where maps are let go at all; a single group is not stored either.
        by_block = self.by_block and len(groups) == 1 and (capture.again or capture.versions > 1)
        for number, group in enumerate(groups):
            done = [finished.load(number, group, i) if self.first else None for i in range(capture.versions)]
            if self.told(None not in done):
                capturing.step(passes)
                solving.step(capture.versions * 2 * len(group))
                for version in range(capture.versions):
                    yield version, done[version] or Solved()
                    done[version] = None
                continue
            done.clear()
            # A group's sums live in this call only: two groups never exist at once.
            sums = self._capture(group, capture, share, uncounted, capturing.step, only=len(groups) == 1)
            for version in reversed(range(capture.versions)):  # the last to be solved lets go of the sums of all folds
                for part, some in _parts(sums.pop(), group, by_block):
                    found = self.solve(some, part, maps, solving.step)
                    if self.first:
                        finished.save(number, group, found, version)
                    yield version, found
                    del found, some

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
        rows = self.calibration.tokens(capture.folds, capture.tokens == "answers")
        return (8 if self.exact else max(4, widest)) * sum(capture.numbers(pair, rows) for pair in pairs)

    def _capture(
        self,
        group: list[Pair],
        capture: Capture,
        share: Sequence[tuple[Batch, Batch]],
        uncounted: Sequence[tuple[Batch, Batch]],
        on_batch: Callable[[], None],
        only: bool,
    ) -> list[GroupSums]:
        """The sums of a group at all points, of all samples and without each fold.

        Those of a single group stay, for the fit that adds a point to them.
        """
        statistics = self._known([group], capture)
        points = capture.points if statistics is None else capture.points[-1:]
        self._sums = None
        statistics = statistics or Statistics(capture=capture, exact=self.exact)
        for point in points:
            with self._at(point):
                collect(statistics, *self._sides(capture), group, share, capture, on_batch, uncounted)
        if only and capture.again:
            self._sums = (replace(capture, again=False).key(), [pair.target.name for pair in group], statistics)
        return [GroupSums.of(each, group) for each in statistics.versions(capture)]

    def _known(self, groups: list[list[Pair]], capture: Capture) -> Statistics | None:
        """Sums that lack the last point of a capture alone."""
        if self._sums is None or len(groups) != 1 or len(capture.points) != 2:
            return None
        seen, names, statistics = self._sums
        before = replace(capture, points=capture.points[:-1]).key()
        return statistics if (seen, names) == (before, [pair.target.name for pair in groups[0]]) else None

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

    def _at(self, point: Point) -> ExitStack:
        stack = ExitStack()
        for model, tau in ((self.source, point.source), (self.target, point.target)):
            if len(tau):
                stack.enter_context(moved_by(model, tau))(1.0)
        return stack

    def losses(self, changes: Sequence[TaskVector], scales: Sequence[float]) -> list[list[float]]:
        """Forward passes of the target, one scale after the other."""
        found = []
        for tau, batches in zip(changes, self.calibration.judging(len(changes)), strict=True):
            mine = self.mine(batches)
            means = losses_at(self.target, tau, self._bound[1], mine, scales) if mine else [0.0] * len(scales)
            count, samples = sum(map(len, mine)), sum(map(len, batches))
            found.append([self.total(mean * count) / samples for mean in means])
        return [list(of_scale) for of_scale in zip(*found, strict=True)]

    def teacher(self, tau: TaskVector, head: Classifier, calibration: Calibration) -> Tensor:
        """By forward passes of the tuned source."""
        with moved_by(self.source, tau) as set_scale:
            set_scale(1.0)
            return teacher_labels(self.source, calibration.side(0), head)

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


def _parts(sums: GroupSums, group: list[Pair], by_block: bool) -> Iterator[tuple[list[Pair], GroupSums]]:
    """A group block by block, where no two blocks read the same: one sum is solved once."""
    blocks = [list(block) for _, block in groupby(group, key=_block)]
    inputs = [{sums.reads[p.target.name] for p in block if p.target.name in sums.reads} for block in blocks]
    if not by_block or sum(map(len, inputs)) > len(set().union(*inputs)):
        blocks = [group]
    for block in blocks:
        yield block, sums.take({pair.target.name for pair in block})


def _block(pair: Pair) -> tuple[str, int | None]:
    return pair.target.stack, pair.target.block
