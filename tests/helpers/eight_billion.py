"""Llama-3.1-8B and Qwen3-8B by their configurations alone, with a LoRA of the first: plans need no more of them.

python -m tests.helpers.eight_billion          # the table of docs/gpu.md, written there
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from taskferry.jobs.cost import Plan
from taskferry.jobs.fit import plan_transfer
from taskferry.jobs.record import Reporter
from taskferry.jobs.settings import PlanSettings
from tests.helpers.texts import train

PAGE = Path(__file__).parents[2] / "docs" / "gpu.md"
BEGIN, END = "<!-- eight billion -->\n", "<!-- end eight billion -->"
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "rope_theta": 1000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def write(root: Path) -> dict[str, str]:
    """Folders without weights, a LoRA of rank 8 and texts of 128 tokens; as settings of a plan."""
    for name, config in (("llama", LLAMA), ("qwen", QWEN)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config))
        train("pieces").save_pretrained(root / name)
    (root / "lora").mkdir()
    told = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "bias": "none",
            "task_type": "CAUSAL_LM", "base_model_name_or_path": "llama"}  # fmt: skip
    (root / "lora" / "adapter_config.json").write_text(json.dumps(told))
    factors = {}
    for layer in range(LLAMA["num_hidden_layers"]):  # type: ignore[call-overload]
        for module, width in (("q_proj", 4096), ("v_proj", 1024)):
            path = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            factors[f"{path}.lora_A.weight"] = torch.ones(8, 4096, dtype=torch.bfloat16)
            factors[f"{path}.lora_B.weight"] = torch.ones(width, 8, dtype=torch.bfloat16)
    save_file(factors, root / "lora" / "adapter_model.safetensors")
    rows = [{"prompt": "the river " * 60, "completion": " ran past the old mill" * 40} for _ in range(100)]
    (root / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "source_base": str(root / "llama"), "target_base": str(root / "qwen"), "source_tuned": str(root / "lora"),
        "calibration": str(root / "texts.jsonl"),
    }  # fmt: skip


def plans(root: Path) -> list[tuple[str, int, Plan]]:
    """(precision, micro-batch, plan)."""
    given = write(root)
    return [
        (dtype, size, plan_transfer(PlanSettings(**given, dtype=dtype, micro_batch=size, device_memory=24), Reporter()))
        for dtype in ("float32", "bfloat16")
        for size in (16, 4)
    ]


def table(found: list[tuple[str, int, Plan]]) -> str:
    """As on the page."""
    lines = ["| weights | `--micro-batch` | engine | GB on the device | 24 GB | 80 GB |", "|---|---|---|---|---|---|"]
    for dtype, size, plan in found:
        for engine, used in plan.engines.items():
            fits = ["fits" if 1.1 * used <= limit * 1e9 else "–" for limit in (24, 80)]
            lines.append(f"| {dtype} | {size} | {engine} | {used / 1e9:.0f} | {' | '.join(fits)} |")
    return "\n".join(lines) + "\n"


def written() -> str:
    """What the page has."""
    return PAGE.read_text().partition(BEGIN)[2].partition(END)[0]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = table(plans(Path(folder)))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{made}{END}{rest.partition(END)[2]}")
    print(made)
