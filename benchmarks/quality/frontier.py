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
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality import frontier_tables as tables
from benchmarks.quality.frontier_tables import PAIRS, TASKS, WORST, ZOO, grouped, summed
from benchmarks.quality.ways import BESIDE, STANDARD, STEPS, WAYS, Way, run_ways
from benchmarks.shared import common
from benchmarks.zoo import example_models, zoo_data, zoo_tasks
from benchmarks.zoo.zoo_bench import in_float32, open_short, opened
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.bench.recipe import Cell, load_recipe
from taskferry.bench.running import Bench
from taskferry.evaluation import Pool
from taskferry.example import FILES
from taskferry.methods import Job
from taskferry.objectives.preparation import prepare
from taskferry.report.figures import alone
from taskferry.settings import CalibrationSettings

TEXTS = ("trec", "snli")
COUNTS = (10, 30, 100)
KINDS = ("moved", "few-shot", "refined", "all")
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
            drawn = tables.draw(tables.comparable(some, count), count)
            (IMAGES / f"frontier-{count}.svg").write_text(alone(drawn))
            if count == 100:
                for name, by in (("steps", "steps"), ("seconds", "CPU-seconds")):
                    (IMAGES / f"refine-{name}.svg").write_text(alone(tables.draw_refined(cells, by)))
    failures = [] if options.quick else failures
    first = [tables.refine_table(cells)] if any(map(tables.is_refined, cells.values())) else []
    shown = "\n\n".join([*first, tables.never_worse_table(cells), tables.table(cells)])
    common.finish(cells, shown, options.json, failures, started)


if __name__ == "__main__":
    main()
