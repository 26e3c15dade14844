"""Samples for the maps of a whole fleet: texts that its adapters write, against general text and each task's own.

    python benchmarks/quality/fleet_samples.py [--quick] [--json benchmarks/results/fleet_samples.json]

Six LoRAs of the example's base-a, one for each domain of text, move to base-b by BiCo at scale 1. What differs is the
samples that the maps are fitted on: the domain's own passages, general text (what the bases were trained on), passages
of the five other domains, texts that the adapter itself writes, and texts of all six adapters in one capture. A
captured sum belongs to its samples, so the passes of an adapter's own texts are those of the pool. The loss per token
is that of held-out text; shares are of what a LoRA trained on base-b gains, summed over the domains.

Bound: the pool recovers at least five points more than general text.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.quality.causal import write_lines
from benchmarks.quality.general import align, captured, total
from benchmarks.shared import common
from benchmarks.zoo import example_models, zoo_data
from taskferry import TaskVector, load_model, load_samples, load_tuned
from taskferry.collect.statistics import Statistics
from taskferry.data.data import Samples
from taskferry.data.samplers import choose
from taskferry.evaluation import Pool
from taskferry.example import FILES
from taskferry.jobs.settings import PlanSettings
from taskferry.models import Loaded, Tuned
from taskferry.objectives.generation import draw
from taskferry.objectives.preparation import prepare

DOMAINS = ("scripture", "ag_news", "banking77", "emotion", "snli", "trec")
FEW, MANY = 24, 100
GENERAL, POOL = f"general text, {MANY}", f"written by all six, {FEW} each"
POINTS = 0.05  # of the oracle's gain
Score = Callable[[TaskVector], float]


def make_data(root: Path) -> None:
    """Scripture as the example has it, and the texts of five data sets."""
    example_models.make_data(root)
    for domain in DOMAINS[1:]:
        for split in ("train", "test"):
            if not (root / domain / f"{split}.jsonl").exists():
                found = load_samples(str(common.need_shared() / "data" / domain / f"{split}.jsonl")).rows
                texts = [{"text": row["text"]} for row in found]
                write_lines(
                    root / domain / f"{split}.jsonl", texts[: example_models.TEST] if split == "test" else texts
                )


def tuned_losses(root: Path, domain: str, steps: int, known: dict[str, Any]) -> None:
    """The adapter of base-a, kept on disk, and what one of base-b reaches."""
    if not (folder := root / "adapters" / f"{domain}-{steps}").exists():
        example_models.adapter(FILES / "base-a", root, steps, folder, domain)
    if "oracle" not in known:
        known["oracle"] = round(example_models.adapter(FILES / "base-b", root, steps, domain=domain), 4)


def sums(models: tuple[Loaded, Loaded], samples: Samples, count: int, seed: int) -> Statistics:
    """One capture of so many of the samples."""
    settings = PlanSettings(calibration="given", source_base="", target_base="", samples=count, seed=seed)
    some = samples.take(choose(len(samples), count, seed=seed))
    prepared = prepare(settings, *models, None, samples=some)
    return captured((models[0].model, models[1].model), prepared.calibration, prepared.objectives)


def study(
    models: tuple[Loaded, Loaded], tuned: Mapping[str, Tuned], score: Mapping[str, Score], root: Path, seed: int
) -> dict[str, dict[str, float]]:
    """One draw: of every domain the loss with each kind of samples."""
    read = Samples("text", [r for h in (0, 1) for r in load_samples(str(root / f"half{h}")).rows], None, (), "")
    general = sums(models, read, MANY, seed)
    own, few, written = {}, {}, {}
    for domain, adapter in tuned.items():
        real = load_samples(str(root / domain))
        own[domain] = sums(models, real, MANY, seed)
        few[domain] = sums(models, real, MANY // (len(DOMAINS) - 1), seed)
        given = {
            "source_base": "a",
            "target_base": "b",
            "source_tuned": "",
            "samples": FEW,
            "seed": seed,
            "max_length": 64,
        }
        drawn = draw(PlanSettings(calibration="generate", **given), *models, adapter).samples
        written[domain] = sums(models, drawn, FEW, seed)
    found: dict[str, dict[str, float]] = {}
    for domain, adapter in tuned.items():
        others = [other for other in tuned if other != domain]
        kinds: dict[str, Sequence[Statistics]] = {
            f"its own passages, {MANY}": [own[domain]],
            GENERAL: [general],
            f"passages of the others, {MANY} in all": [few[other] for other in others],
            f"written by it, {FEW}": [written[domain]],
            f"written by the others, {FEW} each": [written[other] for other in others],
            POOL: list(written.values()),
        }
        for kind, parts in kinds.items():
            moved = align(models[0].model, models[1].model, total(parts)).apply(adapter.tau)
            found.setdefault(domain, {})[kind] = round(score[domain](moved), 4)
        print(domain, seed, found[domain], flush=True)
    return found


def shares(known: Mapping[str, Any], draws: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of every kind of samples, in each draw: what is gained in all domains, of what tuning the target gains."""
    possible = sum(each["target"] - each["oracle"] for each in known.values())
    kinds = list(next(iter(draws[0].values())))
    return {
        kind: [sum(known[d]["target"] - found[kind] for d, found in draw.items()) / possible for draw in draws]
        for kind in kinds
    }


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    root = zoo_data.DATA / "example"
    make_data(root)
    steps, domains, seeds = (10, DOMAINS[-2:], 1) if options.quick else (example_models.LORA_STEPS, DOMAINS, 3)
    cells = common.kept(options.json, {})
    known: dict[str, Any] = cells.get("losses", {})
    A, B = (load_model(str(FILES / name)) for name in ("base-a", "base-b"))
    tuned, score = {}, {}
    for domain in domains:
        tuned_losses(root, domain, steps, known.setdefault(domain, {}))
        tuned[domain] = load_tuned(str(root / "adapters" / f"{domain}-{steps}"), A)
        test = Pool(load_samples(str(root / domain), split="test"), B, max_length=example_models.LENGTH)
        batches = test.batches(range(len(test)), 50)

        def loss(added: TaskVector, batches: Any = batches) -> float:
            return example_models.moved_loss(B, batches, added)

        score[domain] = loss
        known[domain]["target"] = round(loss(TaskVector({})), 4)
        common.kept(options.json, {"losses": known})
    for seed in range(seeds):
        if (key := f"seed {seed}") not in cells:
            cells[key] = study((A, B), tuned, score, root, seed)
            common.kept(options.json, {key: cells[key]})
    draws = [cells[f"seed {seed}"] for seed in range(seeds)]
    found = shares(known, draws)
    rows = [[kind, f"{common.mean_spread([100 * s for s in each], 1)} %",
             *(common.mean_spread([d[domain][kind] for d in draws], 3) for domain in domains)]
            for kind, each in found.items()]  # fmt: skip
    ends = [
        [name, share, *(f"{known[domain][key]:.3f}" for domain in domains)]
        for name, share, key in (("the target as it is", "0 %", "target"), ("tuned on base-b", "100 %", "oracle"))
    ]
    shown = common.table(["samples of the maps", "share of the oracle's gain", *domains], [ends[0], *rows, ends[1]])
    missed = []
    if not options.quick and statistics.mean(found[POOL]) < statistics.mean(found[GENERAL]) + POINTS:
        missed.append("texts of the adapters recover less than five points more than general text")
    common.finish({**cells, "losses": known}, shown, options.json, missed, started)


if __name__ == "__main__":
    main()
