"""What a transfer will cost, before it is done: the sizes, a trial on a few samples, and the speed of this machine.

    >>> plan = make_plan(source, target, calibration)
    >>> plan.seconds, plan.memory_bytes

The trial runs the real capture on a few samples of the first micro-batch. It tells how long a pass takes, which maps
there are and how many tokens each sees, and what the graph holds; the rest is arithmetic.
"""

from __future__ import annotations

import math
import mmap
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from taskferry.calibration.batch import Batch, Calibration
from taskferry.capture import Side, Statistics, collect, device_of
from taskferry.finding import find_sites
from taskferry.fitting import changed_pairs
from taskferry.machine import Machine
from taskferry.objectives import ForwardOnly
from taskferry.pairing import Pair, pair_sites

TRIAL = 1.5  # seconds that a trial may take, roughly


@dataclass(frozen=True)
class Plan:
    """The work in numbers."""

    pairs: int
    sites: int
    tokens: int  # rows of the map that sees most
    statistics_bytes: int  # of all cross-covariances
    weights_bytes: int
    memory_bytes: int  # resident at the peak
    stages: dict[str, float]  # seconds

    @property
    def seconds(self) -> float:
        """All stages together."""
        return sum(self.stages.values())


@dataclass
class _Trial:
    """What a few samples have shown; `share` of them make one micro-batch, `whole` the calibration set."""

    statistics: Statistics
    seconds: float
    share: float
    whole: float
    graph: list[int] = field(default_factory=lambda: [0, 0])  # bytes that autograd keeps, of each model


def make_plan(
    source: nn.Module,
    target: nn.Module,
    calibration: Calibration,
    only: Collection[str] | None = None,
    *,
    looks: int = 0,
    captures: int = 1,
    rounds: int = 1,
    tokens_per_width: float | None = None,
    statistics_memory: int = 4 * 2**30,
) -> Plan:
    """From sizes, a trial and a second of measurement.

    `looks` forward passes of the target choose scales; a method may see both models several times (`captures`) and
    solve its maps in several `rounds`.
    """
    target_sites = find_sites(target)
    pairs, _ = pair_sites(find_sites(source), target_sites)
    if only is not None:
        pairs, _ = changed_pairs(pairs, only)
    machine = Machine.of(device_of(target).type)
    trial = _trial(source, target, pairs, calibration)
    now = resident()  # with all that libraries load when they are first used
    sums = [*trial.statistics.inputs.values(), *trial.statistics.outputs.values()]
    most = math.inf if tokens_per_width is None else tokens_per_width
    maps = [(round(min(S.rows * trial.whole, most * max(S.d_A, S.d_B))), S.d_A, S.d_B) for S in sums]
    weights = sum(p.numel() * p.element_size() for model in (source, target) for p in model.parameters())
    held = sum(4 * min(rows * (a + b), a * b) for rows, a, b in maps)
    groups = max(1, -(-held // statistics_memory))
    products = sum(rows * a * b for rows, a, b in maps)
    moving = sum(apply_cost(p.source.shape, p.target.shape) for p in pairs)
    passes = trial.seconds * trial.whole
    return Plan(
        pairs=len(pairs),
        sites=len(target_sites),
        tokens=max((rows for rows, _, _ in maps), default=0),
        statistics_bytes=held,
        weights_bytes=weights,
        memory_bytes=now + _working_memory(trial, maps, min(held, statistics_memory)),
        stages={
            "capture": captures * (groups * passes + products / machine.product),
            "solve": rounds * sum(machine.solve_seconds(*each) for each in maps),
            "apply": rounds * moving / machine.product,
            "hash": weights / machine.hashing,
            "scale": looks * 0.25 * passes,  # a forward pass of the target: half of its half
        },
    )


def _trial(source: nn.Module, target: nn.Module, pairs: list[Pair], calibration: Calibration) -> _Trial:
    first_A, first_B = next(iter(calibration))
    sizes = [size(B) for _, B in calibration]
    objective = ForwardOnly()

    def run(count: int) -> _Trial:
        some = (first_A.take(range(count)), first_B.take(range(count)))
        share, whole = sizes[0] / size(some[1]), sum(sizes) / size(some[1])
        found = _Trial(Statistics(), 0.0, share, whole)
        sides = []
        for i, model in enumerate((source, target)):
            loss = objective.bind(model, [some[i]])
            sides.append(Side(model, _counting(model, loss, found, i)))
        started = time.perf_counter()
        found.statistics = collect(sides[0], sides[1], pairs, Calibration([some]))
        found.seconds = time.perf_counter() - started
        return found

    one = run(1)  # warms up, and says how many more there is time for
    again = run(1)
    count = min(len(first_B), int(TRIAL / max(again.seconds, 1e-9)))
    return run(count) if count > 1 else min((one, again), key=lambda trial: trial.seconds)


def _counting(
    model: nn.Module, loss: Callable[[Batch], Tensor], trial: _Trial, which: int
) -> Callable[[Batch], Tensor]:
    """The loss, with the bytes that its graph keeps written down; weights are there anyway."""

    def counted(batch: Batch) -> Tensor:
        with _saved_bytes(model) as total:
            value = loss(batch)
        trial.graph[which] = total[0]
        return value

    return counted


@contextmanager
def _saved_bytes(model: nn.Module) -> Iterator[list[int]]:
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    total = [0]

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[0] += storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total


def _working_memory(trial: _Trial, maps: list[tuple[int, int, int]], sums: int) -> int:
    """Beyond what is resident now: the worst of the source's pass, the target's pass and the largest map."""
    share = trial.share
    inputs = sum(4 * S.d_A * S.rows for S in trial.statistics.inputs.values()) * share
    gradients = sum(4 * S.d_A * S.rows for S in trial.statistics.outputs.values()) * share
    widest = max((max(S.d_A, S.d_B) * S.rows for S in trial.statistics.outputs.values()), default=0)
    flowing = 3 * 4 * widest * share  # gradients on their way through the widest layer
    largest = max((min(a, b) * max(a, b) for _, a, b in maps), default=0)
    workspace = 8 * 6 * largest  # float64: C, its Gram matrix, eigenvectors, what the decomposition asks for, V
    return int(
        max(
            trial.graph[0] * share + inputs + flowing,
            trial.graph[1] * share + gradients + sums + flowing,
            sums + workspace,
        )
    )


def apply_cost(source: tuple[int, int], target: tuple[int, int]) -> int:
    """Multiply-adds of R_outᵀ τ R_in in its cheaper order."""
    (a, b), (c, d) = source, target
    return min(a * b * d + a * c * d, a * b * c + b * c * d)


def size(batch: Batch) -> int:
    """What a pass costs in proportion to: tokens with their padding, or samples of one size."""
    ids = batch.inputs.get("input_ids")
    return len(batch) if ids is None else ids.numel()


def resident() -> int:
    """Bytes of memory this process holds now; at its peak so far where the system does not say."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE
    return peak()


def peak() -> int:
    """The most bytes that this process has held so far (0 where the system does not say)."""
    try:
        import resource
    except ImportError:  # no such thing on Windows
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
