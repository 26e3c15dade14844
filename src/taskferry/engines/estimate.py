"""What a walk block by block will take: arithmetic over the shapes of one block, and the speed of this machine."""

from __future__ import annotations

from collections.abc import Iterable

from taskferry.calibration.batch import Calibration
from taskferry.engines.memory import give_back
from taskferry.engines.walk import Walk
from taskferry.machine import Machine
from taskferry.pairing import Pair
from taskferry.plan import Plan, apply_cost, resident, size

READING = 1.0e9  # bytes a second from disk, cautiously
LIBRARIES = 200 * 2**20  # what the first passes load and keep, beyond any block
EFFICIENCY = 0.6  # of a bare product, in a model's own passes


def plan_blocks(source: Walk, target: Walk, pairs: list[Pair], calibration: Calibration) -> Plan:
    """Time and peak memory; every block of a model has the size of its largest."""
    machine = Machine.of("cpu")
    give_back()
    tokens = sum(size(B) for _, B in calibration)
    batch = max(size(B) for _, B in calibration)
    blocks: dict[object, list[Pair]] = {}
    for pair in pairs:
        blocks.setdefault(pair.target.block, []).append(pair)
    maps = {block: map_shapes(some) for block, some in blocks.items()}
    sums = {block: sum(4 * min(tokens * (a + b), a * b) for a, b in some) for block, some in maps.items()}
    walks = (source, target)
    sizes = [[_bytes(walk, walk.parameters(j)) for j in range(len(walk.blocks))] for walk in walks]
    outer = [_bytes(walk, walk.outer) for walk in walks]
    flops = sum(tokens * sum(some) / 4 for some in sizes)  # multiply-adds of one forward pass of both
    stored = sum(sum(some) + out for some, out in zip(sizes, outer, strict=True)) * target.lazy.dtype.itemsize // 4
    block_A, block_B = max(sizes[0]), max(sizes[1])
    edges = 4 * tokens * sum(_width(walk) for walk in walks)
    largest = max(sums.values())
    widths = [(p.source.shape, p.target.shape) for p in max(blocks.values(), key=len)]
    held = 4 * batch * sum(a[0] + a[1] for a, _ in widths)
    graph = 4 * batch * 2 * sum(b[0] + b[1] for _, b in widths)
    workspace = max(8 * 3 * min(tokens * (a + b), 2 * a * b) for some in maps.values() for a, b in some)
    peak = max(
        block_A + block_B + edges + held + graph + largest,  # capture
        edges + 2 * largest + workspace,  # solve
        edges + largest + 2 * block_A + 2 * block_B,  # apply, and the shard that is written
        max(outer) + edges + 12 * batch * max(_vocabulary(walk) for walk in walks),  # loss
    )
    stages = {
        "walk": 2 * stored / READING + 3 * flops / (EFFICIENCY * machine.product),
        "capture": sum(tokens * a * b for some in maps.values() for a, b in some) / machine.product,
        "solve": sum(machine.solve_seconds(tokens, a, b) for some in maps.values() for a, b in some),
        "apply": sum(apply_cost(p.source.shape, p.target.shape) for p in pairs) / machine.product,
        "check": stored / READING + flops / (EFFICIENCY * machine.product) + 2 * stored / machine.hashing,
    }
    return Plan(
        pairs=len(pairs),
        sites=len(target.sites),
        tokens=tokens,
        statistics_bytes=largest,
        weights_bytes=stored,
        memory_bytes=resident() + LIBRARIES + peak,
        stages=stages,
    )


def map_shapes(pairs: Iterable[Pair]) -> list[tuple[int, int]]:
    """(d_A, d_B) of every map: q, k and v share their input, gate and up theirs."""
    inputs: dict[tuple[object, str], tuple[int, int]] = {}
    outputs = []
    for pair in pairs:
        a, b = pair.source.shape, pair.target.shape
        part, _, leaf = pair.target.role.rpartition(".")
        shared = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}.get(leaf, leaf)
        inputs[pair.target.block, f"{part}.{shared}"] = (a[1], b[1])
        outputs.append((a[0], b[0]))
    return [*inputs.values(), *outputs]


def _bytes(walk: Walk, names: Iterable[str]) -> int:
    """In float32, as they are read."""
    total = 0
    for name in names:
        count = 4
        for side in walk.lazy.shapes[name]:
            count *= side
        total += count
    return total


def _width(walk: Walk) -> int:
    return max(site.shape[1] for site in walk.sites if site.role.endswith((".q", ".qkv"))) if walk.sites else 0


def _vocabulary(walk: Walk) -> int:
    return int(getattr(walk.model.config, "vocab_size", 0))
