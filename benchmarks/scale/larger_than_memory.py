"""Two models three times as large as the memory they may use, through `taskferry transfer --engine blockwise`.

    python benchmarks/scale/larger_than_memory.py [--quick] [--json FILE] [--folder WORK]

A Llama of 1.5 B parameters with a full fine-tune, and one of 3 B: bfloat16, random weights, in many shards.
The transfer runs in a process of its own; a watcher kills it the moment its resident memory passes the limit.
"""

from __future__ import annotations

import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared import common

SENTENCE = "the ship carries what was learned on one shore to another and nobody trains it again under way"
WORDS = SENTENCE.split()
OK = (0, 3)  # 3: no scale helps random weights, which is an answer too


@dataclass(frozen=True)
class Size:
    """A Llama's shape."""

    width: int
    hidden: int
    layers: int
    heads: int

    @property
    def block(self) -> int:
        return 4 * self.width**2 + 3 * self.width * self.hidden

    def parameters(self, vocabulary: int) -> int:
        return self.layers * self.block + 2 * vocabulary * self.width


FULL = (Size(2048, 5632, 28, 16), Size(2560, 6912, 36, 20))
RUNS = {"bico": "BiCo at scale 1", "default": "the default"}
QUICK = (Size(1024, 2816, 16, 8), Size(1280, 3456, 24, 10))


def tokenizer(folder: Path) -> None:
    """A tokenizer of words, the same for both."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *dict.fromkeys(WORDS)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def write_model(folder: Path, size: Size, vocabulary: int, seed: int, tuned: float = 0.0) -> None:
    """A Llama of random weights in small shards; `tuned` adds noise of that size to the same weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=size.width, intermediate_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, max_position_embeddings=512,
        tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters() if tuned else ():
            parameter += tuned * torch.randn_like(parameter)
    model.save_pretrained(folder, max_shard_size="250MB")
    tokenizer(folder)


def write_data(path: Path, samples: int, words: int) -> None:
    chosen = random.Random(0)
    rows = (json.dumps({"text": " ".join(chosen.choices(WORDS, k=words))}) for _ in range(samples))
    path.write_text("\n".join(rows) + "\n")


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def watched(command: list[str], limit: int) -> dict[str, Any]:
    """Run under a hard limit of resident memory; seconds by the clock and of the CPU, peak, exit code, output."""
    started, worked, peak = time.time(), cpu_of_children(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True)
        status = Path(f"/proc/{process.pid}/status")
        killed = False
        while process.poll() is None:
            try:
                fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
            except (FileNotFoundError, ProcessLookupError):
                break
            if "VmRSS" in fields:
                peak = max(peak, 1024 * int(fields["VmHWM"].split()[0]))
                if 1024 * int(fields["VmRSS"].split()[0]) > limit:
                    process.kill()
                    killed = True
            time.sleep(0.02)
        process.wait()
        output.seek(0)
        return {
            "seconds": time.time() - started,
            "cpu": cpu_of_children() - worked,
            "peak": peak,
            "code": process.returncode,
            "killed": killed,
            "output": output.read(),
        }


def outcome(found: dict[str, Any], limit: int, minutes: float) -> dict[str, Any]:
    """Keep what is told of a run, with the bounds that it missed."""
    record = json.loads(found["output"]) if found["code"] in OK else {}
    missed = []
    if found["killed"]:
        missed.append(f"killed: resident memory passed {limit / 2**30:.1f} GiB")
    elif found["code"] not in OK:
        missed.append(f"exit code {found['code']}: {found['output'][-400:]}")
    if found["cpu"] / 60 > minutes:  # a machine that others use too says little by its clock
        missed.append(f"{found['cpu'] / 60:.0f} CPU-minutes, the bound is {minutes}")
    times = {"seconds": round(found["seconds"]), "cpu_seconds": round(found["cpu"])}
    return {"peak_bytes": found["peak"], **times, "verdict": record.get("verdict"), "missed": missed}


def table(results: dict[str, Any]) -> str:
    giga = 2**30
    rows = [
        ["parameters", " → ".join(f"{p / 1e9:.2f} B" for p in results["parameters"])],
        ["weights of both bases on disk, bfloat16", f"{results['weights_bytes'] / giga:.1f} GiB"],
        ["hard limit of resident memory", f"{results['limit_bytes'] / giga:.1f} GiB"],
        ["one block of each model in float32", f"{results['one_block_of_each_float32'] / giga:.2f} GiB"],
        ["calibration tokens", str(results["tokens"])],
    ]
    for name, words in RUNS.items():
        if found := results.get(name):
            rows.append([f"{words}: peak", f"{found['peak_bytes'] / giga:.2f} GiB"])
            rows.append([f"{words}: time", f"{found['seconds'] / 60:.1f} minutes"])
    return common.table(["", ""], rows)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--folder", type=Path, help="where the models are written (70 GB); a temporary one otherwise")
    parser.add_argument("--only", choices=RUNS, help="one of the two; the JSON keeps the other")
    options = parser.parse_args()
    started = time.time()
    sizes = QUICK if options.quick else FULL
    vocabulary = len(dict.fromkeys(WORDS)) + 3 if options.quick else 32_000
    samples, words, limit = (4, 32, int(1.2 * 2**30)) if options.quick else (16, 64, 3 * 2**30)
    minutes = 10 if options.quick else 480
    # The default walks over the weights several times, so not in a quick run.
    wanted = [options.only] if options.only else ["bico"] if options.quick else list(RUNS)
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)
        for name, size, seed, tuned in (("a", 0, 1, 0.0), ("a-tuned", 0, 1, 0.002), ("b", 1, 2, 0.0)):
            (work / name).mkdir()
            write_model(work / name, sizes[size], vocabulary, seed, tuned)
        write_data(work / "data.jsonl", samples, words)
        weights = sum(f.stat().st_size for n in ("a", "b") for f in (work / n).glob("*.safetensors"))
        command = [sys.executable, "-m", "taskferry", "transfer", "--source-base", work / "a", "--source-tuned"]
        command += [work / "a-tuned", "--target-base", work / "b", "--calibration", work / "data.jsonl", "--samples"]
        command += [samples, "--set", "micro_batch=2", "--engine", "blockwise", "--out", work / "out", "--json"]
        results |= {
            "parameters": [size.parameters(vocabulary) for size in sizes],
            "weights_bytes": weights,
            "limit_bytes": limit,
            "one_block_of_each_float32": 4 * (sizes[0].block + sizes[1].block),
            "tokens": samples * words,
        }
        for name in wanted:
            own = ["--method", "bico", "--scale", "1"] if name == "bico" else []
            results[name] = outcome(watched([*map(str, command), *own], limit), limit, minutes)
            shutil.rmtree(work / "out", ignore_errors=True)
            print(name, json.dumps(results[name]), flush=True)
    failures = [f"{name}: {why}" for name in wanted for why in results[name]["missed"]]
    if not options.quick and weights < 2.8 * limit:  # 9 GB against 3 GiB
        failures.append(f"{weights / limit:.1f} times the limit: too small")
    common.finish(results, table(results), options.json, failures, started)


if __name__ == "__main__":
    main()
