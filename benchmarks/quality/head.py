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
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared import common
from taskferry import FineTuning, NewHead, Pool, TaskVector, finetune, load_model, load_samples
from taskferry.collect.scale import moved_by
from taskferry.data.batch import Batch, Calibration
from taskferry.data.data import Samples
from taskferry.data.samplers import choose
from taskferry.methods import Job, run
from taskferry.models import Loaded
from taskferry.objectives.objectives import Prototypes, calibration_features, fit_probe
from taskferry.objectives.preparation import encoder_calibration
from taskferry.objectives.task_head import carried

SOURCE, TARGET = "all-MiniLM-L6-v2", "gte-small"
TASKS = ("trec", "ag_news")
LENGTH = 48
SEEDS = 2
Head = tuple[Tensor, Tensor]  # weight and bias


@dataclass(frozen=True)
class Texts:
    """Texts with labels, for encoders."""

    train: Samples
    test: Samples

    @classmethod
    def load(cls, name: str) -> Texts:
        folder = str(common.need_shared() / "data" / name)
        return cls(load_samples(folder, split="train"), load_samples(folder, split="test"))

    @property
    def labels(self) -> Sequence[int]:
        return self.train.labels or ()

    @property
    def classes(self) -> int:
        return max(self.labels) + 1

    def pool(self, model: Loaded) -> Pool:
        """What a model is trained on."""
        return Pool(self.train, model, max_length=LENGTH)

    def calibration(self, models: tuple[Loaded, Loaded], count: int, seed: int) -> Calibration:
        """So many of its samples, of all classes."""
        chosen = self.train.take(choose(len(self.train), count, labels=self.labels, seed=seed))
        return encoder_calibration(chosen, *models, max_length=LENGTH, micro_batch=25)

    def tests(self, model: Loaded, count: int = 500) -> Sequence[Batch]:
        """What a model is scored on, always the same."""
        return Pool(self.test, model, max_length=LENGTH).batches(choose(len(self.test), count, seed=0), 50)


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
    wanted = F.one_hot(labels, len(weight)).double()
    X = (X_B - mean_B).double()
    shape = X.T @ X + 0.01 * X.square().sum() / len(X.T) * torch.eye(X.shape[1], dtype=X.dtype)
    ridge = torch.linalg.solve(shape, X.T @ (wanted - wanted.mean(0))).T.float()
    return {
        "moved": (carried(weight, X_A, X_B)[0], bias),
        "moved, means taken off": (centred, bias + weight @ mean_A - centred @ mean_B),
        "ridge regression on the labels": (ridge, wanted.mean(0).float() - ridge @ mean_B),
        "logistic regression on the labels": probe(X_B, labels, len(weight)),
    }


def probe(X: Tensor, labels: Tensor, classes: int) -> Head:
    """A logistic regression on what a model shows."""
    mean, spread = X.mean(0), X.std(0, unbiased=False).clamp_min(1e-6)
    weight, bias = fit_probe((X - mean) / spread, labels, classes=classes)
    weight = weight / spread
    return weight, bias - weight @ mean


def probed(model: nn.Module, change: TaskVector, own: Sequence[Batch], test: Sequence[Batch], classes: int) -> float:
    """The accuracy of a model with a change, by a head that is fitted on its own samples."""
    with moved_by(model, change) as at:
        at(1.0)
        X, labels = calibration_features(model, own)
        shown, right = calibration_features(model, test)
    return accuracy(probe(X, labels, classes), shown, right)


def accuracy(head: Head, X: Tensor, labels: Tensor) -> float:
    return 100 * float(((X @ head[0].T + head[1]).argmax(1) == labels).double().mean())


def pair() -> tuple[Loaded, Loaded]:
    """The source and the target."""
    models = common.need_shared() / "models"
    return load_model(str(models / SOURCE)), load_model(str(models / TARGET))


def study(name: str, seed: int, quick: bool) -> dict[str, float]:
    source, target = pair()
    task, (steps, held) = Texts.load(name), (5, 40) if quick else (150, 500)
    tau, own, teacher = tuned(source, task.pool(source), task.classes, steps, seed)
    calibration = task.calibration((source, target), 100, seed)
    moved = run("bico", Job.of(source.model, target.model, tau, calibration, Prototypes())).tau
    tests = [task.tests(each, held) for each in (source, target)]
    X_A, known = calibration_features(teacher.model, calibration.side(0))
    found = {"tuned source, its own head": round(accuracy(own, *calibration_features(teacher.model, tests[0])), 2)}
    for way, change in (("moved change", moved), ("unchanged target", TaskVector({}))):
        with moved_by(target.model, change) as set_scale:
            set_scale(1.0)
            X_B, _ = calibration_features(target.model, calibration.side(1))
            shown, right = calibration_features(target.model, tests[1])
        for kind, head in heads(own, X_A, X_B, known).items():
            found[f"{way}, head {kind}"] = round(accuracy(head, shown, right), 2)
    print(name, seed, found, flush=True)
    return found


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    tasks, seeds = (TASKS[:1], range(1)) if options.quick else (TASKS, range(SEEDS))
    known = {} if options.json is None else common.keep(options.json, {})
    for task, seed in product(tasks, seeds):
        if (key := f"{task} {seed}") not in known:
            known[key] = study(task, seed, options.quick)
            if options.json is not None:  # minutes each: a run goes on where an earlier one stopped
                common.keep(options.json, {key: known[key]})
    rows = []
    for way in known[f"{tasks[0]} 0"]:
        values = [[known[f"{task} {seed}"][way] for seed in seeds] for task in tasks]
        mean = f"{statistics.mean(map(statistics.mean, values)):.1f}"
        rows.append([way, *map(common.mean_spread, values), mean])
    table = common.table(["on the target", *tasks, "mean"], rows)
    common.finish(known, table, options.json, [], started)


if __name__ == "__main__":
    main()
