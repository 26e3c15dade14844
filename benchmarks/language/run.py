"""LoRAs moved between real language models: right answers, generated, against CPU-seconds.

    python benchmarks/language/run.py [--quick] [--json benchmarks/results/language.json] [--models FOLDER]
        [--pairs A:B …] [--tasks NAME …] [--samples data|teacher] [--counts N …] [--seeds N] [--first-seed N]
        [--rows ROW …] [--shown]

Each model is a folder of FOLDER or a hub name. A LoRA of rank 8 on every projection is trained by trl on all samples of
a task, so with the end of its answers: on the source, and on the target (the oracle). Calibration samples are questions
with their answers, or with those of the tuned source (teacher). LoRAs are kept in the folder of TASKFERRY_BENCH_DATA,
every row is kept when it is done, and a run goes on where an earlier one stopped. Each row runs alone, in one thread.
"""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.language.gold import GOLD, gold
from benchmarks.language.tasks import BATCH, LENGTH, TASKS
from benchmarks.shared import common, tables
from benchmarks.shared.rows import FRONTIER, ROWS, run_rows
from taskferry import TaskVector, load_model, load_tuned
from taskferry.config import CalibrationSettings
from taskferry.data.language import with_template
from taskferry.models import Loaded
from taskferry.objectives.preparation import prepare

HOME = Path(os.environ.get("TASKFERRY_REAL", Path.home() / ".cache" / "taskferry-real"))
SMOL, GEMMA = "smollm2-135m-instruct", "gemma-3-270m"
SMALL, LARGE = "qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"
SHORT = {SMOL: "SmolLM2", GEMMA: "Gemma 3", SMALL: "Qwen 0.5B", LARGE: "Qwen 1.5B"}
PAIRS = ((SMOL, GEMMA), (GEMMA, SMOL), (SMOL, SMALL), (SMALL, LARGE))
TEST, TRAINED = 400, 120  # test questions; steps of a LoRA on all samples
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
PROTOCOL: dict[str, Any] = {
    "per_device_train_batch_size": 8, "learning_rate": 1e-3, "warmup_steps": 10, "lr_scheduler_type": "cosine",
    "max_length": 2 * LENGTH, "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "seed": 0,
    "gradient_checkpointing": False, "disable_tqdm": True, "logging_steps": 20, "dataset_num_proc": None,
}  # fmt: skip
FIRST = {  # columns of README's table: the first of these rows that a cell has
    "moved by maps (BiCo)": ("BiCo, best scale", "BiCo"),
    "natural, no training": ("natural, 2 steps",),
    "**taskferry**": ("default", "distil, 40 steps"),
}
FACTS = {"score": "right", "begins": "begun right", "stopped": "stopped", "valid_json": "valid JSON"}


def tuned(loaded: Loaded, folder: Path, task: str, steps: int) -> Path:
    """Train a LoRA on all samples of a task once, by trl as it does by itself; its CPU-seconds stand beside it."""
    out = folder / f"{Path(loaded.given).name}-{task}-{steps}-sft"
    if out.exists():
        return out
    import datasets
    import peft
    import trl

    torch.manual_seed(0)
    rows = [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} if "messages" in row else row
        for row in TASKS[task].samples("train").rows
    ]
    model = peft.get_peft_model(loaded.model, peft.LoraConfig(**LORA))
    with TemporaryDirectory(dir=folder) as scratch:
        arguments = trl.SFTConfig(output_dir=f"{scratch}/trl", max_steps=steps, **PROTOCOL)
        data = datasets.Dataset.from_list(rows)
        trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=loaded.tokenizer())
        started = time.process_time()
        trainer.train()
        seconds = time.process_time() - started
        model.save_pretrained(f"{scratch}/lora")
        Path(scratch, "lora", "cost.json").write_text(json.dumps({"cpu": round(seconds, 1)}) + "\n")
        Path(scratch, "lora").rename(out)
    model.unload()
    loaded.model.eval().requires_grad_(True)
    return out


