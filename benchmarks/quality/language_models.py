"""Does a LoRA survive the move between real language models: right answers against CPU-seconds.

    python benchmarks/quality/language_models.py [--quick] [--json benchmarks/results/language_models.json]
        [--models FOLDER] [--pairs A:B …] [--tasks NAME …] [--samples data|ends|teacher|generated] [--counts N …]
        [--seeds N] [--first-seed N] [--ways NAME …] [--shown]

Each model is a folder of FOLDER or a hub name. A LoRA of rank 8 on every projection of the blocks is trained by PEFT on
all samples of a task, on the source and on the target (the oracle); the target answers 400 other questions. An answer
is right where it is the likeliest of those that the task has. The calibration samples are questions with their answers,
questions that the tuned source answers (teacher; its LoRA then learned to end an answer, as in ends), or texts that it
writes freely (generated). Ways are those of `frontier.py`, each alone and in one thread. Fine-tunes are kept beside the
other data of the benchmarks, every way of a cell is written when it is done, and a run goes on where an earlier one
stopped.

Bound: no way that chooses its scale is below the target by more than a point on a pair and task.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.quality import frontier_tables as frontier
from benchmarks.quality import ways
from benchmarks.shared import common
from benchmarks.zoo import zoo_data
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.calibration.data import Samples
from taskferry.checkpoints import Loaded, Tuned
from taskferry.disk.staging import staged_folder
from taskferry.evaluation import Pool, evaluate
from taskferry.fitting.generation import draw
from taskferry.fitting.objectives import LanguageModel
from taskferry.fitting.preparation import Prepared, prepare
from taskferry.fitting.scale import moved_by
from taskferry.jobs.settings import PlanSettings
from taskferry.methods import Job
from taskferry.settings import CalibrationSettings
from taskferry.training import FineTuning, finetune

HOME = Path(os.environ.get("TASKFERRY_REAL", Path.home() / ".cache" / "taskferry-real"))
SMOL, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
SMALL, LARGE = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
PAIRS = ((SMOL, GEMMA), (GEMMA, SMOL), (SMOL, SMALL), (SMALL, LARGE), (LARGE, SMALL))
LENGTH, TEST, BATCH = 96, 400, 20
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
PROTOCOL = FineTuning(
    steps=120, batch=8, learning_rate=1e-3, weight_decay=0.0, warmup=10, validation=0.0, every=40, precision="float32"
)
STEPS = (10, 30, 100, 300)
ORIGINS = {"": "labelled", "ends": "labelled, a LoRA that ends its answers", "teacher": "labelled by that tuned source",
           "generated": "written by the tuned source"}  # fmt: skip
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


@dataclass(frozen=True)
class Task:
    """A classification in words: how a sample is asked, and what the classes are called."""

    prompt: str
    answers: tuple[str, ...]


TASKS = {
    "trec": Task("Question: {text}\nAnswer type:", ("abbreviation", "entity", "description", "human", "location",
                                                    "number")),
    "emotion": Task("Message: {text}\nFeeling:", ("sadness", "joy", "love", "anger", "fear", "surprise")),
    "ag_news": Task("Article: {text}\nTopic:", ("world", "sports", "business", "technology")),
    "snli": Task("Premise: {text}\nHypothesis: {text_pair}\nRelation:", ("entailment", "neutral", "contradiction")),
}  # fmt: skip


def samples_of(name: str, split: str, end: str = "") -> Samples:
    """Prompts and completions; `end` closes an answer, for a model that is to stop there."""
    task = TASKS[name]
    given = load_samples(str(common.need_shared() / "data" / name), split=split)
    rows = [
        {
            "prompt": task.prompt.format(text=row["text"].strip(), text_pair=(row.get("text_pair") or "").strip()),
            "completion": " " + task.answers[int(row["label"])] + end,
        }
        for row in given.rows
    ]
    return replace(given, kind="prompt", rows=rows, labels=None, classes=())


def tuned(loaded: Loaded, folder: Path, task: str, steps: int, ends: bool = False) -> Path:
    """A LoRA on all samples of a task, trained once; its seconds stand beside it. One that `ends` stops by itself."""
    out = folder / f"{Path(loaded.given).name}-{task}-{steps}{'-ends' if ends else ''}"
    if not out.exists():
        import peft

        torch.manual_seed(0)
        model = peft.get_peft_model(loaded.model, peft.LoraConfig(**LORA))
        end = str(loaded.tokenizer().eos_token) if ends else ""
        data = Pool(samples_of(task, "train", end), loaded, max_length=LENGTH)
        started = time.process_time()
        protocol = PROTOCOL.model_copy(update={"steps": steps})
        finetune(model, data, LanguageModel(), protocol, folder=folder / f"training-{out.name}")
        seconds = time.process_time() - started
        with staged_folder(out) as stage:
            model.save_pretrained(stage)
            (stage / "cost.json").write_text(json.dumps({"cpu": round(seconds, 1)}) + "\n")
        model.unload()
        for parameter in loaded.model.parameters():
            parameter.requires_grad_(True)
    return out


def calibration_of(models: tuple[Loaded, Loaded], change: Tuned, name: str, count: int, seed: int) -> Prepared:
    """Of "trec" with the data's answers, "trec+teacher" with the tuned source's, "trec+generated" written by it.

    Of "trec+ends" with the data's, moved from the source that answers in "trec+teacher": what its answers cost.
    """
    task, _, origin = name.partition("+")
    given: dict[str, Any] = {"samples": count, "seed": seed, "micro_batch": BATCH, "max_length": LENGTH}
    samples = samples_of(task, "train")
    if origin == "generated":
        ends = {"source_base": "source", "target_base": "target", "source_tuned": "tuned"}
        samples = draw(PlanSettings(calibration="generate", **ends, **given), *models, change).samples
    labels = {"labels": "teacher"} if origin == "teacher" else {}
    return prepare(CalibrationSettings(calibration=task, **given, **labels), *models, change, samples=samples)


def questions(task: str, count: int) -> Samples:
    """So many of the test split, evenly spread."""
    test = samples_of(task, "test")
    return test.take(range(0, len(test), max(1, len(test) // count))[:count])


def right_answers(loaded: Loaded, test: Samples, added: TaskVector, scale: float) -> tuple[float, float]:
    """Of a model with a change added: right answers in per cent, and the loss."""
    batches = Pool(test, loaded, max_length=LENGTH).batches(range(len(test)), BATCH)
    with moved_by(loaded.model, added) as at:
        at(scale)
        found = evaluate(loaded.model, batches, LanguageModel())
    return round(float(found.right or 0.0), 2), round(found.loss, 3)


def run_cell(
    models: tuple[Loaded, Loaded], folder: Path, name: str, count: int, seed: int, steps: int,
    wanted: dict[str, ways.Way], known: dict[str, Any], tested: int,
) -> Any:  # fmt: skip
    """Every way that is not known yet; yields after each."""
    A, B = models
    task = name.partition("+")[0]
    ends = name.endswith(("+teacher", "+ends"))  # a source that answers has to know when to stop
    found = tuned(A, folder, task, steps, ends), tuned(B, folder, task, steps)
    changes = [load_tuned(str(path), loaded) for path, loaded in zip(found, models, strict=True)]
    test = questions(task, tested)
    losses: dict[str, float] = {}

    def score(added: TaskVector, scale: float, side: int = 1) -> float:
        right, losses["last"] = right_answers(models[side], test, added, scale)
        return right

    if "oracle" not in known:
        known["target"], known["target loss"] = score(TaskVector({}), 1.0), losses["last"]
        known["source"] = score(changes[0].tau, 1.0, 0)
        known["oracle"], known["oracle loss"] = score(changes[1].tau, 1.0), losses["last"]
        cost = json.loads((found[1] / "cost.json").read_text())
        known["oracle cpu"] = cost["cpu"]
    ready = known.setdefault("ways", {})
    if all(way.known(name, ready) for name, way in wanted.items()):
        return
    started = time.process_time()
    prepared = calibration_of(models, changes[0], name, count, seed)
    known["samples cpu"] = round(time.process_time() - started, 1)
    job = Job.of(A.model, B.model, changes[0].tau, prepared.calibration, prepared.objectives)
    for _ in ways.run_ways(job, count, wanted, score, ready):
        ready[next(reversed(ready))]["loss"] = losses["last"]
        yield


def share(cell: dict[str, Any], score: float) -> float:
    """Of the points that a LoRA trained on the target gains."""
    gain = cell["oracle"] - cell["target"]
    return 100 * (score - cell["target"]) / gain if gain else float("nan")  # a quick one may learn nothing


def curves(cells: dict[str, Any]) -> str:
    """Share against steps, in the cells that have every number of them."""
    some = {key: cell for key, cell in cells.items() if "+" not in key}
    starts = {"refined, no move": "", "refined from the default": "the default", "LoRA from scratch, labels": ""}
    found = [curve for curve in frontier.refined(some, 100, starts) if max(curve.points) == STEPS[-1]]
    return common.table(frontier.CURVES, frontier.curve_rows(found)) + "\n\n" if found else ""


def summary(cells: dict[str, Any]) -> str:
    """What each way recovers over all cells of a number of samples, and what it takes; shares as in `frontier.py`."""
    rows = []
    kinds = {(key.split()[0].partition("+")[2], int(key.split()[3])) for key in cells}
    for (origin, count), name in product(sorted(kinds), WAYS):
        some = {key: cell for key, cell in cells.items() if key.split()[0].partition("+")[2] == origin}
        if (found := frontier.summed(some, name, count)) is not None:
            rows.append([ORIGINS[origin], str(count), name, str(found.cells), f"{frontier.shown_share(found)} %",
                         f"{found.least:+.1f}", f"{found.cpu:.0f}"])  # fmt: skip
    header = [
        "samples",
        "N",
        "way",
        "cells",
        "share of the oracle's gain",
        "least gain of a pair and task, points",
        "CPU-seconds",
    ]
    return common.table(header, rows)


def table(cells: dict[str, Any]) -> str:
    rows = []
    for key, cell in cells.items():
        task, source, target, count, seed = key.split()
        task, _, origin = task.partition("+")
        made = f" in {cell['samples cpu']:.0f} CPU-seconds" if origin else ""  # not among those of the ways
        draw = f", draw {int(seed) + 1}" if int(seed) else ""
        where = [f"{task}, {source} → {target}{draw}", ORIGINS[origin] + made, count]
        rows.append([*where, "target", f"{cell['target']:.1f}", f"{cell['target loss']:.2f}", "", ""])
        for name in WAYS:
            way = cell["ways"].get(name, {})
            if "score" in way:
                recovered = f"{share(cell, way['score']):.0f} %"
                rows.append(
                    [
                        "",
                        "",
                        "",
                        name,
                        f"{way['score']:.1f}",
                        f"{way.get('loss', 0):.2f}",
                        recovered,
                        f"{way['cpu']:.0f}",
                    ]
                )
        rows.append(["", "", "", "LoRA of all samples on the target (oracle)", f"{cell['oracle']:.1f}",
                     f"{cell['oracle loss']:.2f}", "100 %", f"{cell['oracle cpu']:.0f}"])  # fmt: skip
    every = common.table(
        ["", "samples", "N", "way", "right answers", "loss", "share of the oracle's gain", "CPU-seconds"], rows
    )
    return f"{summary(cells)}\n\n{curves(cells)}{every}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the models that come with the package, a few steps")
    parser.add_argument("--json", type=Path, help="write the results here; what it holds already is kept")
    parser.add_argument("--models", type=Path, default=HOME, help="where the folders of the models are")
    parser.add_argument("--pairs", nargs="+", type=lambda pair: tuple(pair.split(":")), default=PAIRS, metavar="A:B")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--samples", choices=("data", "ends", "teacher", "generated"), default="data", dest="origin")
    parser.add_argument("--counts", nargs="+", type=int, default=(100,))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the draws before this one")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="NAME")
    parser.add_argument("--shown", action="store_true", help="run nothing: the table of what earlier runs finished")
    options = parser.parse_args()
    started = time.time()
    torch.set_num_threads(1)
    wanted = {name: WAYS[name] for name in options.ways}
    steps, tested = PROTOCOL.steps, TEST
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
        for _ in run_cell((models[0], models[1]), folder, named, count, seed, steps, wanted, known, tested):
            common.kept(options.json, {key: known})
            last = next(reversed(known["ways"]))
            print(key, last, known["ways"][last], f"{time.time() - started:.0f} s", flush=True)
    cells = {key: cell for key, cell in cells.items() if "oracle" in cell}
    failures = [
        f"{key}: {name} is {way['score'] - cell['target']:+.1f} points"
        for key, cell in cells.items()
        for name, way in cell["ways"].items()
        if name in WAYS and WAYS[name].auto and way.get("score", 100.0) < cell["target"] + frontier.WORST
    ]
    common.finish(cells, table(cells), options.json, [] if options.quick else failures, started)


if __name__ == "__main__":
    main()
