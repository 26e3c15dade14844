"""What a transfer will cost, before it is done: the sizes, a trial on a few samples, and the speed of this machine.

    >>> plan = plan_job(job, method, settings)
    >>> plan.seconds, plan.memory_bytes

The trial runs the real capture on a few samples of the first micro-batch. It tells how long a pass takes, which maps
there are and how many tokens each sees, and what the graph holds; the rest is arithmetic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from taskferry.collect.capture import Side, collect
from taskferry.collect.device import device_of
from taskferry.collect.scale import EVALUATIONS, copied_bytes
from taskferry.collect.statistics import BASE, Capture, Statistics
from taskferry.data.batch import Batch, Calibration
from taskferry.engines.blocks import BlockPair
from taskferry.engines.whole import WholePair
from taskferry.errors import TaskferryError
from taskferry.jobs.block_plan import LIBRARIES, plan_blocks
from taskferry.jobs.cost import Plan, apply_cost, map_bytes, resident, size, sums_bytes
from taskferry.jobs.device_plan import on_device
from taskferry.jobs.machine import Machine
from taskferry.jobs.settings import RefineSettings
from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance
from taskferry.methods import FOLDS, Cost, Job, Method
from taskferry.methods.registry import without_move
from taskferry.objectives.objectives import ForwardOnly
from taskferry.taskvector import LowRank
from taskferry.training.refinement import STAGE, Refinement

MANY_STEPS = 100  # from where on a moved start was hardly better than none (docs/how-to/refine.md)
TRIAL = 1.5  # seconds that a trial may take, roughly


@dataclass
class _Trial:
    """What a few samples have shown; `share` of them make one micro-batch, `whole` the calibration set."""

    statistics: Statistics
    seconds: float
    share: float
    whole: float
    samples: int
    graph: list[int] = field(default_factory=lambda: [0, 0])  # bytes that autograd keeps, of each model


def plan_job(
    job: Job,
    method: Method,
    own: Mapping[str, Any],
    scale: float | str | None = None,
    refinement: Refinement | None = None,
) -> Plan:
    """What a method will take on a job; `scale` is None where none is looked at."""
    cost, pairs = method_cost(job, method, own, scale), job.wanted
    if isinstance(job.pair, BlockPair):
        return _away(job, cost, plan_blocks(job.pair, pairs, cost))
    if not isinstance(job.pair, WholePair):
        raise TaskferryError(f"the engine '{job.pair.engine}' has no plan")
    trained = None if refinement is None else _trained(job, pairs, refinement)
    plan = plan_whole(job.pair, pairs, cost, trained)
    return plan if trained is not None else _away(job, cost, plan)


def _away(job: Job, cost: Cost, plan: Plan) -> Plan:
    """Where models lie on a device: its memory by arithmetic, where the models can be rehearsed without weights."""
    lazy = job.pair.lazy if isinstance(job.pair, BlockPair) else ()
    devices = [each.device for each in lazy] or [device_of(model) for model in (job.source, job.target)]
    if all(device.type == "cpu" for device in devices):
        return plan
    precisions = (lazy[0].precision, lazy[1].precision) if lazy else None
    try:
        found = on_device(job, cost, precisions, products=devices[0].type == "cuda")
    except TaskferryError:
        return plan  # what the trial has told
    if not lazy:
        return replace(plan, device_bytes=found.whole)
    return replace(plan, device_bytes=found.blockwise, memory_bytes=resident() + LIBRARIES + found.host_blockwise)


def method_cost(job: Job, method: Method, own: Mapping[str, Any], scale: float | str | None) -> Cost:
    """With the losses that a scale takes."""
    cost = method.cost(job, own)
    if not method.needs.change:
        return replace(cost, evaluations=1)  # the target as it is
    chosen = cost.evaluations > 0
    looked_at = EVALUATIONS if scale == "auto" and not chosen else 2 if scale is not None else 0
    if scale != "auto" or not method.needs.maps:
        return replace(cost, evaluations=cost.evaluations + looked_at)
    judged = job.judged
    return replace(cost, evaluations=cost.evaluations + looked_at * judged / FOLDS, folds=FOLDS, judged=judged)


def plan_sizes(
    job: Job,
    method: Method,
    own: Mapping[str, Any],
    precisions: tuple[torch.dtype, torch.dtype],
    limit: float,
) -> Plan:
    """Memory of a device with so many GB, by engine: no weights are needed, and no time is told."""
    job = job.in_folds()
    found = on_device(job, method_cost(job, method, own, "auto"), precisions)
    plan = Plan(
        pairs=len(job.wanted),
        sites=len(job.pair.target_sites),
        tokens=_tokens(job.calibration),
        statistics_bytes=0,
        weights_bytes=found.weights,
        memory_bytes=0,
        stages={},
        engines={"whole": found.whole, "blockwise": found.blockwise},
        limit=limit,
    )
    engine = "whole" if plan.fits("whole") else "blockwise"
    host = LIBRARIES + {"whole": found.host_whole, "blockwise": found.host_blockwise}[engine]
    return replace(plan, memory_bytes=resident() + host, device_bytes=plan.engines[engine])


@dataclass(frozen=True)
class _Trained:
    """What a refinement takes."""

    passes: float  # over the samples, with gradients
    size: int  # samples a step
    numbers: int  # that learn


def _trained(job: Job, pairs: list[Pair], refinement: Refinement) -> _Trained:
    heads, samples = job.pair.objectives, job.calibration
    shapes = [(job.tau.deltas.get(p.source.weight), p.target.shape) for p in pairs]
    learn = [d.rank * sum(shape) if isinstance(d, LowRank) else shape[0] * shape[1] for d, shape in shapes]
    inputs = samples.samples * (1 + refinement.views_of(samples, heads))
    return _Trained(refinement.passes(samples, heads), min(refinement.size(heads), inputs), sum(learn))


def plan_whole(pair: WholePair, pairs: list[Pair], cost: Cost, trained: _Trained | None = None) -> Plan:
    """From sizes, a trial and a second of measurement."""
    source, target = pair.source, pair.target
    machine = Machine.of(str(device_of(target)))
    trial = _trial(source, target, pairs, pair.calibration, Capture(tokens=cost.tokens))
    now = resident()  # with all that libraries load when they are first used
    sides = (CrossCovariance, trial.statistics.inputs), (cost.sums, trial.statistics.outputs)
    sums = [(kind, round(S.rows * trial.whole), S.d_A, S.d_B) for kind, some in sides for S in some.values()]
    maps = [(rows, a, b) for _, rows, a, b in sums]
    weights = sum(p.numel() * p.element_size() for model in (source, target) for p in model.parameters())
    seen = max(1, cost.captures)
    held = sum(sums_bytes(kind, seen * rows, a, b, cost.folds, cost.directions) for kind, rows, a, b in sums)
    memory = pair.work.sums_memory
    seen_at = Capture(points=(BASE,) * (1 + cost.rough), tokens=cost.tokens, folds=cost.folds, judged=cost.judged)
    capture = replace(seen_at, sums=cost.sums, directions=cost.directions)
    one, groups = pair.sums_bytes(pairs, capture), len(pair.groups(pairs, capture))
    # Sums of one group stay for the second capture; those of several are made again.
    again = 1.5 if groups > 1 and cost.rough else 1.0
    products = sum(rows * a * b for rows, a, b in maps)
    moving = sum(apply_cost(p.source.shape, p.target.shape) for p in pairs)
    passes = trial.seconds * trial.whole
    kept = sum(map_bytes(seen * rows, a, b, cost.directions) for rows, a, b in maps)
    # Trying a scale takes a copy of the weights that move, beside the maps of all samples, or beside the sums that a
    # second capture goes on with; that one takes a copy of both models' weights.
    names = [{getattr(p, side).weight for p in pairs} for side in ("source", "target")]
    copies = [sum(copied_bytes(model.get_parameter(name)) for name in some)
              for model, some in zip((source, target), names, strict=True)]  # fmt: skip
    stays = min(held, memory)
    working = max(
        _working_memory(trial, maps, stays) + max(kept, sum(copies) if cost.rough else 0),
        copies[1] + max(kept, stays if cost.rough else 0) if cost.evaluations else 0,
        _training_memory(trial, trained, copies[1]),
    )
    away = any(device_of(model).type != "cpu" for model in (source, target))
    return Plan(
        pairs=len(pairs),
        sites=len(pair.target_sites),
        tokens=_tokens(pair.calibration) or max((rows for rows, _, _ in maps), default=0),
        statistics_bytes=held,
        weights_bytes=weights,
        memory_bytes=now if away else now + working,
        device_bytes=weights + working if away else 0,
        groups=groups,
        sums_bytes=one,
        stages={
            "capture": cost.captures * again * (groups * passes + products / machine.product),
            "solve": sum(machine.solving_seconds(cost, *each) for each in maps),
            "apply": (cost.rough + cost.versions) * moving / machine.product,
            "hash": weights / machine.hashing,
            "scale": cost.evaluations * 0.25 * passes,  # a forward pass of the target: half of its half
            # Forward, and back to both inputs and weights.
            **({"train": cost.training * 0.75 * passes} if cost.training else {}),
            **({} if trained is None else {STAGE: trained.passes * 0.75 * passes}),
        },
    )


def _tokens(calibration: Calibration) -> int:
    """Of the target's texts, counted and not extrapolated: the same in every run. 0 for samples without tokens."""
    masks = [B.inputs.get("attention_mask") for _, B in calibration]
    return sum(int(mask.sum()) for mask in masks if mask is not None)


