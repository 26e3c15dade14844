"""Does the task head of a classifier move? Its accuracy beside heads that are fitted on the same samples.

    python benchmarks/quality/head.py [--quick] [--json benchmarks/results/head.json]

all-MiniLM-L6-v2 is fine-tuned with a linear head on the mean token; the change is moved to gte-small on 100 samples,
and so is the head: W_A R, R the map between what the two heads read of these samples. Beside it: the same with the mean
of both sides taken off before the map (its bias then makes up for it), a ridge and a logistic regression that
are fitted to the labels of the same samples, with and without the moved change. Test data scores alone.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shared import common
from taskferry import FineTuning, NewHead, Pool, TaskVector, finetune, load_model, load_samples
from taskferry.calibration.samplers import choose
from taskferry.checkpoints import Loaded
from taskferry.fitting.objectives import Prototypes, calibration_features, fit_probe
from taskferry.fitting.preparation import encoder_calibration
from taskferry.fitting.scale import moved_by
from taskferry.fitting.task_head import carried
from taskferry.methods import Job, run

SOURCE, TARGET = "all-MiniLM-L6-v2", "gte-small"
TASKS = ("trec", "ag_news")
LENGTH = 48
Head = tuple[Tensor, Tensor]  # weight and bias


def tuned(source: Loaded, data: Pool, classes: int, steps: int, seed: int) -> tuple[TaskVector, Head, Loaded]:
    """A fine-tune of the source with a head of its own."""
    model = load_model(source.given)
    head = NewHead(classes)
    settings = FineTuning(steps=steps, batch=32, learning_rate=5e-5, warmup=steps // 10, every=steps, validation=0.02,
                          seed=seed)  # fmt: skip
    finetune(model.model, data, head, settings)
    layer = head.module
    if layer is None:
        raise RuntimeError("the head was not made")
    return TaskVector.between(source.model, model.model), (layer.weight.detach(), layer.bias.detach()), model


def heads(own: Head, X_A: Tensor, X_B: Tensor, labels: Tensor) -> dict[str, Head]:
    """Every head for the target, from what the two models show of the samples."""
    weight, bias = own
    mean_A, mean_B = X_A.mean(0), X_B.mean(0)
    centred, _ = carried(weight, X_A - mean_A, X_B - mean_B)
    spread = X_B.std(0, unbiased=False).clamp_min(1e-6)
    logistic, start = fit_probe((X_B - mean_B) / spread, labels, classes=len(weight))
    logistic = logistic / spread
    wanted = F.one_hot(labels, len(weight)).double()
    X = (X_B - mean_B).double()
    shape = X.T @ X + 0.01 * X.square().sum() / len(X.T) * torch.eye(X.shape[1], dtype=X.dtype)
    ridge = torch.linalg.solve(shape, X.T @ (wanted - wanted.mean(0))).T.float()
    return {
        "moved": (carried(weight, X_A, X_B)[0], bias),
        "moved, means taken off": (centred, bias + weight @ mean_A - centred @ mean_B),
        "ridge regression on the labels": (ridge, wanted.mean(0).float() - ridge @ mean_B),
        "logistic regression on the labels": (logistic, start - logistic @ mean_B),
    }


def accuracy(head: Head, X: Tensor, labels: Tensor) -> float:
    return 100 * float(((X @ head[0].T + head[1]).argmax(1) == labels).double().mean())


def study(shared: Path, task: str, seed: int, quick: bool) -> dict[str, float]:
    source, target = (load_model(str(shared / "models" / name)) for name in (SOURCE, TARGET))
    train, test = (load_samples(str(shared / "data" / task), split=split) for split in ("train", "test"))
    labels = train.labels or ()
    classes, steps, held = max(labels) + 1, 5 if quick else 150, 40 if quick else 500
    tau, own, teacher = tuned(source, Pool(train, source, max_length=LENGTH), classes, steps, seed)
    chosen = train.take(choose(len(train), 100, labels=labels, seed=seed))
    lengths: dict[str, Any] = {"max_length": LENGTH, "micro_batch": 25}
    calibration = encoder_calibration(chosen, source, target, **lengths)
    moved = run("bico", Job.of(source.model, target.model, tau, calibration, Prototypes())).tau
    some = choose(len(test), held, seed=0)
    tests = [Pool(test, each, max_length=LENGTH).batches(some, 50) for each in (source, target)]
    X_A, known = calibration_features(teacher.model, calibration.side(0))
    found = {"tuned source, its own head": accuracy(own, *calibration_features(teacher.model, tests[0]))}
    for name, change in (("moved change", moved), ("unchanged target", TaskVector({}))):
        with moved_by(target.model, change) as set_scale:
            set_scale(1.0)
            X_B, _ = calibration_features(target.model, calibration.side(1))
            shown, right = calibration_features(target.model, tests[1])
        for kind, head in heads(own, X_A, X_B, known).items():
            found[f"{name}, head {kind}"] = round(accuracy(head, shown, right), 2)
    print(task, seed, found, flush=True)
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    shared, started = common.need_shared(), time.time()
    tasks, seeds = (TASKS[:1], [0]) if options.quick else (TASKS, [0, 1, 2])
    results = {task: [study(shared, task, seed, options.quick) for seed in seeds] for task in tasks}
    ways = list(results[tasks[0]][0])
    rows = []
    for way in ways:
        values = [[one[way] for one in results[task]] for task in tasks]
        mean = f"{statistics.mean(map(statistics.mean, values)):.1f}"
        rows.append([way, *map(common.mean_spread, values), mean])
    table = common.table(["on the target", *tasks, "mean"], rows)
    common.finish({"accuracy": results}, table, options.json, [], started)


if __name__ == "__main__":
    main()
