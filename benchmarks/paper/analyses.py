"""The measurements of the paper's figures, on the zoo: likeness of two models, outputs, drift, geometry, cost.

    python benchmarks/paper/analyses.py [--quick] [--json benchmarks/results/analysis.json] [--tasks NAME …]

similarity  CKA and cosine of what layers read (activations) and of the gradients that they write, before and after
            alignment, on the samples of the fit and on fresh ones (figure 1); and what maps keep of norms (appendix D)
outputs     cosine of every layer's outputs to those of the target tuned on the task, by row, at scale 1 (figure 2)
drift       direction and length of activations along a fine-tune, against the base (appendix B)
cost        how many moves one fine-tune of 2,000 steps costs, as the paper counts it

Means over three tasks, one draw of 100 samples each; ten minutes of one core beside the fine-tunes.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.linalg import matrix_norm, vector_norm

from benchmarks.shared import common
from benchmarks.shared.cells import Bench, Cell, Places, load_recipe
from benchmarks.shared.finetune import train
from benchmarks.shared.rows import ROWS, move
from benchmarks.zoo import zoo_data, zoo_tasks
from taskferry import Batch, Calibration, Pool, fit
from taskferry.collect.capture import Side, collect
from taskferry.collect.maps import Maps, Sums
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import Pair
from taskferry.linalg.sums import CrossCovariance
from taskferry.objectives.objectives import ForwardOnly

PAIRS = (("narrow", "twin"), ("narrow", "wide"))
TASKS = ("mnist", "letters", "fashion")
MOVED = ("BiCo, input-only", "THESEUS", "BiCo")
LOOKS = 10  # along a fine-tune
Rows = dict[tuple[str, str], tuple[Tensor, Tensor]]  # ("in" or "out", layer): the same tokens of both models


class Kept(CrossCovariance):
    """All rows of one place that have a direction: the zoo is small."""

    def _few(self) -> bool:
        return True

    def both(self) -> tuple[Tensor, Tensor]:
        A, B = (torch.cat(side).double() for side in zip(*self.kept, strict=True))
        return A, B


class AllRows(Sums):
    """Of every layer."""

    def start(self, d_A: int, d_B: int) -> Kept:
        return Kept(d_A, d_B)


def rows_of(
    models: Sequence[nn.Module], pairs: Iterable[Pair], calibration: Calibration, objectives: Sequence[Any],
    maps: Maps,
) -> Rows:  # fmt: skip
    kept = AllRows()
    sides = [
        Side(model, objective.bind(model, calibration.side(i)))
        for i, (model, objective) in enumerate(zip(models, objectives, strict=True))
    ]
    collect(kept, *sides, list(pairs), calibration, maps)
    return {
        (side, name): sums.both()
        for side, found in (("in", kept.inputs), ("out", kept.outputs))
        for name, sums in found.items()
    }


def cka(X: Tensor, Y: Tensor) -> float:
    """Linear CKA (Kornblith et al., 2019): 1 where two sets of rows differ by a rotation, a scale and a shift."""
    X, Y = X - X.mean(0), Y - Y.mean(0)
    return float(matrix_norm(X.T @ Y) ** 2 / (matrix_norm(X.T @ X) * matrix_norm(Y.T @ Y)))


def cosine(X: Tensor, Y: Tensor) -> float:
    return float(F.cosine_similarity(X, Y).mean())


def similarity(rows: Rows, alignment: Any) -> list[dict[str, Any]]:
    """Every layer of the blocks, before and after its map."""
    reads = {pair.target.name: pair.reads for pair in alignment.pairs}
    blocks = {pair.target.name: pair.target.block for pair in alignment.pairs}
    found = []
    for (side, name), (X_A, X_B) in rows.items():
        layer = name.partition("@")[0]
        if blocks.get(layer) is None:
            continue
        R = (alignment.R_in[reads[layer]] if side == "in" else alignment.R_out[layer]).dense().double()
        aligned = X_A @ R
        found.append({
            "side": side, "block": blocks[layer], "cka": cka(X_A, X_B), "cka aligned": cka(aligned, X_B),
            "cosine": cosine(X_A, X_B) if X_A.shape == X_B.shape else None, "cosine aligned": cosine(aligned, X_B),
            "energy kept": float(aligned.square().sum() / X_A.square().sum()),
        })  # fmt: skip
    return found


def geometry(alignment: Any) -> float:
    """The largest ‖R Rᵀ R − R‖ / ‖R‖ of all maps: 0 where norms and angles stay on the range of each."""
    maps = [R.dense().double() for R in (*alignment.R_in.values(), *alignment.R_out.values())]
    return max(float(matrix_norm(R @ R.T @ R - R) / matrix_norm(R)) for R in maps)


def agreement(first: nn.Module, model: nn.Module, batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Two models of one architecture, layer by layer: cosine of outputs, direction and length of inputs."""
    pairs = [Pair(site, site) for site in find_sites(first)]
    same = Calibration((batch, batch) for batch in batches)
    rows = rows_of((first, model), pairs, same, (ForwardOnly(), ForwardOnly()), Maps(outputs="activations"))
    blocks, found = {pair.target.name: pair.target.block for pair in pairs}, []
    for (side, name), (X, Y) in rows.items():
        before = vector_norm(X, dim=1)
        length = float(((vector_norm(Y, dim=1) - before).abs() / before).mean())
        place = blocks.get(name.partition("@")[0])
        found.append({"side": side, "block": place, "cosine": cosine(X, Y), "length": length})
    return found


