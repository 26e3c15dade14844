"""Real sentence encoders: fine-tunes of all-MiniLM-L6-v2 (6 blocks) moved to gte-small (12 blocks).

    python benchmarks/sentence_encoders.py [--quick] [--json benchmarks/results/sentence_encoders.json]

The head of every row is the class prototypes of the same 100 labelled training sentences, computed with that row's own
features; nothing is chosen on test sentences, and the few-shot steps are fixed beforehand.
"""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import common
import torch
from torch import nn

from taskferry import Batch, Prototypes, TaskVector, fit, text_calibration
from taskferry.scale import scale_on_calibration

TASKS = ("sst2", "trec", "emotion", "ag_news")
LENGTH = 48


def load(name: str) -> tuple[nn.Module, Any]:
    import transformers

    transformers.logging.disable_progress_bar()
    folder = common.SHARED / "models" / name
    model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def rows_of(task: str, split: str, limit: int) -> list[dict[str, Any]]:
    with open(common.SHARED / "data" / task / f"{split}.jsonl", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return [rows[i] for i in order[:limit]]


def encode(tokenizer: Any, rows: list[dict[str, Any]]) -> Batch:
    texts = [row["text"] for row in rows]
    encoded = tokenizer(texts, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt")
    return Batch(dict(encoded), torch.tensor([row["label"] for row in rows]))


def train(model: nn.Module, tokenizer: Any, rows: list[dict[str, Any]], steps: int, lr: float, seed: int) -> nn.Module:
    """AdamW towards a linear head on the mean token; the head is thrown away."""
    from taskferry.families import family_of

    torch.manual_seed(seed)
    model = copy.deepcopy(model).train()
    classes = 1 + max(row["label"] for row in rows)
    head = nn.Linear(model.config.hidden_size, classes)
    groups = [{"params": model.parameters(), "lr": lr}, {"params": head.parameters(), "lr": 1e-3}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        batch = encode(tokenizer, [rows[i] for i in torch.randint(0, len(rows), (32,)).tolist()])
        loss = nn.functional.cross_entropy(head(family_of(model).features(model, batch)), batch.labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, shots: list[Batch], test: list[Batch]) -> float:
    logits = Prototypes().logits(model, shots)
    right = sum(int((logits(batch).argmax(1) == batch.labels).sum()) for batch in test)
    return 100 * right / sum(len(batch) for batch in test)


def main() -> None:
    options = common.arguments(__doc__ or "")
    common.need_shared()
    started = time.time()
    tasks, seeds, steps, limit = (TASKS[1:2], [0], 20, 200) if options.quick else (TASKS, [0, 1, 2], 250, 1000)
    (source, tokenizer_A), (target, tokenizer_B) = load("all-MiniLM-L6-v2"), load("gte-small")
    results: dict[str, dict[str, list[float]]] = {}
    scales: dict[str, list[float]] = {}
    for task in tasks:
        data, held_out = rows_of(task, "train", 6000), rows_of(task, "test", limit)
        test_A, test_B = (
            [encode(t, held_out[i : i + 100]) for i in range(0, len(held_out), 100)] for t in (tokenizer_A, tokenizer_B)
        )
        tuned = train(source, tokenizer_A, data, steps, 5e-5, 0)
        tau = TaskVector.between(source, tuned)
        rows = results.setdefault(task, {})
        for seed in seeds:
            chosen = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:100].tolist()
            some = [data[i] for i in chosen]
            shots = text_calibration(
                [row["text"] for row in some],
                tokenizer_A,
                tokenizer_B,
                labels=[row["label"] for row in some],
                max_length=LENGTH,
                micro_batch=25,
            )
            moved = fit(source, target, shots).apply(tau)
            loss = Prototypes().bind(target, shots.side(1))
            curve = scale_on_calibration(target, moved, loss, shots.side(1))
            scales.setdefault(task, []).append(curve.best)
            models = {
                "target as it is": target,
                "+ BiCo, scale 1 (the paper)": moved.add_to(copy.deepcopy(target)),
                "+ BiCo, scale chosen on the 100 samples": moved.add_to(copy.deepcopy(target), scale=curve.best),
                "target, few-shot tuned on the same 100": train(target, tokenizer_B, some, min(steps, 60), 5e-5, seed),
                "source as it is": source,
                "source, tuned on all samples": tuned,
            }
            for name, model in models.items():
                side = 0 if name.startswith("source") else 1
                rows.setdefault(name, []).append(accuracy(model, shots.side(side), test_A if side == 0 else test_B))
                print(f"{task} seed {seed}: {name}: {rows[name][-1]:.1f}", flush=True)
    names = list(next(iter(results.values())))
    averages = {name: sum(sum(r[name]) / len(r[name]) for r in results.values()) / len(results) for name in names}
    header = ["MiniLM-L6 → gte-small, 100 labelled sentences", *results, "average"]
    body = [[n, *(common.mean_spread(r[n]) for r in results.values()), f"{averages[n]:.1f}"] for n in names]
    failures = []
    if not options.quick and averages["+ BiCo, scale 1 (the paper)"] <= averages["target as it is"]:
        failures.append("BiCo does not gain over the target")
    record = {"results": results, "scales": scales, "seeds": seeds, "steps": steps}
    common.finish(record, common.table(header, body), options.json, failures, started)


if __name__ == "__main__":
    main()
