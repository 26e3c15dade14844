"""Many processes: the calibration set is split over ranks, every map is solved by its owner.

    torchrun --nproc-per-node 4 -m taskferry fit --source-base base-a --target-base base-b …

Each rank runs its share of the micro-batches. Sums go to the rank that owns the site, by a reduction for each (rows,
where few, are gathered instead, so that the rank of the map stays exact): no rank holds the sums of all. Owners solve,
the first rank collects the maps. Every finished group of sites is kept beside the output, so that a job that was killed
goes on where it was.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from taskferry.calibration.batch import Batch, Calibration
from taskferry.capture import Statistics
from taskferry.engines.sharding import shard_blocks
from taskferry.errors import TaskferryError
from taskferry.pairing import Pair
from taskferry.solving import Alone, MapOptions, Solved, Step, Wanted
from taskferry.statistics import CrossCovariance

_LOST = ("gloo", "nccl", "connection", "timed out")  # gloo raises plain runtime errors
TIMEOUT = 600  # seconds that one rank waits for another


def started_by_torchrun() -> bool:
    """Whether this process is a rank of a job."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def rank_and_size() -> tuple[int, int]:
    """Of this process in its job, before the ranks have met; (0, 1) for a process of its own."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def process_group(timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """The ranks of this job; a rank that is lost ends it with one sentence."""
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error).lower() for word in _LOST):
            raise
        raise TaskferryError(
            f"rank {dist.get_rank()} lost another rank ({str(error).strip().splitlines()[0][:120]}): "
            "look for the first rank that failed above; run the same command again, finished groups are kept"
        ) from error
    finally:
        dist.destroy_process_group()


class Ranks(Alone):
    """This process among its peers."""

    exact = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.sent = 0  # bytes that this rank gave away
        self._whole: dict[int, dict[str, Tensor]] = {}  # of every sharded model

    def share(self, calibration: Calibration) -> list[tuple[Batch, Batch]]:
        """Every so manieth micro-batch; none where there are fewer than ranks."""
        return list(calibration)[self.rank :: self.size]

    def company(self, calibration: Calibration) -> list[tuple[Batch, Batch]]:
        """One more where others have one more, and all of them gather the weights of each block together."""
        all_of_them = list(calibration)
        short = len(all_of_them) % self.size and self.rank >= len(all_of_them) % self.size
        return all_of_them[:1] if short and self._whole else []

    def shard(self, model: nn.Module) -> None:
        """From now on this rank holds its part of the weights of every block."""
        self._whole[id(model)] = shard_blocks(model)

    def whole(self, model: nn.Module) -> Mapping[str, Tensor]:
        """What a pass uses in place of the sharded parameters of a model."""
        return self._whole.get(id(model), {})

    def solve(self, statistics: Statistics, group: list[Pair], options: MapOptions, step: Step) -> Solved:
        """Sums to their owners, maps to the first rank; the others come back empty-handed."""
        wanted = Wanted.of(statistics, group)
        reads = self._union(wanted.reads)
        mine = Wanted(reads, self._to_owners(wanted.inputs), self._to_owners(wanted.outputs))
        parts: list[Solved | None] | None = [None] * self.size if self.rank == 0 else None
        dist.gather_object(mine.solve(options), parts, 0)
        step(2 * len(group))
        found = Solved()
        if parts is not None:
            for part in parts:
                found.add(part or Solved())
            found.pair_up(group, reads)
        return found

    def told(self, value: bool) -> bool:
        """What the first rank says."""
        said = [value]
        dist.broadcast_object_list(said, 0)
        return said[0]

    def _union(self, reads: dict[str, str]) -> dict[str, str]:
        everyone: list[dict[str, str]] = [{} for _ in range(self.size)]
        dist.all_gather_object(everyone, reads)
        return {name: key for each in reversed(everyone) for name, key in each.items()}

    def _to_owners(self, sums: dict[str, CrossCovariance]) -> dict[str, CrossCovariance]:
        """The whole sums of the sites that this rank owns; consumes all."""
        found = {}
        for number, (key, d_A, d_B) in enumerate(self._agree(sums)):
            owner = number % self.size
            total = self._reduce(sums.pop(key, CrossCovariance(d_A, d_B, exact=True)), owner)
            if owner == self.rank:
                found[key] = total
        return found

    def _agree(self, sums: dict[str, CrossCovariance]) -> list[tuple[str, int, int]]:
        """Sites that any rank has seen, in one order for all."""
        seen: list[list[tuple[str, int, int]]] = [[] for _ in range(self.size)]
        dist.all_gather_object(seen, [(key, S.d_A, S.d_B) for key, S in sums.items()])
        return list(dict.fromkeys(entry for entries in seen for entry in entries))

    def _reduce(self, mine: CrossCovariance, owner: int) -> CrossCovariance:
        """One site's sums at its owner."""
        state = mine.state()
        summed = torch.tensor([*state["numbers"].tolist(), float(mine.C is not None)], dtype=torch.float64)
        dist.all_reduce(summed)
        rows, energy_A, energy_B, formed = summed.tolist()
        whole: dict[str, Tensor] = {}
        if not formed and rows * (mine.d_A + mine.d_B) <= mine.d_A * mine.d_B:
            for name in ("X_A", "X_B"):
                gathered = self._gather(state.get(name), owner)
                whole |= {} if gathered is None else {name: gathered}
        else:
            C = mine.matrix().double().contiguous()
            dist.reduce(C, owner)
            if owner != self.rank:
                self.sent += C.nbytes
            whole = {"C": C.float()}  # rounded once, after the sum: the number of ranks does not show
        whole["numbers"] = torch.tensor([rows, energy_A, energy_B], dtype=torch.float64)
        return CrossCovariance.from_state(mine.d_A, mine.d_B, whole)

    def _gather(self, rows: Tensor | None, owner: int) -> Tensor | None:
        """All ranks' rows at the owner, in rank order."""
        parts: list[Any] | None = [None] * self.size if owner == self.rank else None
        dist.gather_object(None if rows is None else rows.cpu(), parts, owner)
        if owner != self.rank:
            self.sent += 0 if rows is None else rows.nbytes
        found = [part for part in parts or [] if part is not None]
        return torch.cat(found) if found else None
