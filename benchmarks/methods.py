"""Every method on one real pair: a TREC fine-tune of paraphrase-MiniLM-L3-v2 (3 blocks) moved to all-MiniLM-L6-v2 (6).

    python benchmarks/methods.py [--quick] [--json benchmarks/results/methods.json]

The source is tuned on the training questions with a linear head that is thrown away. Every row's head is the class
prototypes of the same 100 questions by its own features; the test questions are looked at only to score.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import common
import torch
from torch import nn

from taskferry.bench.comparing import compare
from taskferry.settings import CompareSettings

SOURCE, TARGET, TASK = "paraphrase-MiniLM-L3-v2", "all-MiniLM-L6-v2", "trec"


def tune(out: Path, steps: int) -> None:
    import transformers

    transformers.logging.disable_progress_bar()
    folder = common.SHARED / "models" / SOURCE
    torch.manual_seed(0)
    model = transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).train()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    lines = (common.SHARED / "data" / TASK / "train.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    head = nn.Linear(384, 6)
    groups = [{"params": model.parameters(), "lr": 1e-4}, {"params": head.parameters(), "lr": 1e-3}]
    optimiser = torch.optim.AdamW(groups, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        some = [rows[i] for i in torch.randint(0, len(rows), (32,)).tolist()]
        batch = tokenizer([r["text"] for r in some], padding=True, truncation=True, max_length=32, return_tensors="pt")
        weights = batch["attention_mask"][..., None]
        features = (model(**batch).last_hidden_state * weights).sum(1) / weights.sum(1)
        loss = nn.functional.cross_entropy(head(features), torch.tensor([r["label"] for r in some]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    model.eval().save_pretrained(out)


def main() -> None:
    options = common.arguments(__doc__ or "")
    shared, started = common.need_shared(), time.time()
    with tempfile.TemporaryDirectory() as folder:
        tuned = Path(folder) / "tuned"
        tune(tuned, 20 if options.quick else 300)
        settings = CompareSettings(
            source_base=str(shared / "models" / SOURCE),
            source_tuned=str(tuned),
            target_base=str(shared / "models" / TARGET),
            calibration=str(shared / "data" / TASK / "train.jsonl"),
            test=str(shared / "data" / TASK / "test.jsonl"),
            max_length=32,
            samples=30 if options.quick else 100,
            seeds=1 if options.quick else 3,
            test_samples=100 if options.quick else 500,
        )
        result = compare(settings, lambda row, score: print(f"{row}: {score:.1f}", flush=True))
    result.settings = {k: v for k, v in result.settings.items() if k in ("samples", "seed", "seeds", "test_samples")}
    failures = []
    scores = {row: sum(values) / len(values) for row, values in result.scores.items()}
    if not options.quick and scores["bico"] <= max(scores["target as it is"], scores["theseus"], scores["naive"]):
        failures.append("bico is not above the target, theseus and naive")
    common.finish(dict(vars(result)), result.markdown(), options.json, failures, started)


if __name__ == "__main__":
    main()
