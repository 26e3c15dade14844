"""Small real models that come with the package, to try every command on, without a network.

    >>> write_example("demo")          # base-a, my-lora, tuned-a, base-b, adapters, data.jsonl, test.jsonl

`benchmarks/zoo/example_models.py` in the repository made them: two language models of different family, width and
depth, pre-trained on two halves of the State of the Union addresses, and a LoRA of the first on the King James Bible.
All texts are in the public domain.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from taskferry.checkpoints import load_model, load_tuned
from taskferry.checkpoints.models import write_model
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
        base = load_model(str(stage / "base-a"))
        (stage / "tuned-a").mkdir()
        write_model(base, load_tuned(str(stage / "my-lora"), base).tau, stage / "tuned-a")
    return dict(PARTS)
