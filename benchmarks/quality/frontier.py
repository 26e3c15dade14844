"""Quality against cost: every way to bring a fine-tune to another base, by what it recovers and what it takes.

    python benchmarks/quality/frontier.py [--quick] [--json benchmarks/results/frontier.json] [--tasks NAME …]
        [--pairs A:B …] [--counts N …] [--seeds N] [--first-seed N] [--ways KIND_OR_NAME …] [--steps N …]
        [--text | --example]

Each way is run alone, in one thread, on one pair, task and draw: its CPU-seconds are those of its own process time, its
passes are counted where the towers run (a forward with a backward is one, a forward alone a third, over the calibration
samples). Ways that train are what a user would do instead: few-shot tuning with the true labels, and refining towards
the tuned source without any, from nothing and from what was moved. A run goes on where an earlier one stopped, and
makes again what other code made.

Bounds: the default takes at most 2.5 times the CPU-seconds of BiCo with an automatic scale; no way that chooses its
scale is below the target by more than a point on a pair and task, in the mean over the draws, at any number of samples.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality.ways import BESIDE, SCRATCH, STANDARD, STARTS, STEPS, WAYS, Way, run_ways
from benchmarks.shared import common
from benchmarks.zoo import example_models, zoo_data, zoo_tasks
from benchmarks.zoo.zoo_bench import in_float32, open_short, opened
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.bench.recipe import Cell, load_recipe
from taskferry.bench.running import Bench
from taskferry.evaluation import Pool
from taskferry.example import FILES
from taskferry.fitting.preparation import prepare
from taskferry.methods import Job
from taskferry.report.figures import Line, alone, lines
from taskferry.settings import CalibrationSettings

PAIRS = (("narrow", "twin"), ("wide", "narrow"), ("narrow", "wide"), ("twin", "deep"))
TASKS = ("letters", "cifar10", "occluded", "case")
TEXTS = ("trec", "snli")
COUNTS = (10, 30, 100)
KINDS = ("moved", "few-shot", "refined", "all")
WORST = -1.0  # points
MODELS = {model for pair in PAIRS for model in pair}
ZOO, NEW, TEXT = "zoo", "zoo, new tasks and a new pair", "real encoders of texts"
EXAMPLE = "example, by the loss"
DEARER = 2.5  # the most that the default takes, in CPU-seconds of BiCo with an automatic scale
IMAGES = common.ROOT / "docs" / "images"


def run_cell(bench: Bench, cell: Cell, wanted: dict[str, Way], known: dict[str, Any]) -> Iterator[None]:
    """Every way that is wanted and not known yet of one pair, task and draw."""
    prepared = bench.prepare(cell)
    A, B = bench.model(cell.source).model, bench.model(cell.target).model
    tau, oracle = bench.tuned(cell.source, cell.task), bench.tuned(cell.target, cell.task)

    def score(added: TaskVector, scale: float) -> float:
        return bench.score(cell.target, cell.task, added, scale, prepared, 1)

    known |= {"target": score(TaskVector({}), 1.0), "oracle": score(oracle, 1.0)}
    job = Job.of(A, B, tau, prepared.calibration, prepared.objectives)
    yield from run_ways(job, cell.count, wanted, score, known.setdefault("ways", {}))


def run_example(count: int, wanted: dict[str, Way], known: dict[str, Any]) -> Iterator[None]:
    """The language models that come with the package; a score is the loss per token on later books, turned round."""
    root = zoo_data.DATA / "example"
    A, B = load_model(str(FILES / "base-a")), load_model(str(FILES / "base-b"))
    tuned = load_tuned(str(FILES / "my-lora"), A)
    test = Pool(load_samples(str(FILES / "test.jsonl")), B, max_length=example_models.LENGTH)
    batches = test.batches(range(len(test)), 50)

    def score(added: TaskVector, scale: float) -> float:
        return round(-example_models.moved_loss(B, batches, added, scale), 4)

    if "oracle" not in known:
        example_models.make_data(root)
        known["oracle"] = round(-example_models.adapter(FILES / "base-b", root, example_models.LORA_STEPS), 4)
    known["target"] = score(TaskVector({}), 1.0)
    settings = CalibrationSettings(calibration=str(FILES / "data.jsonl"), samples=count, micro_batch=20)
    prepared = prepare(settings, A, B, tuned)
    job = Job.of(A.model, B.model, tuned.tau, prepared.calibration, prepared.objectives)
    yield from run_ways(job, count, wanted, score, known.setdefault("ways", {}))


def open_texts(quick: bool) -> Bench:
    """The real encoders of texts, with fine-tunes in float32."""
    shared = common.need_shared()
    recipe = in_float32(load_recipe("real/text-deep-to-shallow"))
    return opened(recipe, shared / "models", shared / "data", quick)


def group(key: str) -> str:
    """Which table a cell belongs to."""
    task, source, target, *_ = key.split()
    if source not in MODELS:
        return EXAMPLE if source == "base-a" else TEXT
    return ZOO if task in TASKS and (source, target) in PAIRS else NEW


def in_table(cells: dict[str, Any], kind: str) -> dict[str, Any]:
    """The cells of one table."""
    return {key: known for key, known in cells.items() if group(key) == kind}


def grouped(cells: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every table and number of samples, with the cells of that table."""
    for kind, count in sorted({(group(key), int(key.split()[3])) for key in cells}):
        yield kind, count, in_table(cells, kind)