def run_cell(
    models: tuple[Loaded, Loaded], folder: Path, task: str, origin: str, count: int, seed: int, steps: int, tested: int,
    rows: list[str], known: dict[str, Any],
) -> Any:  # fmt: skip
    """Run every row that is not known yet; yields after each."""
    A, B = models
    with_template(B.tokenizer(), A.tokenizer())  # the oracle learns chats in the form that is moved
    change = load_tuned(str(tuned(A, folder, task, steps)), A)
    best = tuned(B, folder, task, steps)
    test = TASKS[task].questions(tested)
    if "oracle" not in known:
        bases = {"target": (B, TaskVector({})), "source": (A, change.tau), "oracle": (B, load_tuned(str(best), B).tau)}
        for name, (model, added) in bases.items():
            facts = TASKS[task].score(model, test, added)
            known |= {name: facts["score"], f"{name} facts": facts}
        known["oracle cpu"] = json.loads((best / "cost.json").read_text())["cpu"]
    if all(row in known.get("rows", {}) for row in rows):
        return
    settings = CalibrationSettings(
        calibration=task, samples=count, seed=seed, micro_batch=BATCH, max_length=LENGTH,
        labels="teacher" if origin == "teacher" else "auto",
    )  # fmt: skip
    started = time.process_time()
    prepared = prepare(settings, A, B, change, samples=TASKS[task].samples("train"))
    known["samples cpu"] = round(time.process_time() - started, 1)  # the tuned source writes the answers in it
    found = known.setdefault("rows", {})

    def score(added: TaskVector) -> dict[str, float]:
        return TASKS[task].score(B, test, added)

    ours = [row for row in rows if row in ROWS]
    yield from run_rows((A.model, B.model), change.tau, prepared, ours, score, found, seed)
    for row in (row for row in rows if row in GOLD and row not in found):
        started = time.process_time()
        learned = gold(A, B, change.tau, prepared, LORA, {**PROTOCOL, "max_steps": GOLD[row]})
        found[row] = {"cpu": round(time.process_time() - started, 2), **score(learned)}
        yield row


def table(cells: dict[str, Any]) -> str:
    """One line a pair, task and number of samples: mean and spread over the draws, CPU-seconds in brackets."""
    places: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for key, cell in cells.items():
        places.setdefault(tuple(key.split()[:6]), []).append(cell)
    rows = [
        row for row in (*ROWS, *GOLD) if any("score" in cell.get("rows", {}).get(row, {}) for cell in cells.values())
    ]
    lines = []
    for (_, task, source, target, origin, count), draws in places.items():
        teacher = ", the tuned source's answers" if origin == "teacher" else ""
        name = f"{TASKS[task].title}, {SHORT.get(source, source)} → {SHORT.get(target, target)}, {count}{teacher}"
        line = [name, f"{draws[0]['target']:.1f}"]
        for row in rows:
            run = [cell["rows"][row] for cell in draws if "score" in cell.get("rows", {}).get(row, {})]
            cost = f" ({sum(each['cpu'] for each in run) / len(run):.0f})" if run else ""
            line.append(f"{common.mean_spread([each['score'] for each in run])}{cost}" if run else "")
        lines.append([*line, f"{draws[0]['oracle']:.1f} ({draws[0]['oracle cpu']:.0f})"])
    header = ["right answers in % (CPU-seconds)", "unchanged target", *rows, "new LoRA, all samples"]
    return common.table(header, lines)


