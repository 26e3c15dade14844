"""Two models larger than memory: one block of each at a time (paper, section 4, on one block of each model).

    >>> pair = BlockPair(LazyModel(…), LazyModel(…), calibration, objectives, scratch=folder)
    >>> pair.move(tau, Maps())

Both models are run forward once, their hidden states kept on disk. Then from the last block of the target to the first:
its weights and those of its source block are read, the ordinary capture runs on them, the maps are solved, the change
of the block is moved, and everything is let go. Since ⟨output of a block, gradient there⟩ has the gradient of the whole
loss, the sums are those of the whole models. Changes that are not low-rank stay on disk.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from taskferry.alignment import Alignment
from taskferry.collect.capture import Loss, collect
from taskferry.collect.maps import Maps, Sums
from taskferry.collect.progress import Steps
from taskferry.coverage import Coverage, Row
from taskferry.data.batch import Batch, Calibration
from taskferry.engines.blockwise import BlockRun, forward
from taskferry.engines.lazy import DiskDeltas, LazyModel
from taskferry.engines.pair import ModelPair, Moved, parameter_reasons
from taskferry.errors import TaskferryError
from taskferry.layers.pairing import Pair
from taskferry.objectives.objectives import AnyObjective, ForwardOnly, Objective
from taskferry.taskvector import Delta, TaskVector


class BlockPair(ModelPair):
    """Two models on disk."""

    engine = "blockwise"

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
        self._target_loss: Loss | None = None  # bound once, at the base model: a head may be made from the samples

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

    def move(self, tau: TaskVector, maps: Maps, changed: Collection[str] | None = None) -> Moved:
        """Make maps and move block by block."""
        by_block: dict[int | None, list[Pair]] = {}
        disk = DiskDeltas(Path(tempfile.mkdtemp(dir=self.scratch)))
        deltas: dict[str, Delta] = {}
        rows: dict[str, Row] = {}
        unused: dict[str, str] = {}
        reasons = {**self.reasons, **self.still(changed)}
        seen: set[str] = set()  # parameters of the source that were looked at
        table: list[dict[str, Any]] = []
        with self._folder() as folder:
            source, target = (self._run(side, folder) for side in (0, 1))
            for pair in self.wanted(changed):
                by_block.setdefault(_block_of(pair.target.weight, target), []).append(pair)
            walking = Steps(self.work.progress, "forward", len(source.blocks) + len(target.blocks))
            for side, run in enumerate((source, target)):
                forward([run], self._objective(side, maps), backward=maps.backward, on_block=walking.step)
            if maps.backward:
                self._target_loss = target.bound
            order = [j for j in (*reversed(range(len(target.blocks))), None) if j in by_block]
            blocks = Steps(self.work.progress, "blocks", len(order))
            for j in order:
                part = self._align(source, target, j, by_block[j], maps)
                names = list(part.source_parameters)
                seen |= set(names)
                moved = part.apply(tau.take(names))
                table = [*part.table(), *table]
                reasons |= part.reasons
                if moved.coverage is not None:
                    rows |= {row.parameter: row for row in moved.coverage if row.status != "kept"}
                    unused |= moved.coverage.unused
                if tau.low_rank:
                    deltas |= moved.deltas
                else:
                    disk.put(moved)
                blocks.step()
        left = [name for name in self.lazy[0].shapes if name not in seen and name in tau.deltas]
        unused |= dict.fromkeys(filter(tau.changed, left), "no layer of the target takes it")
        why = parameter_reasons(self.target, self.target_sites, reasons)
        kept = {n: Row(n, s, "kept", why.get(n, "no layer uses it")) for n, s in self.lazy[1].shapes.items()}
        coverage = Coverage(tuple({**kept, **rows}.values()), dict(sorted(unused.items())))
        moved = TaskVector(deltas if tau.low_rank else disk, coverage)
        return Moved(moved, None, table, provenance=self.provenance(maps))

    def losses(self, change: TaskVector, scales: Sequence[float], samples: Calibration) -> list[float]:
        """All of them in one walk over the weights."""
        with self._folder() as folder:
            if self._target_loss is None:
                run = self._run(1, folder)
                forward([run], self.objectives[1], backward=False, keep=False)
                self._target_loss = run.bound
            runs = [self._run(1, folder, samples.side(1)) for _ in scales]
            forward(
                runs, self.objectives[1], self._target_loss, change=change, scales=scales, backward=False, keep=False
            )
        return [run.loss / samples.samples for run in runs]

    def _align(self, source: BlockRun, target: BlockRun, j: int | None, pairs: list[Pair], maps: Maps) -> Alignment:
        """The maps of one block of the target, or of what stands outside of the blocks."""
        takes = {_block_of(pair.source.weight, source) for pair in pairs}
        if len(takes) != 1 or (j is None) != (takes == {None}):
            raise TaskferryError(
                f"block {j} takes from blocks {sorted(map(str, takes))} of the source: not block by block"
            )
        at = [(source, takes.pop()), (target, j)]
        if maps.backward:
            for run, block in at:
                run.reach(0 if block is None else block + 1)
        sums, names = Sums(), [run.names(block) for run, block in at]
        with ExitStack() as stack:
            for (run, _), some in zip(at, names, strict=True):
                stack.enter_context(run.lazy.weights(some))
            A, B = (run.side(block) for run, block in at)
            collect(sums, A, B, pairs, self.calibration, maps)
        for run, block in at:
            run.passed(block)
        # The weights are gone before the maps are solved.
        shapes = [{name: run.lazy.shapes[name] for name in some} for (run, _), some in zip(at, names, strict=True)]
        return replace(sums.solve(pairs, maps), source_parameters=shapes[0], target_parameters=shapes[1])

    def _objective(self, side: int, maps: Maps) -> Objective:
        return self.objectives[side] if maps.backward or callable(self.objective) else ForwardOnly()

    def _run(self, side: int, folder: Path, batches: Sequence[Batch] | None = None) -> BlockRun:
        sites = (self.source_sites, self.target_sites)[side]
        batches = self.calibration.side(side) if batches is None else batches
        return BlockRun(self.lazy[side], sites, batches, Path(tempfile.mkdtemp(dir=folder)))

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            yield Path(folder)


def _block_of(weight: str, run: BlockRun) -> int | None:
    return next((j for j, path in enumerate(run.blocks) if weight.startswith(f"{path}.")), None)