@dataclass
class Found:
    """One way at one number of samples, over the cells that it was run in."""

    share: list[float]  # of the oracle's gain, for each draw: sums over pairs and tasks
    least: float  # points over the target of the worst pair and task, in the mean over its draws
    cpu: float
    passes: tuple[float, float]
    cells: int
    places: int  # pairs and tasks
    worst: str  # the place of the least gain


def summed(cells: dict[str, Any], name: str, count: int) -> Found | None:
    """Over cells of one group."""
    gains: dict[int, list[tuple[float, float]]] = {}
    by_place: dict[str, list[float]] = {}
    costs = []
    for key, known in cells.items():
        task, source, target, number, seed = key.split()
        way = known["ways"].get(name, {})
        if int(number) != count or "score" not in way:
            continue
        gain = way["score"] - known["target"]
        gains.setdefault(int(seed), []).append((gain, known["oracle"] - known["target"]))
        by_place.setdefault(f"{task} {source} {target}", []).append(gain)
        costs.append((way["cpu"], *way["passes"]))
    if not costs:
        return None
    full = max(map(len, gains.values()))
    share = [sum(g for g, _ in some) / (sum(o for _, o in some) or float("nan")) for some in gains.values()
             if len(some) == full]  # fmt: skip
    cpu, of_A, of_B = (statistics.mean(column) for column in zip(*costs, strict=True))
    worst = min(by_place, key=lambda place: statistics.mean(by_place[place]))
    least = statistics.mean(by_place[worst])
    return Found(share, least, cpu, (of_A, of_B), len(costs), len(by_place), worst)


def table(cells: dict[str, Any]) -> str:
    rows = []
    for kind, count, some in grouped(cells):
        for name in WAYS:
            found = summed(some, name, count)
            if found is not None:
                share = shown_share(found)
                passes = " / ".join(f"{p:.1f}" for p in found.passes)
                rows.append([kind, str(count), name, str(found.cells), f"{share} %", f"{found.least:+.2f}",
                             f"{found.cpu:.1f}", passes])  # fmt: skip
    header = ["", "N", "way", "cells", "share of the oracle's gain", "least gain of a pair and task, points",
              "CPU-seconds", "passes, source / target"]  # fmt: skip
    return common.table(header, rows)


def never_worse_table(cells: dict[str, Any]) -> str:
    """Ways that choose their scale: the worst pair and task at every number of samples, in the mean over draws."""
    rows = []
    for kind, count, some in grouped(cells):
        for name, way in WAYS.items():
            found = summed(some, name, count) if way.auto else None
            if found is not None:
                draws = f"{found.cells / found.places:.3g}"
                rows.append([kind, str(count), name, str(found.places), draws, f"{found.least:+.2f}", found.worst])
    header = ["", "N", "way", "pairs and tasks", "draws", "least gain, points", "where"]
    return common.table(header, rows)


def comparable(cells: dict[str, Any], count: int) -> dict[str, Any]:
    """Those of one number of samples in which all kinds of way were run that were run in any."""
    mine = {key: known for key, known in cells.items() if int(key.split()[3]) == count}
    kinds = {key: {WAYS[name].kind for name in known["ways"] if name in WAYS} for key, known in mine.items()}
    every = set().union(*kinds.values()) - {"refined"}  # dearer: of some of them alone, which its table says
    return {key: known for key, known in mine.items() if every <= kinds[key]}


def refine_table(cells: dict[str, Any]) -> str:
    """Share against steps: what a move saves of a training."""
    rows = []
    for kind, count, some in grouped(cells):
        for line, start in {**STARTS, SCRATCH: ""}.items():
            names = [f"{line}, {n} steps" for n in STEPS]
            found = [summed(some, name, count) for name in names]
            if any(found):
                moved = {"bico": BESIDE, "twofold": STANDARD}.get(start)
                same = {key: known for key, known in some.items() if set(names) & set(known["ways"])}  # not all cells
                first = summed(same, moved, count) if moved else None
                before = "0 %" if moved is None else "" if first is None else f"{shown_share(first)} %"
                rows.append(
                    [kind, str(count), line, before, *("" if f is None else f"{shown_share(f)} %" for f in found)]
                )
    return common.table(["", "N", "way", "0 steps", *(f"{n} steps" for n in STEPS)], rows)


