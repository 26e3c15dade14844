"""Ideas beyond the paper, one at a time beside BiCo, on the zoo tasks that settings are chosen on.

    python benchmarks/quality/ideas.py [--quick] [--json benchmarks/results/ideas.json] [--only NAME]

Every idea is a function that gives task vectors for one pair, task and draw; the table has the share of the oracle's
gain that each recovers. No weight is trained here. A run goes on where an earlier one stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.other_maps import above_noise, centred, even, halfway, ridge, whitened
from benchmarks.shared import common
from benchmarks.zoo.zoo_bench import open_zoo
from benchmarks.zoo.zoo_trial import Rows, Trial, isometry
from taskferry import TaskVector
from taskferry.analysis.moments import Moments
from taskferry.collect.device import frozen
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import DepthRule, nearest_block
from taskferry.layers.site import Site, depths
from taskferry.linalg.procrustes import Map, procrustes
from taskferry.methods import Job, run
from taskferry.taskvector import as_dense

TASKS = ("mnist", "fashion", "drawings")  # the others are for reporting: beyond.py
PAIRS = (("narrow", "wide"), ("wide", "narrow"), ("twin", "deep"), ("deep", "narrow"))
Moved = Iterator[tuple[str, TaskVector, float | None]]  # name, what is added, scale (None: automatic)
AUTO = None
BESIDE = "BiCo, automatic scale"


def plain(trial: Trial) -> Moved:
    yield "BiCo at scale 1", trial.bico, 1.0
    yield "BiCo, automatic scale", trial.bico, AUTO


def labels(trial: Trial) -> Moved:
    for name, given in (("hard", trial.hard), ("soft", trial.soft)):
        moved = trial.move(trial.rows(given))
        yield f"teacher's {name} labels at scale 1", moved, 1.0
        yield f"teacher's {name} labels, automatic scale", moved, trial.automatic(moved, given)


def samples(trial: Trial) -> Moved:
    for count in (400, 1000):
        more = Trial(trial.bench, *trial.names, trial.task, trial.seed, count)
        moved = more.move(more.rows(more.hard))
        yield f"teacher's hard labels, {count} samples, at scale 1", moved, 1.0
        yield f"teacher's hard labels, {count} samples, automatic scale", moved, more.automatic(moved, more.hard)


def scales(trial: Trial) -> Moved:
    """A scale for each block, role or site by the gradient of the loss with respect to the scales."""
    site = sites_by_parameter(trial)
    start = trial.automatic(trial.bico, trial.true)
    kinds: dict[str, Callable[[str], object]] = {
        "block": lambda n: site[n].block,
        "role": by_role(trial),
        "site": lambda n: (site[n].block, site[n].role),
    }
    for name, key in kinds.items():
        yield f"a scale for each {name}", scaled(trial, trial.bico, trial.true, key, start), 1.0


def sites_by_parameter(trial: Trial) -> dict[str, Site]:
    return {name: s for s in find_sites(trial.B) for name in (s.weight, s.bias) if name}


def by_role(trial: Trial) -> Callable[[str], object]:
    site = sites_by_parameter(trial)
    return lambda name: site[name].role


def scaled(trial: Trial, tau: TaskVector, given: Tensor, key: Callable[[str], object], start: float) -> TaskVector:
    """Twenty steps of Adam on the scales alone, held near the one scale by a penalty."""
    groups = list(dict.fromkeys(map(key, tau.deltas)))
    scale = torch.full((len(groups),), start, requires_grad=True)
    base = {n: p.detach() for n, p in trial.B.named_parameters()}
    change = {n: as_dense(d) for n, d in tau.deltas.items()}
    optimiser = torch.optim.Adam([scale], lr=0.1)
    batches = trial.calibration.side(1)
    total = sum(len(b) for b in batches)
    with frozen(trial.B), torch.enable_grad():
        for _ in range(20):
            optimiser.zero_grad()
            for batch in batches:
                now = {n: base[n] + scale[groups.index(key(n))] * d for n, d in change.items()}
                with torch.nn.utils.stateless._reparametrize_module(trial.B, now):
                    (trial.loss(1, given)(batch) / total).backward()
            (0.01 * (scale - start).square().sum()).backward()
            optimiser.step()
    chosen = scale.detach().tolist()
    return TaskVector({n: chosen[groups.index(key(n))] * d for n, d in change.items()})


def maps(trial: Trial) -> Moved:
    kinds = {"centred rows": centred, "tokens of equal weight": even, "tokens by root of size": halfway,
             "only above noise": above_noise(True), "shrunk by noise": above_noise(False),
             "regression, ridge 0.01": ridge(0.01), "regression, ridge 1": ridge(1.0)}  # fmt: skip
    for name, solve in kinds.items():
        if name != "tokens of equal weight":
            yield f"input maps: {name}", trial.move(trial.base, inputs=solve), AUTO
        if name != "centred rows":
            yield f"output maps: {name}", trial.move(trial.base, outputs=solve), AUTO


def stream(trial: Trial) -> Moved:
    """Sites that read from, or write to, the residual stream share their map; or half of it."""
    reads, writes = ("attn.q", "attn.k", "attn.v", "mlp.up"), ("attn.o", "mlp.down")
    role = {s.name: s.role for s in find_sites(trial.B)}
    rows = trial.base
    C_in = {k: unit(r) for k, r in rows.inputs.items()}
    C_out = {k: unit(r) for k, r in rows.outputs.items()}
    for own in (0.0, 0.5):
        shared = []
        for C, roles in ((C_in, reads), (C_out, writes)):
            inside = [k for k in C if role[k.split("@")[0]] in roles]
            mean = sum(C[k] for k in inside) / max(1, len(inside))
            shared.append({k: Map(R=procrustes(own * c + (1 - own) * mean if k in inside else c)[0].dense())
                           for k, c in C.items()})  # fmt: skip
        moved = trial.alignment(rows, *shared, nearest_block).apply(trial.tau)
        yield f"one map along the residual stream ({'alone' if own == 0 else 'half'})", moved, AUTO


def unit(rows: Rows) -> Tensor:
    X_A, X_B = rows.both()
    C = X_A.T @ X_B
    return C / C.norm().clamp_min(1e-30)


def second(trial: Trial) -> Moved:
    """Maps of models that have gone a part of the way, alone and beside those of the bases."""
    scale = trial.automatic(trial.bico, trial.true)
    for part in (0.5, 1.0):
        there = trial.rows(trial.true, at=(part * trial.tau, part * scale * trial.bico))
        yield f"second pass, maps at {part:g} of the way", trial.move(there), AUTO
        yield f"second pass, both passes' rows, {part:g} of the way", trial.move(trial.base.plus(there)), AUTO


def always(i: int) -> DepthRule:
    """Every target block takes from this source block."""
    return lambda *_: i


def depth(trial: Trial) -> Moved:
    """Which source block feeds which target block: by likeness, or all of them, each to its nearest."""
    D_A, D_B = (depths(find_sites(model))["vision"] for model in (trial.A, trial.B))
    if D_A == D_B:
        return
    from_block = {i: trial.rows(trial.true, rule=always(i)) for i in range(D_A)}
    likeness = torch.zeros(D_B, D_A)
    for i, rows in from_block.items():
        for target in (pair.target for pair in trial.pairs(always(i))):
            if target.role == "mlp.up" and target.block is not None:
                likeness[target.block, i] = Moments.of(*rows.inputs[rows.reads[target.name][0]].both()).cka()
    path = monotone(likeness)

    def by_likeness(j: int, *_: int) -> int:
        return path[j]

    yield "blocks matched by CKA", trial.move(trial.rows(trial.true, rule=by_likeness), rule=by_likeness), AUTO
    takers = {i: [j for j in range(D_B) if nearest_block(j, D_A, D_B) == i] for i in range(D_A)}
    if D_A < D_B:  # one source block feeds several: the sum is split among them
        split = {name: len(takers[pair.source.block]) for pair in trial.pairs() if pair.source.block is not None
                 for name in (pair.target.weight, pair.target.bias)}  # fmt: skip
        halves = {name: as_dense(delta) / split.get(name, 1) for name, delta in trial.bico.deltas.items()}
        yield "a change split among the blocks that take it", TaskVector(halves), AUTO
        return
    total = trial.bico  # more source blocks than target blocks: those left over go to their nearest as well
    for i in (i for i in range(D_A) if not takers[i]):
        j = nearest_block(i, D_B, D_A)
        moved = trial.move(from_block[i], rule=always(i))
        names = {n for s in find_sites(trial.B) if s.block == j and s.stack != "text" for n in (s.weight, s.bias)}
        total = total + TaskVector({n: d for n, d in moved.deltas.items() if n in names})
    yield "no source block left behind", total, AUTO


def monotone(likeness: Tensor) -> list[int]:
    """For every row the column of the best path that never goes back."""
    best, came = likeness[0].clone(), []
    for row in likeness[1:]:
        top, where = torch.cummax(best, 0)
        came.append(where)
        best = top + row
    at = int(best.argmax())
    path = [at]
    for where in reversed(came):
        at = int(where[at])
        path.append(at)
    return path[::-1]


def together(trial: Trial) -> Moved:
    """What helps alone, one after the other."""
    yield from _together(trial, trial.true, "true labels")
    yield from _together(trial, trial.hard, "teacher")
    more = Trial(trial.bench, *trial.names, trial.task, trial.seed, 400)
    yield from _together(more, more.hard, "teacher, 400 samples")


def _together(trial: Trial, given: Tensor, name: str) -> Moved:
    rows = trial.rows(given)
    moved = trial.move(rows, inputs=centred, outputs=even)
    scale = trial.automatic(moved, given)
    yield f"{name}: centred inputs, even outputs", moved, scale
    yield f"{name}: and a scale for each role", scaled(trial, moved, given, by_role(trial), scale), 1.0
    both = rows.plus(trial.rows(given, at=(0.5 * trial.tau, 0.5 * scale * moved)))
    moved = trial.move(both, inputs=centred, outputs=even)
    scale = trial.automatic(moved, given)
    yield f"{name}: and a second pass", moved, scale
    yield f"{name}: and both", scaled(trial, moved, given, by_role(trial), scale), 1.0


def whitening(trial: Trial) -> Moved:
    """Which side gains by it; random labels beside the teacher's show more directions of gradients."""
    given = trial.hard
    rows = trial.rows(given)
    others = torch.randint(0, given.shape[1], (len(given),), generator=torch.Generator().manual_seed(trial.seed))
    more = rows.plus(trial.rows(F.one_hot(others, given.shape[1]).float()))
    for name, inputs, outputs, seen in (
        ("even outputs", isometry, even, rows),
        ("whitened outputs", isometry, whitened, rows),
        ("whitened inputs and outputs", whitened, whitened, rows),
        ("whitened outputs, with random labels", isometry, whitened, more),
    ):
        moved = trial.move(seen, inputs=inputs, outputs=outputs)
        yield f"teacher, {name}", moved, trial.automatic(moved, given)


