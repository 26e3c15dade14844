"""Can the share of the gain be foretold from what a transfer sees, before anything is tested?

    python benchmarks/quality/forecast.py [--quick] [--json benchmarks/results/forecast.json] [--texts] [--tasks NAME …]
        [--pairs A:B …] [--shown]

Seven pairs of the zoo, nine tasks, 10, 30 and 100 samples; with `--texts` real encoders of texts: three models, every
pair of them, seven tasks, 30 and 100 samples. Each fine-tune is moved by the default. Of each move is kept what its
calibration samples tell (below), and what share of the gain it has, on test data. A ridge regression on what was told
is fitted on the zoo without a pair, or without a task, and foretells the shares of that one; beside it, the mean share
of the others. An interval is the forecast with four fifths of the errors that the regression makes on pairs, or tasks,
left out of its own fit. Two facts are what ships (`taskferry.jobs.forecast`): chosen on six of the tasks, of eight that
were tried, and judged on the tasks that came later as well. What a user brings is both, a new pair and a new task: that
row has the interval that ships. The real encoders come last: foretold by a regression on the zoo alone.

Bounds for a forecast that is worth showing, on pairs that it has not seen: its mean error is 30 % below that of the
mean share, and between 75 and 85 % of the shares lie in their interval. Where they are missed, no forecast is shipped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations, product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import Tensor, nn

from benchmarks.quality import frontier_tables as frontier
from benchmarks.quality import head
from benchmarks.shared import common
from benchmarks.zoo import zoo_data, zoo_tasks
from benchmarks.zoo.zoo_bench import open_short
from taskferry import TaskVector, load_model
from taskferry.bench.recipe import Cell, load_recipe
from taskferry.collect.scale import losses_at, moved_by
from taskferry.data.batch import Batch
from taskferry.jobs.forecast import A_CLASS, FILE, WENT
from taskferry.jobs.forecast import facts as shipped_facts
from taskferry.methods import Job, Moved, run
from taskferry.models import Loaded
from taskferry.objectives.objectives import Prototypes, calibration_features

MODELS = ("paraphrase-MiniLM-L3-v2", head.SOURCE, head.TARGET)
TEXTS = ("trec", "emotion", "sst2", "ag_news", "cola", "snli", "qqp")
COUNTS, TEXT_COUNTS = (10, 30, 100), (30, 100)
LEAST = 3.0  # points: a share of less is noise
BETTER, COVERED = 0.30, (0.75, 0.85)
FACTS = (WENT, A_CLASS)  # of those that are told
CHOSEN_ON = ("letters", "cifar10", "occluded", "case", "mnist", "drawings")
RIDGE = 1.0
Told = dict[str, float]
Cells = Iterator[tuple[str, Callable[[], dict[str, Any]]]]  # what they are called, and what makes one


def shown(model: nn.Module, change: TaskVector, batches: Sequence[Batch]) -> Tensor:
    """What a model with a change shows of samples, with its mean taken off."""
    with moved_by(model, change) as at:
        at(1.0)
        X, _ = calibration_features(model, batches)
    return X - X.mean(0)


def alike(X: Tensor, Y: Tensor) -> float:
    """Linear CKA of two sets of rows, whatever spaces they lie in."""
    return float((X.T @ Y).square().sum() / ((X.T @ X).norm() * (Y.T @ Y).norm()))


def told(job: Job, moved: Moved, classes: int) -> Told:
    """What is known before anything is written: maps, samples, losses, and what the tuned source shows."""
    curve, alignment = moved.curve, moved.alignment
    if curve is None or alignment is None:
        raise RuntimeError("the default has chosen no scale")
    batches = [job.calibration.side(side) for side in (0, 1)]
    teacher, before, after = (
        shown(job.source, job.tau, batches[0]),
        *(shown(job.target, change, batches[1]) for change in (TaskVector({}), moved.tau)),
    )
    near = alike(before, teacher)
    loss = job.pair.objectives[0].bind(job.source, batches[0])
    source = losses_at(job.source, job.tau, loss, batches[0], [0.0, 1.0])
    drops = [1 - b / a for a, b in curve.folds] or [0.0]
    return {
        **shipped_facts(curve, job.calibration.samples, classes),
        "the same, apart between folds": max(drops) - min(drops),
        "scale": curve.best,
        "similarity of inputs": statistics.mean(q.similarity for q in alignment.quality_in.values()),
        "similarity of gradients": statistics.mean(q.similarity for q in alignment.quality_out.values()),
        "nearer to the tuned source": (alike(after, teacher) - near) / (1 - near),
        "source's loss, share that went": 1 - source[1] / source[0],
    }


def measured(job: Job, oracle: TaskVector, classes: int, score: Callable[[TaskVector], float]) -> dict[str, Any]:
    """One move: its score between those of the target and of its own fine-tune, and what was told before."""
    started = time.process_time()
    moved = run("twofold", job)
    seconds = time.process_time() - started
    helps = moved.curve is not None and moved.curve.helps
    changes = {"target": TaskVector({}), "moved": moved.tau if helps else TaskVector({}), "oracle": oracle}
    scores = {way: round(score(change), 2) for way, change in changes.items()}
    facts = {fact: round(value, 5) for fact, value in told(job, moved, classes).items()}
    return {**scores, "told": facts, "cpu": round(seconds, 1)}


def zoo_cells(quick: bool, tasks: Sequence[str], pairs: Sequence[tuple[str, str]]) -> Cells:
    """Small CLIP models, every task that they have, with the short fine-tunes of the frontier."""
    bench = open_short(quick)

    def make(source: str, target: str, task: str, count: int) -> dict[str, Any]:
        zoo_tasks.write(task, zoo_data.DATA / "tasks")
        prepared = bench.prepare(Cell(source, target, task, "random", count, False, 0, ()))
        A, B = bench.model(source).model, bench.model(target).model
        job = Job.of(A, B, bench.tuned(source, task), prepared.calibration, prepared.objectives)
        return measured(job, bench.tuned(target, task), bench.task(task).classes,
                        lambda change: bench.score(target, task, change, 1.0, prepared, 1))  # fmt: skip

    for task, pair, count in product(tasks or bench.recipe.tasks, pairs or load_recipe("zoo/beyond").pairs, COUNTS):
        yield f"{task} {pair[0]} {pair[1]} {count}", lambda p=pair, t=task, n=count: make(*p, t, n)


def tuned(loaded: Loaded, task: str, steps: int, folder: Path) -> TaskVector:
    """A fine-tune of one encoder on one task, made once."""
    path = folder / f"{Path(loaded.given).name}-{task}-{steps}.safetensors"
    if not path.exists():
        data = head.Texts.load(task)
        folder.mkdir(parents=True, exist_ok=True)
        head.tuned(loaded, data.pool(loaded), data.classes, steps, 0)[0].save(path)
        print(path.stem, flush=True)
    return TaskVector.load(path)


def text_cells(quick: bool, tasks: Sequence[str], pairs: Sequence[tuple[str, str]]) -> Cells:
    """Real encoders, with heads that are fitted on 100 samples and scored on 500 others."""
    shared = common.need_shared()
    folder, steps = zoo_data.DATA / ("texts-quick" if quick else "texts"), 4 if quick else 100

    def make(source: str, target: str, name: str, count: int) -> dict[str, Any]:
        A, B = models = tuple(load_model(str(shared / "models" / each)) for each in (source, target))
        task = head.Texts.load(name)
        tau, oracle = (tuned(each, name, steps, folder) for each in models)
        job = Job.of(A.model, B.model, tau, task.calibration((A, B), count, count), Prototypes())
        own, tests = task.calibration((A, B), 100, 0).side(1), task.tests(B)
        return measured(job, oracle, task.classes,
                        lambda change: head.probed(B.model, change, own, tests, task.classes))  # fmt: skip

    for pair, task, count in product(pairs or permutations(MODELS, 2), tasks or TEXTS, TEXT_COUNTS):
        yield f"{task} {pair[0]} {pair[1]} {count}", lambda p=pair, t=task, n=count: make(*p, t, n)


def share(cell: dict[str, Any]) -> float:
    return float((cell["moved"] - cell["target"]) / (cell["oracle"] - cell["target"]))


def ridge(X: Tensor, y: Tensor) -> Callable[[Tensor], Tensor]:
    """A regression on columns of one size."""
    mean, spread, middle = X.mean(0), X.std(0).clamp_min(1e-9), y.mean()
    Z = (X - mean) / spread
    weights = torch.linalg.solve(Z.T @ Z + RIDGE * torch.eye(Z.shape[1], dtype=Z.dtype), Z.T @ (y - middle))
    return lambda new: (new - mean) / spread @ weights + middle


def left_out(X: Tensor, y: Tensor, groups: Sequence[str]) -> Tensor:
    """Every share foretold by a regression that has not seen its group."""
    found = torch.empty_like(y)
    for group in set(groups):
        out = torch.tensor([each == group for each in groups])
        found[out] = ridge(X[~out], y[~out])(X[out])
    return found


def columns(cells: dict[str, Any], facts: Sequence[str] = FACTS) -> tuple[Tensor, Tensor]:
    """What was told of every move [n, facts], and its share [n]."""
    X = [[cell["told"][fact] for fact in facts] for cell in cells.values()]
    return torch.tensor(X, dtype=torch.float64), torch.tensor([*map(share, cells.values())], dtype=torch.float64)


def interval(X: Tensor, y: Tensor, groups: Sequence[str]) -> float:
    """Half of its width: four fifths of the errors on groups that were left out are smaller."""
    return float((left_out(X, y, groups) - y).abs().quantile(0.8))


def judged(cells: dict[str, Any], by: Callable[[str], str], facts: Sequence[str] = FACTS) -> dict[str, float]:
    """Errors and coverage on groups that the forecast has not seen."""
    groups = {key: by(key) for key in cells}
    parts = []
    for group in sorted(set(groups.values())):
        new = {key: cell for key, cell in cells.items() if groups[key] == group}
        seen = {key: cell for key, cell in cells.items() if key not in new}
        parts.append(unseen(seen, new, by, facts))
    return summary(parts)


def neither(cells: dict[str, Any]) -> Iterator[dict[str, list[float]]]:
    """The moves of every pair and task by a regression that has seen neither; its interval is that of new tasks."""
    for pair, task in {(pair_of(key), task_of(key)) for key in cells}:
        new = {key: cell for key, cell in cells.items() if (pair_of(key), task_of(key)) == (pair, task)}
        seen = {key: cell for key, cell in cells.items() if pair_of(key) != pair and task_of(key) != task}
        yield unseen(seen, new, task_of)


def unseen(
    seen: dict[str, Any], new: dict[str, Any], by: Callable[[str], str], facts: Sequence[str] = FACTS
) -> dict[str, list[float]]:
    """What a regression on what was seen says of new moves."""
    (X, y), (Z, wanted) = columns(seen, facts), columns(new, facts)
    wide = interval(X, y, [by(key) for key in seen])
    errors = (ridge(X, y)(Z) - wanted).abs()
    return {
        "error": errors.tolist(),
        "plain": (y.mean() - wanted).abs().tolist(),
        "inside": (errors <= wide).double().tolist(),
        "width": [2 * wide],
    }


def summary(parts: Sequence[dict[str, list[float]]]) -> dict[str, float]:
    names = ("error", "plain", "inside", "width")
    error, plain, inside, width = (statistics.mean(value for part in parts for value in part[name]) for name in names)
    return {
        "moves": sum(len(part["error"]) for part in parts), "error": error, "error of the mean share": plain,
        "better by": 1 - error / plain, "inside the interval": inside, "width of the interval": width,
    }  # fmt: skip


def pair_of(key: str) -> str:
    return " ".join(key.split()[1:3])


def task_of(key: str) -> str:
    return key.split()[0]


def fitted(cells: dict[str, Any]) -> dict[str, Any]:
    """The regression on all moves of the zoo, as the package takes it."""
    X, y = columns(cells)
    foretell = ridge(X, y)
    zero = torch.zeros(1, len(FACTS), dtype=X.dtype)
    constant = float(foretell(zero))
    each = [float(foretell(row[None]) - constant) for row in torch.eye(len(FACTS), dtype=X.dtype)]
    return {
        "weights": {name: round(weight, 4) for name, weight in zip(FACTS, each, strict=True)},
        "constant": round(constant, 4),
        "within": round(interval(X, y, [task_of(key) for key in cells]), 4),  # tasks differ more than pairs
        "seen": {name: [round(float(end), 4) for end in (X[:, i].min(), X[:, i].max())]
                 for i, name in enumerate(FACTS)},
    }  # fmt: skip


def report(cells: dict[str, Any]) -> tuple[str, list[str], dict[str, Any]]:
    """The table, the bounds that were missed, and the figures."""
    some = {key: cell for key, cell in cells.items() if cell["oracle"] - cell["target"] >= LEAST}
    zoo = {key: cell for key, cell in some.items() if key.split()[1] in frontier.MODELS}
    texts = {key: cell for key, cell in some.items() if key not in zoo}
    early, late = ({key: cell for key, cell in zoo.items() if (task_of(key) in CHOSEN_ON) == chosen}
                   for chosen in (True, False))  # fmt: skip
    every = list(next(iter(zoo.values()))["told"])
    found = {
        "a pair not seen": judged(zoo, pair_of),
        "a task not seen": judged(zoo, task_of),
        "neither of them seen": summary([*neither(zoo)]),
        "a pair not seen, all eight facts": judged(zoo, pair_of, every),
        "a task not seen, all eight facts": judged(zoo, task_of, every),
    }
    if late:
        found["tasks that came after the choice"] = summary([unseen(early, late, task_of)])
    if texts:
        found["real encoders of texts, by the zoo"] = summary([unseen(zoo, texts, task_of)])
    rows = [
        [kind, f"{one['moves']:.0f}", f"{one['error of the mean share']:.2f}", f"{one['error']:.2f}",
         f"{one['better by']:+.0%}", f"{one['inside the interval']:.0%}", f"{one['width of the interval']:.2f}"]
        for kind, one in found.items()
    ]  # fmt: skip
    header = ["", "moves", "mean error of the mean share", "of the forecast", "better by", "inside the interval"]
    kinds = {name: group for name, group in (("zoo", zoo), ("texts", texts)) if group}
    each = []
    for name in every:
        pairs = [torch.stack([X[:, 0], y]) for X, y in (columns(group, [name]) for group in kinds.values())]
        each.append([name, *(f"{float(torch.corrcoef(pair)[0, 1]):+.2f}" for pair in pairs)])
    shares = {name: columns(group)[1] for name, group in kinds.items()}
    means = [f"{len(y)} moves {name}: {float(y.mean()):.0%} ± {float(y.std()):.0%}" for name, y in shares.items()]
    both = (
        common.table([*header, "width"], rows),
        common.table(["told before", *(f"correlation with the share, {name}" for name in kinds)], each),
    )
    one, (low, high) = found["a pair not seen"], COVERED
    missed = [] if one["better by"] >= BETTER else [f"better by {one['better by']:.0%}, the bound is {BETTER:.0%}"]
    if not low <= one["inside the interval"] <= high:
        missed.append(f"{one['inside the interval']:.0%} inside, the bound is {low:.0%} to {high:.0%}")
    figures = {"judged": found, "fit": fitted(zoo)}
    return f"Share of the gain: {'; '.join(means)}.\n\n{both[0]}\n\n{both[1]}", missed, figures


def finished(path: Path | None) -> dict[str, Any]:
    """The cells of a file of results; its figures are made again."""
    return {key: cell for key, cell in common.kept(path, {}).items() if "told" in cell}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few cells of short fine-tunes")
    parser.add_argument("--json", type=Path, help="write the results here; what it holds already is kept")
    parser.add_argument("--texts", action="store_true", help="real encoders of texts, not the zoo")
    parser.add_argument("--tasks", nargs="+", default=())
    parser.add_argument("--pairs", nargs="+", type=lambda pair: tuple(pair.split(":")), metavar="A:B", default=())
    parser.add_argument("--shown", action="store_true", help="run nothing: the table of what earlier runs finished")
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    if options.quick:
        options.tasks = options.tasks or (("trec",) if options.texts else ("letters",))
        options.pairs = options.pairs or (((MODELS[0], MODELS[1]),) if options.texts else (("narrow", "twin"),))
    cells = finished(options.json)
    places = (text_cells if options.texts else zoo_cells)(options.quick, options.tasks, options.pairs)
    for key, make in () if options.shown else places:
        if key not in cells:
            cells[key] = make()
            common.kept(options.json, {key: cells[key]})
            print(key, cells[key], f"{time.time() - started:.0f} s", flush=True)
    if options.quick:
        common.finish(dict(cells), "", options.json, [], started)
        return
    cells = finished(options.json) or cells  # another process may have written beside this one
    table, missed, found = report(cells)
    if options.json is not None and options.json.resolve().parent == common.RESULTS and not missed:
        FILE.write_text(json.dumps(found["fit"], indent=1) + "\n")
    common.finish({**cells, **found}, table, options.json, missed, started)


if __name__ == "__main__":
    main()