def _training_memory(trial: _Trial, trained: _Trained | None, copied: int) -> int:
    """What learns five times (base, weights, gradient, two means of AdamW), and a step's graph or a look's copies."""
    if trained is None:
        return 0
    look = max(copied, 4 * trained.numbers)  # of the weights that a LoRA is added to, or of those that learn
    return int(max(trial.graph[1] / trial.samples * trained.size, look) + 5 * 4 * trained.numbers)


def _trial(
    source: nn.Module, target: nn.Module, pairs: list[Pair], calibration: Calibration, capture: Capture
) -> _Trial:
    first_A, first_B = max(calibration, key=lambda both: size(both[1]))  # memory is that of the largest
    sizes = [size(B) for _, B in calibration]
    objective = ForwardOnly()

    def run(count: int) -> _Trial:
        some = (first_A.take(range(count)), first_B.take(range(count)))
        share, whole = size(first_B) / size(some[1]), sum(sizes) / size(some[1])
        found = _Trial(Statistics(), 0.0, share, whole, count)
        sides = []
        for i, model in enumerate((source, target)):
            loss = objective.bind(model, [some[i]])
            sides.append(Side(model, _counting(model, loss, found, i)))
        started = time.perf_counter()
        collect(found.statistics, sides[0], sides[1], pairs, Calibration([some]), capture)
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


def refining(settings: RefineSettings) -> dict[str, str]:
    """The training after the move, and what was cheaper where both were measured."""
    if not settings.refine:
        return {}
    lines, start = {"refine": f"{settings.refine} training steps towards the tuned source"}, without_move().name
    if settings.method != start:
        steps = "so many steps" if settings.refine >= MANY_STEPS else "two to three times the steps"
        lines["cheaper"] = f"--method {start}: training alone with {steps} got as far on small models"
    return lines