def is_refined(cell: dict[str, Any]) -> bool:
    """Whether some way of a cell was refined."""
    return any(WAYS[name].kind == "refined" for name in cell.get("ways", {}) if name in WAYS)


def shown_share(found: Found) -> str:
    """Of the oracle's gain, in per cent, with its spread over draws."""
    return common.mean_spread([100 * s for s in found.share], 0)


def draw(cells: dict[str, Any], count: int) -> str:
    """Share against CPU-seconds at one number of samples."""
    curves = []
    for line in dict.fromkeys(way.line for way in WAYS.values() if way.line):
        found = [(f.cpu, 100 * statistics.mean(f.share)) for name, way in WAYS.items() if way.line == line
                 for f in [summed(cells, name, count)] if f is not None]  # fmt: skip
        if found:
            x, y = zip(*found, strict=True)
            curves.append(Line(line, x, y, dashed="labels" in line))
    return lines(
        curves, x="CPU-seconds", y="% of the oracle's gain", logarithmic="x", level=(0.0, "target"), height=4.0
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one cell of short fine-tunes")
    parser.add_argument("--json", type=Path, help="write the results here; what it holds already is kept")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--pairs", nargs="+", type=lambda pair: tuple(pair.split(":")), default=PAIRS, metavar="A:B")
    parser.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the draws before this one")
    parser.add_argument("--ways", nargs="+", choices=(*KINDS, *WAYS), default=["all"],
                        metavar="KIND_OR_NAME", help=f"{', '.join(KINDS)}, or rows by name")  # fmt: skip
    parser.add_argument("--steps", nargs="+", type=int, default=(1, *STEPS), help="of ways that train")
    parser.add_argument("--text", action="store_true", help="real encoders of texts: gte-small to MiniLM-L6 and back")
    parser.add_argument("--example", action="store_true", help="the language models that come with the package")
    parser.add_argument("--shown", action="store_true", help="run nothing: the table of what earlier runs finished")
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    wanted = {
        name: way
        for name, way in WAYS.items()
        if {"all", way.kind, name} & set(options.ways) and way.settings.get("steps", options.steps[0]) in options.steps
    }
    if options.text:
        options.tasks, options.pairs = TEXTS, [("MiniLM-L6", "gte-small"), ("gte-small", "MiniLM-L6")]
    if options.quick:
        options.tasks, options.pairs, options.counts, options.seeds = ["letters"], [PAIRS[0]], [20], 1
        wanted = {name: way for name, way in wanted.items() if way.settings.get("steps", 1) in (1, 10)}
    cells = common.kept(options.json, {})
    if options.example:
        for count in options.counts:
            key = f"scripture base-a base-b {count} 0"
            for _ in run_example(count, wanted, cells.setdefault(key, {})):
                common.kept(options.json, {key: cells[key]})
            print(key, f"{time.time() - started:.0f} s", flush=True)
    elif not options.shown:
        bench = (open_texts if options.text else open_short)(options.quick)
        seeds = range(options.first_seed, options.seeds)  # outermost: what a stop leaves is whole draws
        for seed, task, (source, target), count in product(seeds, options.tasks, options.pairs, options.counts):
            if not options.text:
                zoo_tasks.write(task, zoo_data.DATA / "tasks")
            key, cell = (
                f"{task} {source} {target} {count} {seed}",
                Cell(source, target, task, "random", count, False, seed, ()),
            )
            for _ in run_cell(bench, cell, wanted, cells.setdefault(key, {})):
                common.kept(options.json, {key: cells[key]})
            print(key, f"{time.time() - started:.0f} s", flush=True)
        cells = common.kept(options.json, {}) or cells  # with those of another process
    failures = []
    for kind, count, some in grouped(cells):
        for name, way in WAYS.items():
            found = summed(some, name, count) if way.auto else None
            if found is not None and found.least < WORST:
                failures.append(f"{kind}: {name} with {count} samples: {found.least:+.1f} points on a pair and task")
        standard, bico = (summed(some, name, count) for name in (STANDARD, BESIDE))
        if standard and bico and standard.cpu > DEARER * bico.cpu:
            failures.append(
                f"{kind}, {count} samples: the default takes {standard.cpu / bico.cpu:.2f} times BiCo's time"
            )
        committed = options.json is not None and options.json.resolve().parent == common.RESULTS
        if committed and count in COUNTS and kind == ZOO:  # a trial elsewhere leaves the pages as they are
            (IMAGES / f"frontier-{count}.svg").write_text(alone(draw(comparable(some, count), count)))
    failures = [] if options.quick else failures
    tables = [refine_table(cells)] if any(map(is_refined, cells.values())) else []
    shown = "\n\n".join([*tables, never_worse_table(cells), table(cells)])
    common.finish(cells, shown, options.json, failures, started)


if __name__ == "__main__":
    main()
