"""Many processes: the calibration set is split over ranks, every map is solved by its owner.

    torchrun --nproc-per-node 4 -m taskferry transfer --source-base base-a --target-base base-b …

Each rank runs its share of the micro-batches. Sums go to the rank that owns the site, by a reduction for each: no rank
holds the sums of all. Owners solve, the first rank collects the maps. Every finished group of sites is stored beside
the output, so that a job that was killed goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from taskferry.alignment import Alignment
from taskferry.collect.solve import GroupSums, MapOptions, Solved, Step
from taskferry.data.batch import Batch, Calibration
from taskferry.engines.sharding import shard_blocks
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance
from taskferry.taskvector import TaskVector

_LOST = ("gloo", "nccl", "connection", "timed out")  # gloo raises plain runtime errors
TIMEOUT = 600  # seconds that one rank waits for another
T = TypeVar("T")


def take_device() -> None:
    """The GPU of this rank, where there are any: before a model is loaded, or all ranks load theirs on the first."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


@contextmanager
def process_group(timeout: float = TIMEOUT) -> Iterator[None]:
    """The ranks of this job together; a rank that is lost ends it with one sentence."""
    # Numbers, and sums on their way to an owner, lie on the host; weights that are gathered lie on devices.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in _LOST):
            raise
        raise TaskferryError(
            f"rank {dist.get_rank()} lost another rank ({str(error).strip().splitlines()[0][:120]}): "
            "look for the first rank that failed above; run the same command again, finished groups are stored"
        ) from error
    finally:
        dist.destroy_process_group()


def from_everyone(value: T) -> list[T]:
    """What each rank has, in the order of their numbers; inside `process_group`."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class RankedPair(WholePair):
    """Whole models in every process, or their blocks sharded over them; inside `process_group`."""

    engine = "ranks"
    exact = True

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.first = self.rank == 0
        self.sent = 0  # bytes of sums that this rank gave away
        self._whole: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] = ({}, {})

    def shard(self) -> None:
        """From now on this rank holds its part of the weights of every block."""
        _ = self._hashes, self._bound  # of the whole models
        self._whole = shard_blocks(self.source), shard_blocks(self.target)

    def applied(self, alignment: Alignment, tau: TaskVector) -> TaskVector:
        """The first rank moves, the others are told."""
        return self._said(alignment.apply(tau) if self.first else TaskVector({}))

    def losses(self, change: TaskVector, scales: Sequence[float], samples: Calibration) -> list[float]:
        """Each rank its share; a sharded model cannot be moved."""
        if self._whole[1]:
            raise TaskferryError("sharded weights cannot be moved and scored: leave --shard out")
        return super().losses(change, scales, samples)

    def share(self) -> list[tuple[Batch, Batch]]:
        """Every so manieth micro-batch; none where there are fewer than ranks."""
        return list(self.calibration)[self.rank :: self.size]

    def mine(self, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Every so manieth."""
        return batches[self.rank :: self.size]

    def uncounted(self) -> list[tuple[Batch, Batch]]:
        """One more where others have one more, and all of them gather the weights of each block together."""
        short = len(self.calibration) % self.size and self.rank >= len(self.calibration) % self.size
        return list(self.calibration)[:1] if short and any(self._whole) else []

    def whole(self, side: int) -> Mapping[str, Tensor]:
        """What a pass uses in place of the sharded parameters of a model."""
        return self._whole[side]

    def told(self, value: bool) -> bool:
        """What the first rank says."""
        return self._said(value)

    def total(self, value: float) -> float:
        """The sum over ranks."""
        return float(self.sum_everywhere(torch.tensor([value], dtype=torch.float64)))

    def solve(self, sums: GroupSums, group: list[Pair], maps: MapOptions, step: Step) -> Solved:
        """Sums to their owners, maps to the first rank; the others come back empty-handed."""
        reads = self._union(sums.reads)
        mine = GroupSums(reads, self._to_owners(sums.inputs), self._to_owners(sums.outputs))
        parts: list[Solved | None] | None = [None] * self.size if self.first else None
        dist.gather_object(mine.solve(maps), parts, 0)
        step(2 * len(group))
        found = Solved()
        if parts is not None:
            for part in parts:
                found.add(part or Solved())
            found.pair_up(group, reads)
        return found

    # What sums need to become one.

    def sum_everywhere(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks."""
        dist.all_reduce(tensor)
        return tensor

    def sum_at(self, owner: int, tensor: Tensor) -> Tensor:
        """The sum over all ranks, at its owner."""
        dist.reduce(tensor, owner)
        self.sent += 0 if owner == self.rank else tensor.nbytes
        return tensor

    def rows_at(self, owner: int, rows: Tensor | None) -> Tensor | None:
        """All ranks' rows at the owner, in rank order."""
        parts: list[Any] | None = [None] * self.size if owner == self.rank else None
        dist.gather_object(None if rows is None else rows.cpu(), parts, owner)
        self.sent += 0 if owner == self.rank or rows is None else rows.nbytes
        found = [part for part in parts or [] if part is not None]
        return torch.cat(found) if found else None

    def _said(self, value: T) -> T:
        said = [value]
        dist.broadcast_object_list(said, 0)
        return said[0]

    def _union(self, reads: dict[str, str]) -> dict[str, str]:
        return {name: key for each in reversed(from_everyone(reads)) for name, key in each.items()}

    def _to_owners(self, sums: dict[str, CrossCovariance]) -> dict[str, CrossCovariance]:
        """The whole sums of the sites that this rank owns; consumes all."""
        found = {}
        for number, (key, nothing) in enumerate(self._agree(sums).items()):
            owner = number % self.size
            total = sums.pop(key, nothing).reduce(self, owner)
            if owner == self.rank:
                found[key] = total
        return found

    def _agree(self, sums: dict[str, CrossCovariance]) -> dict[str, CrossCovariance]:
        """Sites that any rank has seen, in one order for all, with the sums of a rank that has not."""
        seen = from_everyone({key: CrossCovariance(S.d_A, S.d_B, exact=True) for key, S in sums.items()})
        return {key: nothing for one in seen for key, nothing in one.items()}
