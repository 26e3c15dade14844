"""What a walk block by block will take: arithmetic over the shapes of one block, and the speed of this machine."""

from __future__ import annotations

import math
from collections.abc import Iterable

from taskferry.collect.scale import ROUND
from taskferry.engines.blocks import BlockPair
from taskferry.engines.lazy import LazyModel
from taskferry.engines.memory import give_back
from taskferry.jobs.cost import (
    Plan,
    apply_cost,
    map_bytes,
    resident,
    rows_met,
    size,
    sums_bytes,
    workspace_bytes,
)
from taskferry.jobs.machine import Machine
from taskferry.layers.discovery import block_paths
from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance
from taskferry.methods import Cost

READING = 1.0e9  # bytes a second from disk, cautiously
LIBRARIES = 200 * 2**20  # what the first passes load and keep, beyond any block
EFFICIENCY = 0.6  # of a bare product, in a model's own passes


def plan_blocks(pair: BlockPair, pairs: list[Pair], cost: Cost) -> Plan:
    """Time and peak memory; every block of a model has the size of its largest."""
    machine = Machine.of("cpu")
    give_back()
    calibration = pair.calibration
    tokens = sum(size(B) for _, B in calibration)
    batch = max(size(B) for _, B in calibration)
    groups: dict[object, list[Pair]] = {}
    for each in pairs:
        groups.setdefault((each.target.stack, each.target.block), []).append(each)
    met = rows_met(calibration, cost.tokens)
    rows = met * max(1, cost.captures)
    maps = {block: map_shapes(some) for block, some in groups.items()}
    every = [shape for inputs, outputs in maps.values() for shape in (*inputs, *outputs)]
    largest = max(
        sum(sums_bytes(CrossCovariance, rows, *shape, cost.folds, cost.directions) for shape in inputs)
        + sum(sums_bytes(cost.sums, rows, *shape, cost.folds, cost.directions) for shape in outputs)
        for inputs, outputs in maps.values()
    )
    solved = max(
        sum(map_bytes(rows, a, b, cost.directions) for a, b in some + others) for some, others in maps.values()
    )
    sizes, outer, widths = [], [], []
    for lazy, sites in zip(pair.lazy, (pair.source_sites, pair.target_sites), strict=True):
        blocks = list(block_paths(sites).values())
        sizes.append([_bytes(lazy, lazy.under(block)) for block in blocks])
        outer.append(_bytes(lazy, lazy.outside(blocks)))
        widths.append(max((s.shape[1] for s in sites if s.role.endswith((".q", ".qkv"))), default=0))
    wide = pair.lazy[1].precision.itemsize
    flops = [tokens * sum(some) / wide for some in sizes]  # multiply-adds of a forward pass of each
    bits = pair.lazy[1].dtype.itemsize
    stored = [(sum(some) + out) * bits // wide for some, out in zip(sizes, outer, strict=True)]
    block_A, block_B = max(sizes[0]), max(sizes[1])
    points = max(1, min(2, cost.captures))
    edges = points * 4 * tokens * sum(widths)
    shapes = [(p.source.shape, p.target.shape) for p in max(groups.values(), key=len)]
    held = 4 * batch * sum(a[0] + a[1] for a, _ in shapes)
    graph = 4 * batch * 2 * sum(b[0] + b[1] for _, b in shapes)
    workspace = max(
        workspace_bytes(kind, rows, *shape, cost.directions)
        for kind, side in ((CrossCovariance, 0), (cost.sums, 1))
        for some in maps.values()
        for shape in some[side]
    )
    runs = max(1, cost.judged) * (ROUND if cost.evaluations > 2 else 2)
    peak = max(
        block_A + block_B + edges + held + graph + largest,  # capture
        edges + largest + solved + workspace,  # solve
        # Apply, with the shard that is written; the sums wait for those without a fold.
        edges + largest * (cost.versions > 1) + solved + block_A + 2 * block_B,
        max(outer) + edges + 12 * batch * max(_vocabulary(lazy) for lazy in pair.lazy),  # loss
        outer[1] + 2 * block_B + runs * 4 * tokens // cost.folds * widths[1] + graph,  # several scales at once
    )
    speed = EFFICIENCY * machine.product
    walks = cost.folds * cost.evaluations / ROUND  # weights with a change added are those of one fold
    stages = {
        "forward": cost.captures * (2 * sum(stored) / READING + 3 * sum(flops) / speed),
        "capture": cost.captures * sum(met * a * b for a, b in every) / machine.product,
        "solve": sum(machine.solving_seconds(cost, met, *shape) for shape in every),
        "apply": (cost.rough + cost.versions)
        * sum(apply_cost(p.source.shape, p.target.shape) for p in pairs)
        / machine.product,
        "scale": walks * stored[1] / READING + cost.evaluations * flops[1] / speed,
        "check": 2 * stored[1] / READING + (2 * sum(sum(some) for some in sizes) + sum(stored)) / machine.hashing,
    }
    return Plan(
        pairs=len(pairs),
        sites=len(pair.target_sites),
        tokens=tokens,
        statistics_bytes=largest,
        weights_bytes=sum(stored),
        memory_bytes=resident() + LIBRARIES + peak,
        stages=stages,
    )


def map_shapes(pairs: Iterable[Pair]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(d_A, d_B) of the maps of both sides: q, k and v share their input, gate and up theirs."""
    inputs: dict[tuple[object, str], tuple[int, int]] = {}
    outputs = []
    for pair in pairs:
        a, b = pair.source.shape, pair.target.shape
        part, _, leaf = pair.target.role.rpartition(".")
        shared = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}.get(leaf, leaf)
        inputs[pair.target.block, f"{part}.{shared}"] = (a[1], b[1])
        outputs.append((a[0], b[0]))
    return list(inputs.values()), outputs


def _bytes(lazy: LazyModel, names: Iterable[str]) -> int:
    """In the precision that they have in memory."""
    return sum(lazy.precision.itemsize * math.prod(lazy.shapes[name]) for name in names)


def _vocabulary(lazy: LazyModel) -> int:
    return int(getattr(lazy.model.config, "vocab_size", 0))