def parts(trial: Trial) -> Moved:
    """The default method as it is, and with one of its parts left out."""
    calibration = trial.calibration.with_labels(trial.hard.argmax(-1))
    job = Job.of(trial.A, trial.B, trial.tau, calibration, trial.heads)
    for name, changed in (
        ("twofold, teacher", {}),
        ("twofold, teacher, not whitened", {"whiten": False}),
        ("twofold, teacher, no augmented views", {"views": 0}),
        ("twofold, teacher, one capture", {"halfway": 0.0}),
        ("twofold, teacher, one scale", {"scales": "one"}),
        ("twofold, teacher, patch embedding moved", {"patches": True}),
    ):
        moved = run("twofold", job, **changed).tau
        yield name, moved, trial.automatic(moved, trial.hard)


def ideal(trial: Trial) -> Moved:
    """What the form R_outᵀ τ R_in could carry: maps that look at the oracle's own change. No method; a limit."""
    rows = trial.rows(trial.hard)
    found: dict[str, dict[str, Tensor]] = {"both maps": {}, "output maps": {}, "input maps": {}}
    for pair in trial.pairs():
        source, target = pair.source, pair.target
        if target.name not in rows.outputs or target.role == "patch" or source.weight not in trial.tau.deltas:
            continue
        change = as_dense(trial.oracle.deltas[target.weight])
        tau_A, tau_B = source.read(as_dense(trial.tau.deltas[source.weight])), target.read(change)
        ours_in = tau_A @ isometry(*rows.inputs[rows.reads[target.name][0]].both())
        ours_out = whitened(*rows.outputs[target.name].both()).T @ tau_A
        U_B, _, V_B = torch.linalg.svd(tau_B, full_matrices=False)
        sigma = torch.linalg.svdvals(tau_A)[: U_B.shape[1]]
        moved = (
            (U_B[:, : len(sigma)] * sigma) @ V_B[: len(sigma)],
            procrustes(ours_in @ tau_B.T)[0].dense().T @ ours_in,
            ours_out @ procrustes(ours_out.T @ tau_B)[0].dense(),
        )
        for deltas, value in zip(found.values(), moved, strict=True):
            target.read(deltas.setdefault(target.weight, torch.zeros_like(change))).copy_(value)
    for name, deltas in found.items():
        yield f"a limit: {name} from the oracle's own change", TaskVector(deltas), AUTO


