"""Which loss gives an encoder's gradients the best signal: prototypes, a probe, a regularised or a cross-fitted probe?

    python benchmarks/quality/heads.py [--quick] [--json benchmarks/results/heads.json]

BiCo at scale 1 with each objective, on real pairs, 100 samples, scored by a probe and by prototypes on the same ones.
The fine-tunes are those of real_pairs.py. The validation part of each training set scores, so that the
choice is not made on test data.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.shared import common
from benchmarks.zoo import zoo_data
from taskferry import TaskVector
from taskferry.bench.recipe import load_recipe
from taskferry.bench.running import Bench, Places, Reporter
from taskferry.collect.scale import moved_by
from taskferry.data.samplers import choose
from taskferry.evaluation import Pool, evaluate
from taskferry.methods import Job, run
from taskferry.objectives.objectives import Classifier, CrossProbe, LinearProbe, Prototypes
from taskferry.objectives.preparation import encoder_calibration
from taskferry.training.finetuning import split

OBJECTIVES: dict[str, Classifier] = {
    "prototypes, temperature 5": Prototypes(5.0),
    "prototypes, temperature 20": Prototypes(20.0),
    "probe": LinearProbe(),
    "probe, ridge 100": LinearProbe(100.0),
    "cross-fitted probe": CrossProbe(),
}
CELLS = (
    ("real/vision", "deit-tiny", "vit-tiny", "cifar10"),
    ("real/vision", "deit-tiny", "vit-tiny", "emnist_letters"),
)


def main() -> None:
    options = common.arguments(__doc__ or "")
    shared, started = common.need_shared(), time.time()
    cells, seeds, held = (CELLS[:1], [0], 60) if options.quick else (CELLS, [0, 1], 300)
    work = zoo_data.DATA / ("work-quick" if options.quick else "work")
    results: dict[str, dict[str, dict[str, list[float]]]] = {}
    for recipe_name, a, b, task in cells:
        recipe = load_recipe(recipe_name)
        if options.quick:
            short = recipe.finetune.model_copy(update={"steps": 5, "every": 5, "warmup": 1})
            recipe = recipe.model_copy(update={"finetune": short})
        bench = Bench(recipe, Places(shared / "models", shared / "data", work), Reporter())
        source, target, data = bench.model(a), bench.model(b), bench.task(task)
        tau = bench.tuned(a, task)
        kept, held_out = split(len(data.train), recipe.finetune)  # held_out was never trained on
        spec = recipe.tasks[task]
        test = Pool(data.train, target, max_length=spec.max_length).batches(held_out[:held], 50)
        found = results.setdefault(f"{a} → {b}, {task}", {})
        for seed in seeds:
            labels = [data.train.labels[i] for i in kept] if data.train.labels else None
            chosen = [kept[i] for i in choose(len(kept), 100, labels=labels, seed=seed)]
            lengths: dict[str, Any] = {"max_length": spec.max_length, "micro_batch": 20}
            calibration = encoder_calibration(data.train.take(chosen), source, target, **lengths)
            shots = calibration.side(1)
            for name, objective in {"target": None, **OBJECTIVES}.items():
                scores = found.setdefault(name, {"probe": [], "prototypes": []})
                moved = TaskVector({})
                if objective is not None:
                    moved = run("bico", Job.of(source.model, target.model, tau, calibration, objective)).tau
                with moved_by(target.model, moved) as set_scale:
                    set_scale(1.0)
                    for kind, head in (("probe", LinearProbe()), ("prototypes", Prototypes())):
                        scores[kind].append(round(evaluate(target.model, test, head, shots).value, 2))
                print(a, b, task, seed, name, {k: v[-1] for k, v in scores.items()}, flush=True)
    rows = []
    for name in ["target", *OBJECTIVES]:
        line = [name]
        for kind in ("probe", "prototypes"):
            gains = [
                statistics.mean(v - t for v, t in zip(found[name][kind], found["target"][kind], strict=True))
                for found in results.values()
            ]
            line += [f"{g:+.1f}" for g in gains] + [f"{statistics.mean(gains):+.1f}"]
        rows.append(line)
    heads = [f"{cell}, by {kind}" for kind in ("probe", "prototypes") for cell in [*results, "mean"]]
    common.finish({"scores": results}, common.table(["objective", *heads], rows), options.json, [], started)


if __name__ == "__main__":
    main()
