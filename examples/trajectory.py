"""Fine-tune with transformers' Trainer and record the trajectory: size, direction, and what happens to layer inputs.

    python examples/trajectory.py base-a data.jsonl --steps 60 --out run

Writes the LoRA to `run` and `run/trajectory.json`. Needs `taskferry[hf,data,peft,large]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import peft
import torch
import transformers

from taskferry.integrations.trainer import TrajectoryCallback


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("data", type=Path, help="JSONL with a text a line")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    words = transformers.AutoTokenizer.from_pretrained(options.base)
    texts = [json.loads(line)["text"] for line in options.data.read_text(encoding="utf-8").splitlines()]
    words.pad_token = words.pad_token or words.eos_token
    samples = [dict(words(text, truncation=True, max_length=96)) for text in texts]
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(options.base, dtype=torch.float32)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, lora)
    probe = {name: value for name, value in collate(samples[:16]).items() if name != "labels"}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(
            str(options.out / "checkpoints"),
            max_steps=options.steps,
            per_device_train_batch_size=16,
            learning_rate=1e-3,
            save_strategy="no",
            report_to=[],
            logging_steps=20,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=samples,
        data_collator=collate,
        callbacks=[TrajectoryCallback(options.out / "trajectory.json", every=10, probe=probe)],
    )
    trainer.train()
    model.save_pretrained(options.out)
    for measurement in json.loads((options.out / "trajectory.json").read_text())["measurements"]:
        shift = max(site["direction"] for site in measurement["inputs"].values())
        print(f"step {measurement['step']}: norm {measurement['norm']:.3f}, cosine with the end "
              f"{measurement['cosine']:.3f}, largest shift of a layer's input {shift:.3f}")  # fmt: skip


if __name__ == "__main__":
    main()
