"""Maps of general data, corrected by fine-tunes that exist on both bases: does a fleet's next task move better?

    python benchmarks/quality/anchors.py [--quick] [--json benchmarks/results/anchors.json]

Two pairs of the zoo, whose models learn seven tasks each. One task is left out; the maps are fitted on 100 samples of
the other six in all, as a fleet without samples for each adapter would. K of the six are anchors: their changes τ_A and
τ_B are known on both sides, and the maps turn towards what carries one into the other,

    R_out ← polar(R_out⁰ + w G / ‖G‖₂),  G = Σ_k τ_A R_in τ_Bᵀ, and so for R_in,

alternating twice. w = 1 is as much weight as the maps have; ∞ is the anchors alone. Measured on the task left out: the
cosine of its moved change with the one that the target really learns, and its accuracy at scale 1.
A planted pair, whose second changes are rotated first ones, shows that the correction finds what there is to find.

Bound: with twelve planted anchors the error falls below 1e-6.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor

from benchmarks.quality import general
from benchmarks.shared import common
from benchmarks.zoo import zoo_data, zoo_tasks
from benchmarks.zoo.zoo_bench import open_short
from taskferry import TaskVector
from taskferry.alignment import AlignedPair, Alignment
from taskferry.bench.recipe import Cell
from taskferry.bench.running import Bench
from taskferry.layers.site import Site
from taskferry.linalg.procrustes import Map

PAIRS = (("narrow", "twin"), ("wide", "narrow"))
TASKS = ("letters", "cifar10", "occluded", "case", "mnist", "fashion", "drawings")
NUMBERS = (1, 3, 6)
PLANTED = (0, 1, 3, 6, 12)
EXACT = 1e-6  # of the planted pair, with the most anchors
WEIGHTS = (0.3, 1.0, float("inf"))
Anchor = tuple[TaskVector, TaskVector]


def polar(M: Tensor) -> Tensor:
    """The nearest partial isometry."""
    U, S, Vh = torch.linalg.svd(M.double(), full_matrices=False)  # float32 need not converge on many equal values
    found: Tensor = (U * (1e-6 * S[0] < S)) @ Vh
    return found.to(M.dtype)


def corrected(R: Tensor, G: Tensor, weight: float) -> Tensor:
    """A map turned towards what the anchors say."""
    size = torch.linalg.matrix_norm(G, 2)
    if not size > 0:
        return R
    return polar(G / size) if weight == float("inf") else polar(R + weight * G / size)


def anchored(alignment: Alignment, anchors: Sequence[Anchor], weight: float, rounds: int = 2) -> Alignment:
    """The alignment with both maps of every site corrected, each while the other stands."""
    start_in, start_out = ({k: m.dense() for k, m in maps.items()} for maps in (alignment.R_in, alignment.R_out))
    R_in, R_out = dict(start_in), dict(start_out)
    known: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for pair in alignment.pairs:
        for tau_A, tau_B in anchors:
            changes = tau_A.deltas.get(pair.source.weight), tau_B.deltas.get(pair.target.weight)
            if all(isinstance(change, Tensor) for change in changes):
                A, B = (site.read(change) for site, change in zip((pair.source, pair.target), changes, strict=True))  # type: ignore[arg-type]
                known.setdefault(pair.target.name, []).append((A / A.norm(), B / B.norm()))
    for _ in range(rounds):
        for pair in alignment.pairs:
            name = pair.target.name
            G = sum((A @ R_in[pair.reads] @ B.T for A, B in known.get(name, ())), torch.zeros_like(start_out[name]))
            R_out[name] = corrected(start_out[name], G, weight)
        for key, R in start_in.items():
            G = torch.zeros_like(R)
            for pair in alignment.pairs:
                if pair.reads == key:
                    for A, B in known.get(pair.target.name, ()):
                        G += A.T @ R_out[pair.target.name] @ B
            R_in[key] = corrected(R, G, weight)
    return replace(
        alignment,
        R_in={key: Map(R=R) for key, R in R_in.items()},
        R_out={name: Map(R=R) for name, R in R_out.items()},
    )


def cosine(moved: TaskVector, own: TaskVector) -> float:
    """Of two changes, over the parameters that were moved."""
    inner = first = second = 0.0
    for name, change in moved.dense().deltas.items():
        other = own.deltas.get(name)
        if isinstance(other, Tensor) and isinstance(change, Tensor):
            inner += float((change * other).sum())
            first, second = first + float(change.square().sum()), second + float(other.square().sum())
    return inner / max(first * second, 1e-30) ** 0.5


def planted(rank: int = 4, width: int = 24) -> list[float]:
    """The error of a new change by number of anchors: one site, changes of low rank, rotations that are known.

    The maps to start from are the true ones, turned a little, as those of too few samples are.
    """
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    truth = [polar(random(width, width)) for _ in range(2)]  # R_in, R_out
    turned = [polar(R + 0.1 * random(width, width)) for R in truth]
    site = Site("layer", "layer.weight", None, (width, width), "layer")
    shapes = {"layer.weight": (width, width)}
    start = Alignment((AlignedPair(site, site, "layer"),), {"layer": Map(R=turned[0])}, {"layer": Map(R=turned[1])},
                      {}, {}, shapes, shapes, {})  # fmt: skip
    made = [random(width, rank) @ random(rank, width) for _ in range(max(PLANTED) + 1)]
    pairs = [(TaskVector({"layer.weight": A}), TaskVector({"layer.weight": truth[1].T @ A @ truth[0]})) for A in made]
    new, wanted = pairs[-1]
    errors = []
    for number in PLANTED:
        moved = anchored(start, pairs[:number], float("inf"), rounds=300).apply(new)
        errors.append((moved - wanted).norm() / wanted.norm())
    return errors


def study(
    bench: Bench, pair: tuple[str, str], tasks: Sequence[str], known: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every task left out once, but those that are known."""
    source, target = pair
    A, B = general.models(bench, pair)
    few, changes = {}, {}
    for task in tasks:  # one after the other: a bench holds one task at a time
        zoo_tasks.write(task, zoo_data.DATA / "tasks")
        few[task] = general.sums(bench, pair, task, 100 // (len(tasks) - 1), 0)
        changes[task] = bench.tuned(source, task), bench.tuned(target, task)
    for task in (each for each in tasks if each not in known):
        others = [other for other in tasks if other != task]
        prepared = bench.prepare(Cell(*pair, task, "random", 100, False, 0, ()))
        tau, truth = changes[task]
        rows: dict[str, Any] = {}

        def note(name: str, change: TaskVector) -> None:
            score = bench.score(target, task, change, 1.0, prepared, 1)  # noqa: B023
            rows[name] = [round(score, 2), round(cosine(change, truth), 4)]  # noqa: B023

        note("target", TaskVector({}))
        note("fine-tuned on it", truth)
        own = general.captured((A, B), prepared.calibration, prepared.objectives)
        note("maps of its own 100 samples", general.align(A, B, own).apply(tau))
        alignment = general.align(A, B, general.total(few[other] for other in others))
        note("0 anchors", alignment.apply(tau))
        for number, weight in product((n for n in NUMBERS if n <= len(others)), WEIGHTS):
            anchors = [changes[other] for other in others[:number]]
            note(f"{number} anchors, w = {weight:g}", anchored(alignment, anchors, weight).apply(tau))
        yield task, rows


def scores_table(results: dict[str, Any], tasks: Sequence[str]) -> str:
    """Of the pairs that have every task."""
    rows = []
    for key, found in results.items():
        if set(found) < set(tasks):
            continue
        for way in found[tasks[0]]:
            gains = [one[way][0] - one["target"][0] for one in found.values()]
            possible = sum(one["fine-tuned on it"][0] - one["target"][0] for one in found.values())
            cosines = statistics.mean(one[way][1] for one in found.values())
            scores = [f"{one[way][0]:.1f}" for one in found.values()]
            rows.append([key, way, *scores, f"{sum(gains) / possible:.0%}" if possible else "", f"{cosines:.3f}"])
    return common.table(["pair", "maps", *tasks, "share of the gain", "cosine with the target's own"], rows)


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    torch.set_num_threads(1)
    tasks, pairs = (TASKS[:3], PAIRS[:1]) if options.quick else (TASKS, PAIRS)
    bench = open_short(options.quick)
    results: dict[str, Any] = common.kept(options.json, {})
    for pair in pairs:
        key = " → ".join(pair)
        found = results.setdefault(key, {})
        for task, scores in study(bench, pair, tasks, found):
            found[task] = scores
            common.kept(options.json, {key: found})  # a run goes on where an earlier one stopped
            print(*pair, task, scores, f"{time.time() - started:.0f} s", flush=True)
    table = scores_table(results, tasks)
    errors = planted()
    plant = common.table(["planted, anchors", *map(str, PLANTED)], [["error", *(f"{e:.1e}" for e in errors)]])
    missed = [] if errors[-1] < EXACT else [f"planted: {errors[-1]:.1e} with {PLANTED[-1]} anchors"]
    common.finish({**results, "planted": errors}, f"{table}\n\n{plant}", options.json, missed, started)


if __name__ == "__main__":
    main()
