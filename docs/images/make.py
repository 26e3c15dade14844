"""Make docs/images/transfer.svg: a real transfer of a real LoRA, as the terminal shows it.

TASKFERRY_SHARED=… python docs/images/make.py
"""

from __future__ import annotations

import io
import json
import os
import tempfile
from pathlib import Path

import peft
import torch
import transformers
from rich.console import Console

from taskferry.cli.screen import Screen
from taskferry.jobs.settings import TransferSettings
from taskferry.jobs.transfer import transfer

HERE = Path(__file__).parent
SHARED = Path(os.environ.get("TASKFERRY_SHARED", HERE.parents[1].parent / "shared"))


def train_lora(base: Path, data: Path, out: Path, steps: int = 60) -> None:
    """A sentiment LoRA of a sentence encoder on real sentences."""
    torch.manual_seed(0)
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()[: 24 * steps]]
    model = transformers.AutoModel.from_pretrained(base, add_pooling_layer=False, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value", "dense"])
    model, head = peft.get_peft_model(model, config), torch.nn.Linear(384, 2)
    optimiser = torch.optim.AdamW([p for p in [*model.parameters(), *head.parameters()] if p.requires_grad], lr=1e-3)
    for step in range(steps):
        some = rows[24 * step : 24 * step + 24]
        batch = tokenizer([r["text"] for r in some], padding=True, truncation=True, max_length=48, return_tensors="pt")
        logits = head(model(**batch).last_hidden_state.mean(1))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([r["label"] for r in some]))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    model.save_pretrained(out)


def main() -> None:
    os.chdir(tempfile.mkdtemp())
    for name in ("all-MiniLM-L6-v2", "gte-small"):
        Path(name).symlink_to(SHARED / "models" / name)
    Path("reviews.jsonl").symlink_to(SHARED / "data" / "sst2" / "train.jsonl")
    train_lora(Path("all-MiniLM-L6-v2"), Path("reviews.jsonl"), Path("sentiment-lora"))
    given = {
        "source_base": "all-MiniLM-L6-v2",
        "source_tuned": "sentiment-lora",
        "target_base": "gte-small",
        "calibration": "reviews.jsonl",
        "out": "sentiment-lora-on-gte",
    }
    command = "taskferry transfer " + " ".join(f"--{k.replace('_', '-')} {v}" for k, v in given.items())
    # Not a terminal: bars are drawn once, at their end, and the picture stays small.
    settings = {"force_terminal": False, "color_system": "truecolor", "file": io.StringIO()}
    console = Console(record=True, width=112, highlight=False, **settings)
    console.print(f"[bold green]$[/] {command}\n")
    screen = Screen(console=console)
    with screen.bars():
        outcome = transfer(TransferSettings(**given), command=command, reporter=screen)
    if outcome is None:
        raise SystemExit("a dry run draws nothing")
    screen.verdict(outcome, f"evaluate {given['out']} on your own data before you use it")
    console.save_svg(str(HERE / "transfer.svg"), title="taskferry")


if __name__ == "__main__":
    main()