def study(bench: Bench, source: str, target: str, task: str) -> dict[str, Any]:
    """Everything of one pair on one task."""
    A, B = (bench.model(name).model for name in (source, target))
    prepared, fresh = (bench.prepare(Cell(task, source, target, "random", "100", seed)) for seed in (0, 1))
    alignment = fit(A, B, prepared.calibration, prepared.objectives)
    pairs = [Pair(pair.source, pair.target) for pair in alignment.pairs]
    found: dict[str, Any] = {"geometry": geometry(alignment), "outputs": {}}
    for name, draw in (("fit", prepared), ("fresh", fresh)):
        rows = rows_of((A, B), pairs, draw.calibration, draw.objectives, Maps())
        found[name] = similarity(rows, alignment)
    tuned = bench.tuned(target, task).add_to(copy.deepcopy(B))
    for row in ("target as it is", *MOVED):
        if row == "BiCo, input-only" and (source, target) != PAIRS[0]:
            continue  # needs equal widths
        moved = B
        if row != "target as it is":
            change = move(ROWS[row], (A, B), bench.tuned(source, task), prepared, 0)
            moved = change.add_to(copy.deepcopy(B))
        each = [layer for layer in agreement(tuned, moved, fresh.calibration.side(1)) if layer["side"] == "out"]
        last = max(layer["block"] for layer in each if layer["block"] is not None)
        parts = {
            "all blocks": [layer["cosine"] for layer in each if layer["block"] is not None],
            "last block": [layer["cosine"] for layer in each if layer["block"] == last],
            "features": [layer["cosine"] for layer in each if layer["block"] is None],
        }
        found["outputs"][row] = {part: statistics.mean(values) for part, values in parts.items() if values}
    P_A, P_B = (sum(p.numel() for p in model.visual.parameters()) for model in (A, B))
    found["moves for a fine-tune, the paper's count"] = 16 * 2000 * P_B / (6 * (P_A + P_B))
    return found


def drift(bench: Bench, name: str, task: str) -> dict[int, dict[str, float]]:
    """What blocks read along a fine-tune by the recipe's protocol, against the base: means over blocks."""
    loaded, protocol = bench.model(name), bench.recipe.finetune
    student = copy.deepcopy(loaded.model).requires_grad_(True)
    pool = Pool(bench.samples(task)[0], loaded)
    batches = pool.batches(range(100), 50)
    found: dict[int, dict[str, float]] = {}

    def look(step: int, loss: float) -> None:  # noqa: ARG001
        if step % max(1, protocol.steps // LOOKS) == 0:
            student.eval()
            rows = [
                r for r in agreement(loaded.model, student, batches) if r["side"] == "in" and r["block"] is not None
            ]
            student.train()
            direction, length = (statistics.mean(row[what] for row in rows) for what in ("cosine", "length"))
            found[step] = {"1 − cosine": 1 - direction, "change of length": length}

    train(student, pool, bench.head(name, task).bind(student, []), protocol, told=look)
    return found


def mean(values: Iterable[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.mean(known):.2f}" if known else ""


def shown(results: dict[str, Any]) -> str:
    """Three tables: means over blocks and tasks."""
    rows, outputs = [], []
    columns = ("cka", "cka aligned", "cosine", "cosine aligned", "energy kept")
    for pair, studies in results["pairs"].items():
        for samples in ("fit", "fresh"):
            for side, what in (("in", "activations"), ("out", "gradients")):
                mine = [row for each in studies for row in each[samples] if row["side"] == side]
                rows.append([f"{pair}, {what}, {samples} samples", *(mean(row[c] for row in mine) for c in columns)])
        for row in studies[0]["outputs"]:
            parts = ("all blocks", "last block", "features")
            outputs.append([f"{pair}: {row}", *(mean(each["outputs"][row].get(p) for each in studies) for p in parts)])
    steps = [[step, *(f"{value:.3f}" for value in found.values())] for step, found in results["drift"].items()]
    return "\n\n".join([
        common.table(["means over blocks and tasks", "CKA", "CKA, aligned", "cosine", "cosine, aligned", "energy kept"],
                     rows),
        common.table(["cosine to the tuned target's outputs", "all blocks", "last block", "features"], outputs),
        common.table(["steps of a fine-tune of narrow", "1 − cosine to the base", "change of length"], steps),
    ])  # fmt: skip


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    recipe = load_recipe("zoo/table5")
    if options.quick:
        recipe = replace(recipe, finetune=replace(recipe.finetune, steps=10, warmup=2), test_samples=60)
        options.tasks = options.tasks[:1]
    for task in options.tasks:
        zoo_tasks.write(task, common.DATA / "tasks")
    bench = Bench(recipe, Places(zoo_data.ZOO, common.DATA / "tasks"))
    pairs = {f"{a} → {b}": [study(bench, a, b, task) for task in options.tasks] for a, b in PAIRS}
    looks = [drift(bench, "narrow", task) for task in options.tasks]
    along = {
        step: {what: statistics.mean(look[step][what] for look in looks) for what in values}
        for step, values in looks[0].items()
    }
    results = {"tasks": options.tasks, "pairs": pairs, "drift": along}
    common.finish(results, shown(results), options.json, [], started)


if __name__ == "__main__":
    main()
