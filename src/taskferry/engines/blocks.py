"""Two models larger than memory: one block of each at a time (paper, section 4, on one block of each model).

    >>> pair = BlockPair(LazyModel(…), LazyModel(…), calibration, objectives, scratch=folder)
    >>> pair.move(tau, Capture())

Both models are run forward once, their block inputs kept on disk. Then from the last block of the target to the first:
its weights and those of its source block are read, the ordinary capture runs on them, the maps are solved, the change
of the block is moved, and everything is let go. Since ⟨output of a block, gradient there⟩ has the gradient of the whole
loss, the sums are those of the whole models. Changes that are not low-rank stay on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from taskferry.alignment import Alignment
from taskferry.collect.capture import Loss, collect
from taskferry.collect.progress import Steps
from taskferry.collect.solve import GroupSums, MapOptions, solve_group
from taskferry.collect.statistics import Capture, Statistics
from taskferry.coverage import Coverage, Row
from taskferry.data.batch import Batch, Calibration
from taskferry.engines.blockwise import BlockwiseModel, forward
from taskferry.engines.lazy import DiskDeltas, LazyModel
from taskferry.engines.memory import give_back
from taskferry.engines.pair import ModelPair, Moved, parameter_reasons
from taskferry.errors import TaskferryError
from taskferry.layers.pairing import Pair
from taskferry.objectives.defaults import AnyObjective
from taskferry.objectives.objectives import ForwardOnly, Objective
from taskferry.taskvector import Delta, TaskVector


class BlockPair(ModelPair):
    """Two models on disk."""

    engine = "blockwise"
    walks = True

    def __init__(
        self,
        source: LazyModel,
        target: LazyModel,
        calibration: Calibration,
        objective: AnyObjective | tuple[AnyObjective, AnyObjective] | None = None,
        *,
        scratch: Path,
        **options: Any,
    ) -> None:
        super().__init__(source.model, target.model, calibration, objective, **options)
        self.lazy, self.scratch = (source, target), scratch

    def hash_of(self, side: int) -> str:
        """Read once."""
        return self._hashes[side]

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        return self.lazy[0].hash(), self.lazy[1].hash()

    def placement(self) -> dict[str, dict[str, str]]:
        """Of a block while it is in memory."""
        names = [str(lazy.precision).removeprefix("torch.") for lazy in self.lazy]
        placed = [{"device": str(lazy.device), "dtype": n} for lazy, n in zip(self.lazy, names, strict=True)]
        return {"source": placed[0], "target": placed[1]}

    def run(
        self,
        side: int,
        folder: Path,
        change: TaskVector | None = None,
        batches: Sequence[Batch] | None = None,
        *,
        objective: Objective | None = None,
    ) -> BlockwiseModel:
        """One model, maybe with a change, on its side of the calibration set or on other batches."""
        lazy = self.lazy[side] if change is None else self.lazy[side].plus(change)
        sites = (self.source_sites, self.target_sites)[side]
        batches = self.calibration.side(side) if batches is None else batches
        own = Path(tempfile.mkdtemp(dir=folder))
        heads = self._heads[side] if objective is None else None
        return BlockwiseModel(lazy, sites, batches, objective or self.objectives[side], own, heads)

    @cached_property
    def _heads(self) -> tuple[list[Loss], list[Loss]]:
        """Bound once, at the base models: a head may be made from what they say of the samples."""
        return [], []

    def move(self, tau: TaskVector, capture: Capture, maps: MapOptions, left_out: Mapping[str, str]) -> Moved:
        """Fit and move block by block."""
        pairs = self.wanted(left_out)
        loss = None if capture.backward or callable(self.objective) else ForwardOnly()
        moving = _Moving(tau, DiskDeltas(Path(tempfile.mkdtemp(dir=self.scratch))))
        with self._folder() as folder:
            source, target = runs = self.run(0, folder, objective=loss), self.run(1, folder, objective=loss)
            walking = Steps(self.work.progress, "forward", sum(len(run.blocks) for run in runs))
            for run in runs:
                forward([run], backward=capture.backward, on_block=walking.step)
            blocks = Steps(self.work.progress, "blocks", len(target.blocks))
            for part in _align(source, target, self.calibration, pairs, capture, maps, blocks.step):
                moving.take(part)
                del part  # before the next is solved
            del runs, source, target
        give_back()  # sums and maps of the last block
        moved = self._gathered(moving, left_out, self._unused(moving))
        sites = list(reversed(moving.sites))
        return Moved(moved, None, sites, provenance=self.provenance(capture, maps))

    def _unused(self, moving: _Moving) -> dict[str, str]:
        """Changes of the source that no block looked at, with the reason."""
        tau = moving.tau
        left = [name for name in self.lazy[0].shapes if name not in moving.seen and name in tau.deltas]
        return dict.fromkeys(filter(tau.changed, left), "no site of the target takes it")

    def _gathered(self, moving: _Moving, left_out: Mapping[str, str], unused: Mapping[str, str]) -> TaskVector:
        """All blocks of a change, with a row of coverage for every parameter."""
        moving.unused |= unused
        reasons = {**self.reasons, **left_out, **moving.reasons}
        coverage = moving.coverage(self.lazy[1].shapes, parameter_reasons(self.target, self.target_sites, reasons))
        return TaskVector(moving.deltas if moving.tau.low_rank else moving.disk, coverage)

    def losses(self, change: TaskVector, scales: Sequence[float], samples: Calibration) -> list[float]:
        """All of them in one walk over the weights."""
        with self._folder() as folder:
            self._bind_heads(folder)
            runs = [self.run(1, folder, change * scale if scale else None, samples.side(1)) for scale in scales]
            forward(runs, backward=False, store=False)
        return [run.loss / samples.samples for run in runs]

    def _bind_heads(self, folder: Path) -> None:
        """Heads are made at the base models, on all samples."""
        if not self._heads[1]:
            forward([self.run(1, folder)], backward=False, store=False)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            yield Path(folder)


@dataclass
class _Moving:
    """A task vector on its way, block by block."""

    tau: TaskVector
    disk: DiskDeltas
    deltas: dict[str, Delta] = field(default_factory=dict)  # low-rank ones
    rows: dict[str, Row] = field(default_factory=dict)
    unused: dict[str, str] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)  # parameters of the source that were looked at
    reasons: dict[str, str] = field(default_factory=dict)
    sites: list[dict[str, Any]] = field(default_factory=list)

    def take(self, part: Alignment) -> None:
        """Move the changes of one block."""
        names = list(part.source_parameters)
        self.seen |= set(names)
        moved = part.apply(self.tau.take(names))
        self.sites += part.table()
        self.reasons |= part.reasons
        if moved.coverage is not None:
            self.rows |= {row.parameter: row for row in moved.coverage.rows}
            self.unused |= moved.coverage.unused
        if self.tau.low_rank:
            self.deltas |= moved.deltas
        else:
            self.disk.put(moved)

    def coverage(self, shapes: Mapping[str, tuple[int, ...]], why: Mapping[str, str]) -> Coverage:
        """One row for every parameter of the target."""
        rows = []
        for name, shape in shapes.items():
            row = self.rows.get(name)
            if row is None or row.status == "kept":
                row = Row(name, shape, "kept", why.get(name, row.reason if row else "no site uses it"))
            rows.append(row)
        return Coverage(tuple(rows), dict(sorted(self.unused.items())))


def _align(
    source: BlockwiseModel,
    target: BlockwiseModel,
    calibration: Calibration,
    pairs: list[Pair],
    capture: Capture,
    maps: MapOptions,
    done: Callable[[], None],
) -> Iterator[Alignment]:
    """The maps of each target block, last block first, then of what stands outside them; `done` counts blocks."""
    at_A, at_B = ({path: j for j, path in enumerate(run.blocks)} for run in (source, target))
    by_block: dict[int | None, list[Pair]] = {}
    for pair in pairs:
        by_block.setdefault(_block_of(pair.target.weight, at_B), []).append(pair)
    takes = {j: {_block_of(pair.source.weight, at_A) for pair in mine} for j, mine in by_block.items()}
    at = len(source.blocks) - 1  # the source block whose output gradient is known
    for j in reversed(range(len(target.blocks))):
        mine = by_block.get(j, [])
        blocks = takes.get(j, set())
        if None in blocks or len(blocks) > 1:
            raise TaskferryError(
                f"block {j} takes from blocks {sorted(map(str, blocks))} of the source: not block by block"
            )
        wanted = next(iter(blocks), at)
        if capture.backward:
            while wanted is not None and at > wanted:
                later = any(at in takes.get(k, ()) for k in range(j))  # kinds of block may cross in depth
                _skip(source, at, later)
                at -= 1
        if mine:
            following = next(iter(takes.get(j - 1, ())), None)
            if capture.backward and following is not None:
                following = max(at, following)  # the way there leads through block `at`
            after = (following, j - 1 if j and (capture.backward or j - 1 in by_block) else None)
            yield _solve(source, target, calibration, mine, capture, maps, (wanted or 0, j), after)
        if capture.backward:
            if not mine:
                with target.block(j):
                    target.pull(j)
            target.step(j)
        done()
    outside = by_block.get(None, [])
    if outside:
        while capture.backward and at >= 0:
            _skip(source, at)
            at -= 1
        yield _solve(source, target, calibration, outside, capture, maps, None)


def _skip(run: BlockwiseModel, j: int, later: bool = False) -> None:
    """One block further down; the gradient at the output of one that is asked for later is stored."""
    if later:
        run.keep(j)
    with run.block(j):
        run.pull(j)
    run.step(j)


def _solve(
    source: BlockwiseModel,
    target: BlockwiseModel,
    calibration: Calibration,
    pairs: list[Pair],
    capture: Capture,
    maps: MapOptions,
    blocks: tuple[int, int] | None,
    after: tuple[int | None, int | None] = (None, None),
) -> Alignment:
    """The maps of one block. `after` are the blocks that are read next."""
    statistics, runs = Statistics(), (source, target)
    if blocks is None:
        names = [run.outer for run in runs]
        sides = source.outside(), target.outside()
    else:
        names = [run.parameters(j) for run, j in zip(runs, blocks, strict=True)]
        sides = source.side(blocks[0]), target.side(blocks[1])
    with ExitStack() as stack:
        for run, some in zip(runs, names, strict=True):
            stack.enter_context(run.lazy.weights(some))
        for run, j in zip(runs, after, strict=True):
            if j is not None:
                run.lazy.read_next(run.parameters(j))
        collect(statistics, *sides, pairs, calibration, capture)
    # The weights are gone before the maps are solved.
    solved = solve_group(GroupSums.of(statistics, pairs), pairs, maps)
    shapes = [{name: run.lazy.shapes[name] for name in some} for run, some in zip(runs, names, strict=True)]
    return solved.alignment(shapes[0], shapes[1], solved.reasons, {})


def _block_of(weight: str, blocks: Mapping[str, int]) -> int | None:
    return next((j for path, j in blocks.items() if weight.startswith(f"{path}.")), None)
