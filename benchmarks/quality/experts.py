"""A LoRA of experts moved between two small mixtures: does the loss of its domain fall on the target?

    python benchmarks/quality/experts.py [--quick] [--json benchmarks/results/experts.json]

A Mixtral and a wider Qwen 3 MoE are trained a little, each on its own half of the passages that `taskferry example`
writes; a PEFT LoRA of the first one's experts (`target_parameters`) learns the same text in capital letters. Measured
by the loss per token on capitals that nothing was trained on: the target, moved, and a LoRA trained on the target.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared import common
from taskferry.data.data import load_samples
from taskferry.evaluation import Pool, evaluate
from taskferry.example import FILES
from taskferry.models import load_model
from taskferry.objectives.objectives import LanguageModel
from taskferry.training import FineTuning, finetune

LENGTH = 48
MODELS = {"a": ("Mixtral", 48, 0), "b": ("Qwen3Moe", 64, 1)}  # class, width, which half of the passages
LORA = {"r": 4, "lora_alpha": 8, "target_modules": [],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}  # fmt: skip


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def base(name: str, root: Path, steps: int) -> Path:
    """A mixture trained on its half, as a folder with the example's tokenizer."""
    import transformers

    kind, width, half = MODELS[name]
    words = transformers.AutoTokenizer.from_pretrained(FILES / "base-a")
    torch.manual_seed(half)
    size = {
        "vocab_size": len(words), "hidden_size": width, "intermediate_size": width, "moe_intermediate_size": width,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "max_position_embeddings": 128,
        "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**size))
    folder = root / name
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    loaded = load_model(folder)
    learn(loaded.model, Pool(load_samples(str(root / f"half{half}.jsonl")), loaded, max_length=LENGTH), steps, 3e-3)
    loaded.model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def learn(model: Any, data: Pool, steps: int, rate: float) -> None:
    protocol = FineTuning(steps=steps, batch=16, learning_rate=rate, weight_decay=0.0, warmup=20, validation=0.0,
                          every=steps)  # fmt: skip
    finetune(model, data, LanguageModel(), protocol)


def adapter(folder: Path, root: Path, steps: int) -> tuple[Path, float]:
    """A LoRA of the experts on capitals, and its loss on those that nothing was trained on."""
    import peft

    loaded = load_model(folder)
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded.model, peft.LoraConfig(**LORA))
    learn(model, Pool(load_samples(str(root / "capitals.jsonl")), loaded, max_length=LENGTH), steps, 5e-3)
    out = root / f"lora-{folder.name}"
    model.save_pretrained(out)
    return out, loss(model, loaded, root)


def loss(model: Any, loaded: Any, root: Path) -> float:
    test = Pool(load_samples(str(root / "test.jsonl")), loaded, max_length=LENGTH)
    return evaluate(model, test.batches(range(len(test)), 20), LanguageModel()).loss


def main() -> None:
    args, started = common.arguments(__doc__.splitlines()[0]), time.time()
    steps = 60 if args.quick else 300
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        data, test = ([json.loads(line)["text"] for line in (FILES / name).read_text().splitlines()]
                      for name in ("data.jsonl", "test.jsonl"))  # fmt: skip
        write(root / "half0.jsonl", test[:100])
        write(root / "half1.jsonl", test[100:])
        write(root / "capitals.jsonl", [text.upper() for text in data[:88]])
        write(root / "test.jsonl", [text.upper() for text in data[88:]])
        A, B = (base(name, root, steps) for name in MODELS)
        (lora, source), (_, oracle) = (adapter(folder, root, steps // 2) for folder in (A, B))
        command = [sys.executable, "-m", "taskferry", "transfer", "--source-base", A, "--source-tuned", lora,
                   "--target-base", B, "--calibration", root / "capitals.jsonl", "--samples", 64,
                   "--max-length", LENGTH, "--out", root / "moved"]  # fmt: skip
        subprocess.run(list(map(str, command)), check=True)
        target = load_model(B)
        before = loss(target.model, target, root)
        record = json.loads((root / "moved" / "taskferry.json").read_text())
        import peft

        after = loss(peft.PeftModel.from_pretrained(target.model, str(root / "moved")), target, root)
    results = {
        "target": before, "moved": after, "oracle": oracle, "tuned source": source,
        "share of the gain": (before - after) / (before - oracle), "verdict": record["verdict"]["sentence"],
        "experts": record["provenance"]["experts"], "quick": args.quick,
    }  # fmt: skip
    rows = [(name, f"{results[name]:.3f}") for name in ("target", "moved", "oracle", "tuned source")]
    rows.append(("share of the gain", f"{results['share of the gain']:.0%}"))
    markdown = common.table(("experts, loss per token on held-out capitals", ""), rows)
    common.finish(results, markdown, args.json, [] if after < before else ["moved is not below the target"], started)


if __name__ == "__main__":
    main()