def first_table(cells: dict[str, Any]) -> str:
    """The table of README: a few columns, means over the draws of a hundred samples."""
    places: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for key, cell in cells.items():
        _, task, source, target, _, count, _ = key.split()
        if count == "100":
            places.setdefault((task, source, target), []).append(cell)
    lines = []
    for (task, source, target), draws in places.items():
        line = [f"{TASKS[task].title}, {SHORT.get(source, source)} → {SHORT.get(target, target)}"]
        line.append(f"{draws[0]['target']:.0f}")
        for rows in FIRST.values():
            each = [cell["rows"] for cell in draws]
            row = next((row for row in rows if any("score" in found.get(row, {}) for found in each)), None)
            run = [found[row] for found in each if row is not None and "score" in found.get(row, {})]
            score, cost = (sum(part[f] for part in run) / max(1, len(run)) for f in ("score", "cpu"))
            line.append(f"{score:.0f} ({cost:.0f})" if run else "")
        line[-1] = f"**{line[-1]}**" if line[-1] else ""
        lines.append([*line, f"{draws[0]['oracle']:.0f} ({draws[0]['oracle cpu']:.0f})"])
    return common.table(["right answers in % (CPU-seconds)", "untouched", *FIRST, "LoRA on all data"], lines)


def facts_table(cells: dict[str, Any]) -> str:
    """How the answers of the first draws are, and whether they end."""
    lines = []
    for key, cell in cells.items():
        _, task, source, target, _, count, seed = key.split()
        if seed != "0":
            continue
        who = {"tuned source": cell["source facts"], "target": cell["target facts"], **cell.get("rows", {}),
               "new LoRA, all samples": cell["oracle facts"]}  # fmt: skip
        where = f"{TASKS[task].title}, {SHORT.get(source, source)} → {SHORT.get(target, target)}, {count}"
        for name, facts in who.items():
            if "score" in facts:
                lines.append([where, name, *(f"{facts[f]:.1f}" if f in facts else "" for f in FACTS)])
    return common.table(["", "% of the answers", *FACTS.values()], lines)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", type=Path, default=HOME, help="where the folders of the models are")
    parser.add_argument("--pairs", nargs="+", type=lambda pair: tuple(pair.split(":")), default=PAIRS, metavar="A:B")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--samples", choices=("data", "teacher"), default="data", dest="origin")
    parser.add_argument("--counts", nargs="+", type=int, default=(100,))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="leave out the draws before this one")
    parser.add_argument("--rows", nargs="+", choices=(*ROWS, *GOLD), default=[*FRONTIER, *GOLD], metavar="ROW")
    parser.add_argument("--shown", action="store_true", help="run nothing: the tables of what earlier runs finished")
    options = parser.parse_args()
    torch.set_num_threads(1)
    steps, tested = TRAINED, TEST
    if options.quick:
        from taskferry.example import FILES

        options.models, options.pairs, options.tasks, options.counts = FILES, [("base-a", "base-b")], ["trec"], [24]
        options.seeds, steps, tested = 1, 4, 30
        options.rows = ["BiCo", "natural, 1 step", "distil, 10 steps", "GOLD, 10 steps"]
    folder = common.DATA / ("language-quick" if options.quick else "language")
    folder.mkdir(parents=True, exist_ok=True)
    cells = common.keep(options.json, {})
    seeds = range(options.first_seed, options.seeds)
    for task, seed, pair, count in product(options.tasks, seeds, options.pairs, options.counts):
        if options.shown:
            break
        key = f"language {task} {pair[0]} {pair[1]} {options.origin} {count} {seed}"
        at = [options.models / name for name in pair]
        A, B = (load_model(str(path) if path.exists() else name) for path, name in zip(at, pair, strict=True))
        known = cells.setdefault(key, {})
        for row in run_cell((A, B), folder, task, options.origin, count, seed, steps, tested, options.rows, known):
            common.keep(options.json, {key: known})
            print(key, row, known["rows"][row], flush=True)
    cells = {key: cell for key, cell in (common.keep(options.json, {}) or cells).items() if "oracle" in cell}
    short = table(cells)
    print(f"{short}\n\n{facts_table(cells)}\n\n{tables.summary(cells)}")
    if options.json is not None:
        options.json.with_suffix(".md").write_text(f"{short}\n")
        options.json.with_name(f"{options.json.stem}_first.md").write_text(f"{first_table(cells)}\n")
        options.json.with_name(f"{options.json.stem}_answers.md").write_text(f"{facts_table(cells)}\n")


if __name__ == "__main__":
    main()
