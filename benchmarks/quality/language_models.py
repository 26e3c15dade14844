"""Does a LoRA survive the move between real language models: right answers against CPU-seconds.

    python benchmarks/quality/language_models.py [--quick] [--json benchmarks/results/language_models.json]
        [--models FOLDER] [--pairs A:B …] [--tasks NAME …] [--samples data|teacher|generated] [--counts N …]
        [--seeds N] [--first-seed N] [--ways NAME …] [--statistics-memory GIB] [--engine whole|blockwise] [--shown]

Each model is a folder of FOLDER or a hub name. A LoRA of rank 8 on every projection of the blocks is trained by trl on
all samples of a task, on the source and on the target (the oracle); the target answers 400 other questions. It
generates its answers, and one is right where it is the wanted one and ends; scripture is scored by its loss. The
calibration samples are questions with their answers, questions that the tuned source answers (teacher), or texts that
it writes freely (generated). Ways are those of `frontier.py`, each alone and in one thread. Fine-tunes are kept beside
the other data of the benchmarks, every way of a cell is written when it is done, and a run goes on where an earlier one
stopped. With `--engine blockwise` ways that only move are run file to file, with one block of each model in memory,
and what `taskferry transfer` has written is scored.

Bound: no way that chooses its scale is below the target by more than a point on a pair and task (0.01 of a loss).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality import causal, ways
from benchmarks.quality import frontier_tables as frontier
from benchmarks.quality.language_tasks import BATCH, LENGTH, TASKS, Domain
from benchmarks.shared import common
from benchmarks.shared.language import share
from benchmarks.zoo import zoo_data
from taskferry import TaskVector, load_model, load_tuned
from taskferry.data.language import with_template
from taskferry.disk.staging import staged_folder
from taskferry.engines.pair import Work
from taskferry.jobs.settings import PlanSettings, TransferSettings
from taskferry.jobs.transfer import transfer
from taskferry.methods import Job
from taskferry.models import Loaded, Tuned
from taskferry.objectives.generation import draw
from taskferry.objectives.preparation import Prepared, prepare
from taskferry.settings import CalibrationSettings

HOME = Path(os.environ.get("TASKFERRY_REAL", Path.home() / ".cache" / "taskferry-real"))
SMOL, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
SMALL, LARGE = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
PAIRS = ((SMOL, GEMMA), (GEMMA, SMOL), (SMOL, SMALL), (SMALL, LARGE), (LARGE, SMALL))
TEST = 400
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
TRAINED = 120  # steps of a LoRA on all samples
PROTOCOL: dict[str, Any] = {
    "per_device_train_batch_size": 8, "learning_rate": 1e-3, "warmup_steps": 10, "lr_scheduler_type": "cosine",
    "max_length": 2 * LENGTH, "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "seed": 0,
    "gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 20, "dataset_num_proc": None,
}  # fmt: skip
STEPS = (10, 30, 100, 300)
ORIGINS = {"": "labelled", "teacher": "labelled by the tuned source", "generated": "written by the tuned source"}
WAYS: dict[str, ways.Way] = {
    "THESEUS": ways.Way("theseus", auto=True),
    "BiCo at scale 1": ways.Way("bico"),
    ways.BESIDE: ways.Way("bico", auto=True),
    "effort fast": ways.Way("twofold", ways.FAST, auto=True),
    "the default": ways.Way("twofold", auto=True),
    **{f"LoRA from scratch, labels, {n} steps": ways.Way("distil", {"steps": n, "start": "cold", "labels": 1.0})
       for n in STEPS},
    **{f"refined, no move, {n} steps": ways.Way("distil", {"steps": n, "start": "cold"}) for n in STEPS},
    **{f"refined from the default, {n} steps": ways.Way("distil", {"steps": n, "start": "twofold"})
       for n in STEPS},
}  # fmt: skip


FACTS = {"begins": "begun right", "stopped": "stopped", "valid_json": "valid JSON"}
Score = Callable[[TaskVector, float], float]


def tuned(loaded: Loaded, folder: Path, task: str, steps: int) -> Path:
    """A LoRA on all samples of a task, trained once by trl as it does by itself; its seconds stand beside it."""
    out = folder / f"{Path(loaded.given).name}-{task}-{steps}-sft"
    if not out.exists():
        import datasets
        import peft
        import trl

        torch.manual_seed(0)
        model = peft.get_peft_model(loaded.model, peft.LoraConfig(**LORA))
        with TemporaryDirectory() as scratch:
            arguments = trl.SFTConfig(output_dir=scratch, max_steps=steps, **PROTOCOL)
            rows = datasets.Dataset.from_list(list(map(halves, TASKS[task].samples("train").rows)))
            trainer = trl.SFTTrainer(model, arguments, train_dataset=rows, processing_class=loaded.tokenizer())
            started = time.process_time()
            trainer.train()
            seconds = time.process_time() - started
        with staged_folder(out) as stage:
            model.save_pretrained(stage)
            (stage / "cost.json").write_text(json.dumps({"cpu": round(seconds, 1)}) + "\n")
        model.unload()
        loaded.model.eval().requires_grad_(True)
    return out


def halves(row: dict[str, Any]) -> dict[str, Any]:
    """A chat as trl takes it, for a loss on the answer alone."""
    messages = row.get("messages")
    return row if messages is None else {"prompt": messages[:-1], "completion": messages[-1:]}


def calibration_of(models: tuple[Loaded, Loaded], change: Tuned, name: str, count: int, seed: int) -> Prepared:
    """Of "trec" with the data's answers, "trec+teacher" with the tuned source's, "trec+generated" written by it."""
    task, _, origin = name.partition("+")
    given: dict[str, Any] = {"samples": count, "seed": seed, "micro_batch": BATCH, "max_length": LENGTH}
    samples = TASKS[task].samples("train")
    if origin == "generated":
        ends = {"source_base": "source", "target_base": "target", "source_tuned": "tuned"}
        samples = draw(PlanSettings(calibration="generate", **ends, **given), *models, change).samples
    labels = {"labels": "teacher"} if origin == "teacher" else {}
    return prepare(CalibrationSettings(calibration=task, **given, **labels), *models, change, samples=samples)


def run_cell(
    models: tuple[Loaded, Loaded], folder: Path, name: str, count: int, seed: int, steps: int,
    wanted: dict[str, ways.Way], known: dict[str, Any], tested: int, memory: float, by_block: bool = False,
) -> Any:  # fmt: skip
    """Every way that is not known yet; yields after each."""
    A, B = models
    task = name.partition("+")[0]
    with_template(B.tokenizer(), A.tokenizer())  # the oracle learns chats in the form that is moved
    teacher = tuned(A, folder, task, steps)
    change = load_tuned(str(teacher), A)
    test = TASKS[task].questions(tested)
    last: dict[str, float] = {}

    def score(added: TaskVector, scale: float, side: int = 1) -> float:
        found = TASKS[task].score(models[side], test, added, scale)
        last.clear()
        last.update(found.facts())
        return found.score

    if "oracle" not in known:
        best = tuned(B, folder, task, steps)
        told = (
            ("target", TaskVector({}), 1),
            ("source", change.tau, 0),
            ("oracle", load_tuned(str(best), B).tau, 1),
        )
        for which, added, side in told:
            known[which] = score(added, 1.0, side)
            known |= {f"{which} {fact}": value for fact, value in last.items()}
        known["oracle cpu"] = json.loads((best / "cost.json").read_text())["cpu"]
    ready = known.setdefault("ways", {})
    if all(way.known(name, ready) for name, way in wanted.items()):
        return
    if by_block:
        for way in [name for name in wanted if not wanted[name].known(name, ready)]:
            ready[way] = file_to_file(models, teacher, task, count, seed, wanted[way], score) | last
            yield
        return
    started = time.process_time()
    prepared = calibration_of(models, change, name, count, seed)
    known["samples cpu"] = round(time.process_time() - started, 1)
    work = Work(int(memory * 2**30))
    job = Job.of(A.model, B.model, change.tau, prepared.calibration, prepared.objectives, work)
    for _ in ways.run_ways(job, count, wanted, score, ready):
        ready[next(reversed(ready))] |= last
        yield


def file_to_file(
    models: tuple[Loaded, Loaded], tuned_source: Path, task: str, count: int, seed: int, way: ways.Way, score: Score
) -> dict[str, Any]:
    """A way as `taskferry transfer` runs it block by block, with all that it reads and writes."""
    A, B = models
    with TemporaryDirectory() as scratch:
        data, out = Path(scratch, "data.jsonl"), Path(scratch, "moved")
        causal.write_lines(data, list(TASKS[task].samples("train").rows))
        settings = TransferSettings(
            source_base=A.given, source_tuned=str(tuned_source), target_base=B.given, calibration=str(data), out=out,
            samples=count, seed=seed, micro_batch=BATCH, max_length=LENGTH, method=way.method,
            method_settings=way.settings, scale="auto" if way.auto else 1.0, engine="blockwise",
        )  # fmt: skip
        started = time.process_time()
        outcome = transfer(settings, command="benchmark")
        seconds = time.process_time() - started
        assert outcome is not None
        moved = TaskVector({}) if outcome.written is None else load_tuned(str(outcome.written), B).tau
        scale = float(outcome.record["verdict"]["scale"])
        found = {"score": score(moved, 1.0), "cpu": round(seconds, 2), "scale": round(scale, 2)}
    return {**found, "engine": settings.engine, "code": way.row.code}


def is_domain(key: str) -> bool:
    """Whether a cell is scored by its loss alone."""
    return isinstance(TASKS[key.split()[0].partition("+")[0]], Domain)


def worst(key: str) -> float:
    """What a way that chooses its scale may lose: a point, or a hundredth of a nat per token."""
    return frontier.WORST / 100 if is_domain(key) else frontier.WORST


def curves(cells: dict[str, Any]) -> str:
    """Share against steps, in the cells that have every number of them."""
    some = {key: cell for key, cell in cells.items() if "+" not in key and not is_domain(key)}
    starts = {"refined, no move": "", "refined from the default": "the default", "LoRA from scratch, labels": ""}
    found = [curve for curve in frontier.refined(some, 100, starts) if max(curve.points) == STEPS[-1]]
    return common.table(frontier.CURVES, frontier.curve_rows(found)) + "\n\n" if found else ""


def summary(cells: dict[str, Any]) -> str:
    """What each way recovers over all cells of a number of samples, and what it takes; shares as in `frontier.py`."""
    rows, kinds = [], {_kind(key) for key in cells}
    for (domain, origin, count), name in product(sorted(kinds), WAYS):
        some = {key: cell for key, cell in cells.items() if _kind(key) == (domain, origin, count)}
        if (found := frontier.summed(some, name, count)) is not None:
            least = f"{-found.least:+.3f} of the loss" if domain else f"{found.least:+.1f}"
            rows.append([ORIGINS[origin], str(count), name, str(found.cells), f"{frontier.shown_share(found)} %",
                         least, f"{found.cpu:.0f}"])  # fmt: skip
    header = ["samples", "N", "way", "cells", "share of the oracle's gain", "least gain of a pair and task, points",
              "CPU-seconds"]  # fmt: skip
    return common.table(header, rows)


def _kind(key: str) -> tuple[bool, str, int]:
    """Cells that are summed together."""
    task, _, _, count, _ = key.split()
    return is_domain(key), task.partition("+")[2], int(count)


def table(cells: dict[str, Any]) -> str:
    rows = []
    for key, cell in cells.items():
        task, source, target, count, seed = key.split()
        task, _, origin = task.partition("+")
        made = f" in {cell['samples cpu']:.0f} CPU-seconds" if origin else ""  # not among those of the ways
        draw = f", draw {int(seed) + 1}" if int(seed) else ""
        where = [f"{task}, {source} → {target}{draw}", ORIGINS[origin] + made, count]

        def shown(score: float, facts: dict[str, Any], key: str = key, begin: str = "") -> list[str]:
            right = "" if is_domain(key) else f"{score:.1f}"
            more = (f"{facts[begin + name]:.1f}" if begin + name in facts else "" for name in FACTS)
            return [right, *more, f"{facts.get(begin + 'loss', 0):.2f}"]

        rows.append([*where, "tuned source", *shown(cell["source"], cell, begin="source "), "", ""])
        rows.append(["", "", "", "target", *shown(cell["target"], cell, begin="target "), "", ""])
        for name in WAYS:
            way = cell["ways"].get(name, {})
            if "score" in way:
                recovered = f"{share(cell, way['score']):.0f} %"
                rows.append(["", "", "", name, *shown(way["score"], way), recovered, f"{way['cpu']:.0f}"])
        rows.append(["", "", "", "LoRA of all samples on the target (oracle)",
                     *shown(cell["oracle"], cell, begin="oracle "), "100 %", f"{cell['oracle cpu']:.0f}"])  # fmt: skip
    every = common.table(
        [
            "",
            "samples",
            "N",
            "way",
            "right answers",
            *FACTS.values(),
            "loss",
            "share of the oracle's gain",
            "CPU-seconds",
        ],
        rows,
    )
    return f"{summary(cells)}\n\n{curves(cells)}{every}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the models that come with the package, a few steps")
    parser.add_argument("--json", type=Path, help="write the results here; what it holds already is kept")
    parser.add_argument("--models", type=Path, default=HOME, help="where the folders of the models are")
    parser.add_argument("--pairs", nargs="+", type=lambda pair: tuple(pair.split(":")), default=PAIRS, metavar="A:B")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--samples", choices=("data", "teacher", "generated"), default="data", dest="origin")
    parser.add_argument("--counts", nargs="+", type=int, default=(100,))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the draws before this one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--statistics-memory", type=float, default=4, metavar="GIB", help="for sums, as in `transfer`")
    parser.add_argument("--engine", choices=("whole", "blockwise"), default="whole", help="as in `transfer`")
    parser.add_argument("--shown", action="store_true", help="run nothing: the table of what earlier runs finished")
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    wanted = {name: WAYS[name] for name in options.ways}
    by_block = options.engine == "blockwise"
    if by_block and (options.origin != "data" or any(way.kind != "moved" for way in wanted.values())):
        parser.error("--engine blockwise runs ways that only move, on labelled samples: name them with --ways")
    steps, tested = TRAINED, TEST
    if options.quick:
        from taskferry.example import FILES

        options.models, options.pairs, options.tasks = FILES, [("base-a", "base-b")], ["trec"]
        options.counts, options.seeds, steps, tested = [24], 1, 4, 30
        wanted = {name: way for name, way in wanted.items() if way.settings.get("steps", 10) == 10}
    folder = zoo_data.DATA / ("language-quick" if options.quick else "language")
    folder.mkdir(parents=True, exist_ok=True)
    cells = common.kept(options.json, {})
    for task, seed, (source, target), count in product(
        options.tasks, range(options.first_seed, options.seeds), options.pairs, options.counts
    ):
        if options.shown:
            break
        named = task if options.origin == "data" else f"{task}+{options.origin}"
        key = f"{named} {source} {target} {count} {seed}"
        models = tuple(load_model(str(at) if (at := options.models / name).exists() else name)
                       for name in (source, target))  # fmt: skip
        known = cells.setdefault(key, {})
        for _ in run_cell((models[0], models[1]), folder, named, count, seed, steps, wanted, known, tested,
                          options.statistics_memory, by_block):  # fmt: skip
            common.kept(options.json, {key: known})
            last = next(reversed(known["ways"]))
            print(key, last, known["ways"][last], f"{time.time() - started:.0f} s", flush=True)
    cells = {key: cell for key, cell in cells.items() if "oracle" in cell}
    failures = [
        f"{key}: {name} is {way['score'] - cell['target']:+.1f} points"
        for key, cell in cells.items()
        for name, way in cell["ways"].items()
        if name in WAYS and WAYS[name].auto and way.get("score", 100.0) < cell["target"] + worst(key)
    ]
    common.finish(cells, table(cells), options.json, [] if options.quick else failures, started)


if __name__ == "__main__":
    main()
