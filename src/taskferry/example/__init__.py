"""Small real models that come with the package, to try every command on, without a network.

    >>> write_example("demo")          # base-a, my-lora, tuned-a, base-b, adapters, data.jsonl, test.jsonl

`benchmarks/zoo/example_models.py` in the repository made them: two language models of different family, width and
depth, pre-trained on two halves of the State of the Union addresses, and a LoRA of the first on the King James Bible.
All texts are in the public domain.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.numpy import load_file, save

from taskferry.disk.files import read_json
from taskferry.disk.staging import staged_folder

FILES = Path(__file__).parent / "files"
PARTS = {
    "base-a": "a Llama, 4 blocks of width 96: last year's base",
    "my-lora": "a PEFT LoRA of base-a on scripture",
    "tuned-a": "base-a with that LoRA merged: a full fine-tune",
    "base-b": "a Qwen 3, 6 blocks of width 128, pre-trained on other text: this year's base",
    "adapters": "a folder of adapters of base-a",
    "data.jsonl": "128 passages that the LoRA was trained on",
    "test.jsonl": "200 passages of books that nothing was trained on",
}


def write_example(folder: str | Path) -> dict[str, str]:
    """Everything into a new folder, whole or not at all; returns what each part is."""
    with staged_folder(Path(folder)) as stage:
        for name in ("base-a", "base-b", "my-lora"):
            shutil.copytree(FILES / name, stage / name)
        for name in ("data.jsonl", "test.jsonl"):
            shutil.copyfile(FILES / name, stage / name)
        shutil.copytree(FILES / "my-lora", stage / "adapters" / "my-lora")
        _merge(stage / "base-a", stage / "my-lora", stage / "tuned-a")
    return dict(PARTS)


def _merge(base: Path, lora: Path, out: Path) -> None:
    """A full fine-tune of a base and its LoRA: W + α / r · B A, in NumPy, for torch takes seconds to import."""
    shutil.copytree(base, out)
    config, factors = read_json(lora / "adapter_config.json"), load_file(lora / "adapter_model.safetensors")
    weights = load_file(base / "model.safetensors")
    for name in [name for name in factors if ".lora_A." in name]:
        A, B = (factors[name.replace("lora_A", side)].astype("float32") for side in ("lora_A", "lora_B"))
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        change = config["lora_alpha"] / config["r"] * (B @ A)
        weights[weight] = (weights[weight] + change).astype(weights[weight].dtype)
    (out / "model.safetensors").write_bytes(save(weights, {"format": "pt"}))