def counts(trial: Trial) -> Moved:
    """How much more samples would give, without augmented views."""
    for count in (25, 100, 400, 1600):
        more = Trial(trial.bench, *trial.names, trial.task, trial.seed, count)
        job = Job.of(more.A, more.B, more.tau, more.calibration.with_labels(more.hard.argmax(-1)), more.heads)
        moved = run("twofold", job, views=0).tau
        yield f"twofold, teacher, no augmented views, {count} samples", moved, more.automatic(moved, more.hard)


def passes(trial: Trial) -> Moved:
    """What the second pass needs, and whether a third one adds to it."""
    given = trial.hard
    for inputs, word in ((centred, "centred inputs"), (isometry, "inputs as they are")):
        rows = trial.rows(given)
        moved = trial.move(rows, inputs=inputs, outputs=even)
        for count in (2, 3, 4):
            scale = trial.automatic(moved, given)
            part = (count - 1) / 4 if count > 2 else 0.5
            rows = rows.plus(trial.rows(given, at=(part * trial.tau, part * scale * moved)))
            moved = trial.move(rows, inputs=inputs, outputs=even)
            scale = trial.automatic(moved, given)
            yield f"teacher, even outputs, {word}, {count} passes", moved, scale
            if count == 3 or inputs is isometry:
                both = scaled(trial, moved, given, by_role(trial), scale)
                yield f"teacher, even outputs, {word}, {count} passes, a scale for each role", both, 1.0


