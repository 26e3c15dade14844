"""Quality against cost: every way to bring a fine-tune to another base, by what it recovers and what it takes.

    python benchmarks/quality/frontier.py [--quick] [--json benchmarks/results/frontier.json] [--tasks NAME …]
        [--pairs A:B …] [--counts N …] [--seeds N] [--ways moved|few-shot|refined|all] [--steps N …]
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from benchmarks.shared import common
from benchmarks.zoo import example_models, zoo_data, zoo_tasks
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.bench.recipe import Cell, load_recipe
from taskferry.bench.rows import Mover, RowKind
from taskferry.bench.running import Bench, Places, Reporter
from taskferry.evaluation import Pool, evaluate
from taskferry.example import FILES
from taskferry.fitting.objectives import LanguageModel
from taskferry.fitting.preparation import prepare
from taskferry.fitting.scale import moved_by
from taskferry.methods import CannotMove, Job, TableRow, find
from taskferry.report.figures import Line, alone, lines
from taskferry.settings import CalibrationSettings
from taskferry.training.refinement import Refinement, refine

PAIRS = (("narrow", "twin"), ("wide", "narrow"), ("narrow", "wide"), ("twin", "deep"))
TASKS = ("letters", "cifar10", "occluded", "case")
TEXTS = ("trec", "snli")
COUNTS = (10, 30, 100)
STEPS = (10, 30, 100, 300)
STARTS = {
    "refined, no move": "cold",
    "refined from BiCo": "bico",
    "refined from the default": "twofold",
}
SCRATCH = "trained in its form, labels"  # a LoRA of the same rank, or the weights that would have moved
WORST = -1.0  # points
MODELS = {model for pair in PAIRS for model in pair}
ZOO, NEW, TEXT = "zoo", "zoo, new tasks and a new pair", "real encoders of texts"
EXAMPLE = "example, by the loss"
DEARER = 2.5  # the most that the default takes, in CPU-seconds of BiCo with an automatic scale
STANDARD, BESIDE = "+ a second capture: effort standard", "BiCo, automatic scale"
IMAGES = common.ROOT / "docs" / "images"


@dataclass(frozen=True)
class Way:
    """A method with settings; `line` joins what one curve goes through."""

    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    auto: bool = False  # its scale is chosen on the samples
    teacher: bool = False
    line: str = ""

    @property
    def kind(self) -> str:
        if not self.row.method.needs.training:
            return "moved"
        return "refined" if self.method == "distil" else "few-shot"

    @property
    def row(self) -> RowKind:
        """As tables know it, though most are in none."""
        row = TableRow(self.method, self.settings, auto_scale=self.auto, teacher=self.teacher)
        return RowKind(find(self.method), row)


FAST, THOROUGH = (find("twofold").at(effort) for effort in ("fast", "thorough"))
PARTS = "the default, part by part"
WAYS: dict[str, Way] = {
    "THESEUS": Way("theseus"),
    "BiCo at scale 1": Way("bico", line=PARTS),
    BESIDE: Way("bico", auto=True, line=PARTS),
    "+ gradients of one length": Way("twofold", {**FAST, "whiten": False}, auto=True),
    "+ whitened: effort fast": Way("twofold", FAST, auto=True, line=PARTS),
    STANDARD: Way("twofold", auto=True, line=PARTS),
    "+ augmented views: effort thorough": Way("twofold", THOROUGH, auto=True, line=PARTS),
    "effort fast, no labels": Way("twofold", FAST, auto=True, teacher=True),
    "effort standard, no labels": Way("twofold", auto=True, teacher=True),
    "effort thorough, no labels": Way("twofold", THOROUGH, auto=True, teacher=True),
    **{f"few-shot, {n} steps": Way("few-shot", {"steps": n}, line="few-shot tuning, labels") for n in (1, *STEPS)},
    **{
        f"few-shot from BiCo, {n} steps": Way(
            "few-shot", {"steps": n, "start": "bico"}, line="few-shot tuning from BiCo, labels"
        )
        for n in (1, *STEPS)
    },
    **{
        f"{line}, {n} steps": Way("distil", {"steps": n, "start": start}, line=line)
        for line, start in STARTS.items()
        for n in STEPS
    },
    **{
        f"{SCRATCH}, {n} steps": Way("distil", {"steps": n, "start": "cold", "labels": 1.0, "views": 0}, line=SCRATCH)
        for n in STEPS
    },
}


@contextmanager
def counted(model: nn.Module, samples: int) -> Iterator[list[float]]:
    """Passes of a model over the samples, in its first element: where its blocks begin."""
    passes = [0.0]
    tower = getattr(model, "visual", model)

    def seen(_: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        size = len(next(value for value in (*given, *named.values()) if isinstance(value, torch.Tensor)))
        passes[0] += size / samples * (1.0 if torch.is_grad_enabled() else 1 / 3)

    handle = tower.register_forward_pre_hook(seen, with_kwargs=True)
    try:
        yield passes
    finally:
        handle.remove()


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
        with moved_by(B.model, added) as at:
            at(scale)
            return round(-evaluate(B.model, batches, LanguageModel()).loss, 4)

    if "oracle" not in known:
        example_models.make_data(root)
        known["oracle"] = round(-example_models.adapter(FILES / "base-b", root, example_models.LORA_STEPS), 4)
    known["target"] = score(TaskVector({}), 1.0)
    settings = CalibrationSettings(calibration=str(FILES / "data.jsonl"), samples=count, micro_batch=20)
    prepared = prepare(settings, A, B, tuned)
    job = Job.of(A.model, B.model, tuned.tau, prepared.calibration, prepared.objectives)
    yield from run_ways(job, count, wanted, score, known.setdefault("ways", {}))


def run_ways(
    given: Job, count: int, wanted: dict[str, Way], score: Callable[[TaskVector, float], float], ways: dict[str, Any]
) -> Iterator[None]:
    """Those that are not known yet, each on a job of its own; what is refined from a move of this run takes that one.

    Its cost is that of the move and of the training together.
    """
    starts: dict[str, tuple[TaskVector, float, tuple[float, float]]] = {}
    for name, way in wanted.items():
        if name in ways and ways[name]["code"] == way.row.code:
            continue
        job = Job.of(given.source, given.target, given.tau, given.calibration, given.pair.objectives)
        start = starts.get(way.settings.get("start", ""))
        with counted(job.source, count) as of_A, counted(job.target, count) as of_B:
            started = time.process_time()
            try:
                if start is None:
                    moved, scale, _ = Mover(job).take(way.row)
                else:
                    settings = {key: value for key, value in way.settings.items() if key != "start"}
                    moved, scale = refine(job.in_folds().pair, job.tau, start[0], Refinement(**settings)).tau, 1.0
            except CannotMove as error:
                ways[name] = {"refused": str(error), "code": way.row.code}
                continue
            seconds = time.process_time() - started
        before, (passes_A, passes_B) = (0.0, (0.0, 0.0)) if start is None else start[1:]
        seconds, passes = seconds + before, (of_A[0] + passes_A, of_B[0] + passes_B)
        if way.auto and not way.settings and not way.teacher:
            starts[way.method] = (scale * moved, seconds, passes)
        ways[name] = {
            "score": score(moved, scale),
            "cpu": round(seconds, 2),
            "passes": [round(each, 1) for each in passes],
            "scale": round(scale, 2),
            "code": way.row.code,
        }
        yield


def open_bench(quick: bool, text: bool = False) -> Bench:
    """The zoo, or the real encoders of texts, with short fine-tunes in float32."""
    recipe = load_recipe("real/text-deep-to-shallow" if text else "zoo/frontier")
    single = recipe.finetune.model_copy(update={"precision": "float32"})
    recipe = recipe.model_copy(update={"finetune": single})
    if quick:
        short = recipe.finetune.model_copy(update={"steps": 20, "every": 20, "warmup": 2})
        recipe = recipe.model_copy(update={"finetune": short, "test_samples": 100})
    work = zoo_data.DATA / ("work-quick" if quick else "work")
    places = Places(zoo_data.ZOO, zoo_data.DATA / "tasks", work)
    if text:
        places = Places(common.need_shared() / "models", common.need_shared() / "data", work)
    return Bench(recipe, places, Reporter())


def group(key: str) -> str:
    """Which table a cell belongs to."""
    task, source, target, *_ = key.split()
    if source not in MODELS:
        return EXAMPLE if source == "base-a" else TEXT
    return ZOO if task in TASKS and (source, target) in PAIRS else NEW


def grouped(cells: dict[str, Any]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """Every table and number of samples, with the cells of that table."""
    for kind, count in sorted({(group(key), int(key.split()[3])) for key in cells}):
        yield kind, count, {key: known for key, known in cells.items() if group(key) == kind}


def kept(path: Path | None, cells: dict[str, Any]) -> dict[str, Any]:
    """All cells that are known, these among them: other processes may add theirs to the same file."""
    known = cells if path is None else common.keep(path, cells)
    return {key: value for key, value in known.items() if isinstance(value, dict)}


@dataclass
class Found:
    """One way at one number of samples, over the cells that it was run in."""

    share: list[float]  # of the oracle's gain, for each draw: sums over pairs and tasks
    least: float  # points over the target of the worst pair and task, in the mean over its draws
    cpu: float
    passes: tuple[float, float]
    cells: int


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
    share = [sum(g for g, _ in some) / sum(o for _, o in some) for some in gains.values() if len(some) == full]
    cpu, of_A, of_B = (statistics.mean(column) for column in zip(*costs, strict=True))
    return Found(share, min(map(statistics.mean, by_place.values())), cpu, (of_A, of_B), len(costs))


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


def refine_table(cells: dict[str, Any]) -> str:
    """Share against steps: what a move saves of a training."""
    rows = []
    for kind, count, some in grouped(cells):
        for line, start in {**STARTS, SCRATCH: ""}.items():
            found = [summed(some, f"{line}, {n} steps", count) for n in STEPS]
            if any(found):
                moved = {"bico": BESIDE, "twofold": STANDARD}.get(start)
                first = summed(some, moved, count) if moved else None
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
    parser.add_argument("--ways", choices=("moved", "few-shot", "refined", "all"), default="all")
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
        if options.ways in ("all", way.kind) and way.settings.get("steps", options.steps[0]) in options.steps
    }
    if options.text:
        options.tasks, options.pairs = TEXTS, [("MiniLM-L6", "gte-small"), ("gte-small", "MiniLM-L6")]
    if options.quick:
        options.tasks, options.pairs, options.counts, options.seeds = ["letters"], [PAIRS[0]], [20], 1
        wanted = {name: way for name, way in wanted.items() if way.settings.get("steps", 1) in (1, 10)}
    cells = kept(options.json, {})
    if options.example:
        for count in options.counts:
            key = f"scripture base-a base-b {count} 0"
            for _ in run_example(count, wanted, cells.setdefault(key, {})):
                kept(options.json, {key: cells[key]})
            print(key, f"{time.time() - started:.0f} s", flush=True)
    elif not options.shown:
        bench = open_bench(options.quick, options.text)
        places = product(options.tasks, range(options.seeds), options.pairs, options.counts)
        for task, seed, (source, target), count in places:
            if not options.text:
                zoo_tasks.write(task, zoo_data.DATA / "tasks")
            key, cell = (
                f"{task} {source} {target} {count} {seed}",
                Cell(source, target, task, "random", count, False, seed, ()),
            )
            for _ in run_cell(bench, cell, wanted, cells.setdefault(key, {})):
                kept(options.json, {key: cells[key]})
            print(key, f"{time.time() - started:.0f} s", flush=True)
        cells = kept(options.json, {}) or cells  # with those of another process
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
            (IMAGES / f"frontier-{count}.svg").write_text(alone(draw(some, count)))
    failures = [] if options.quick else failures
    both = f"{refine_table(cells)}\n\n{table(cells)}" if any(map(is_refined, cells.values())) else table(cells)
    common.finish(cells, both, options.json, failures, started)


if __name__ == "__main__":
    main()