GROUPS = (
    plain,
    labels,
    scales,
    maps,
    stream,
    second,
    depth,
    samples,
    together,
    passes,
    whitening,
    parts,
    ideal,
    counts,
)
IDEAS = {group.__name__: group for group in GROUPS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cell")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--only", choices=IDEAS, help="one group of ideas")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    bench = open_zoo(options.quick)
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    cells = [(seed, task, pair) for seed in range(options.seeds) for task in TASKS for pair in PAIRS]
    for seed, task, (source, target) in [(0, "mnist", PAIRS[0])] if options.quick else cells:
        known = results.setdefault("scores", {}).setdefault(f"{source} {target} {task} {seed}", {})
        trial = None
        for name, idea in IDEAS.items():
            if name in known or options.only not in (None, name):
                continue
            trial = trial or Trial(bench, source, target, task, seed)
            found = {}
            if name == "plain":
                found = {"target": trial.accuracy(TaskVector({}), 0.0), "oracle": trial.accuracy(trial.oracle, 1.0)}
            for row, tau, scale in idea(trial):
                chosen = trial.automatic(tau, trial.true) if scale is None else scale
                found[row] = round(trial.accuracy(tau, chosen), 2)
            known[name] = found
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(source, target, task, seed, f"{time.time() - started:.0f} s", flush=True)
    common.finish(results, table(results["scores"]), options.json, [], started)


def table(scores: dict[str, dict[str, dict[str, float]]]) -> str:
    """Mean shares over the cells that a row was run in, with BiCo in the same cells beside it."""
    cells = {key: {row: value for found in groups.values() for row, value in found.items()}
             for key, groups in scores.items()}  # fmt: skip
    names = dict.fromkeys(row for found in cells.values() for row in found if row not in ("target", "oracle"))
    lines = []
    for name in names:
        both = [[(found[row] - found["target"]) / (found["oracle"] - found["target"]) for row in (name, BESIDE)]
                for found in cells.values() if {name, "oracle"} <= set(found)]  # fmt: skip
        if both:
            mine, bico = (statistics.mean(column) for column in zip(*both, strict=True))
            better = sum(a > b for a, b in both)
            lines.append([name, f"{mine:.0%}", f"{bico:.0%}", f"{better} of {len(both)}"])
    return common.table(["", "share of the oracle's gain", f"{BESIDE}, same cells", "better in"], lines)


if __name__ == "__main__":
    main()
