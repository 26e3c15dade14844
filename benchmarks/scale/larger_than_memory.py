"""Two models three times as large as the memory they may use, through `taskferry transfer --engine blockwise`.

    python benchmarks/scale/larger_than_memory.py [--quick] [--json FILE] [--folder WORK]

A Llama of 1.5 B parameters with a full fine-tune, and one of 3 B: bfloat16, random weights, written shard by shard.
The transfer runs in a process of its own; a watcher kills it the moment its resident memory passes the limit. What
`--dry-run` foretold stands beside what it took.
"""

from __future__ import annotations

import argparse
import json
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
from safetensors.torch import save_file

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
QUICK = (Size(1024, 2816, 16, 8), Size(1280, 3456, 24, 10))


def tokenizer(folder: Path) -> int:
    """A tokenizer of words, the same for both."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate(["<s>", "</s>", "<unk>", *dict.fromkeys(WORDS)])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
    return len(vocabulary)


def write_model(folder: Path, size: Size, vocabulary: int, seed: int, tuned: float = 0.0) -> None:
    """Shard by shard, one block each; `tuned` adds noise of that size to the same weights."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=size.width, intermediate_size=size.hidden, num_hidden_layers=size.layers,
        num_attention_heads=size.heads, num_key_value_heads=size.heads, max_position_embeddings=512, dtype="bfloat16",
        architectures=["LlamaForCausalLM"], tie_word_embeddings=False,
    )  # fmt: skip
    config.save_pretrained(folder)
    tokenizer(folder)
    count = size.layers + 1
    index: dict[str, str] = {}
    total = 0
    for shard in range(count):
        generator = torch.Generator().manual_seed(1000 * seed + shard)
        noise = torch.Generator().manual_seed(1000 * seed + shard + 500)

        def random(rows: int, columns: int, scale: float = 0.02) -> torch.Tensor:
            value = scale * torch.randn(rows, columns, generator=generator)  # noqa: B023
            if tuned:
                value += tuned * torch.randn(rows, columns, generator=noise)  # noqa: B023
            return value.bfloat16()

        d, h = size.width, size.hidden
        if shard < size.layers:
            at = f"model.layers.{shard}"
            tensors = {f"{at}.self_attn.{n}_proj.weight": random(d, d) for n in "qkvo"}
            tensors |= {f"{at}.mlp.{n}_proj.weight": random(h, d) for n in ("gate", "up")}
            tensors[f"{at}.mlp.down_proj.weight"] = random(d, h)
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{at}.{norm}.weight"] = torch.ones(d, dtype=torch.bfloat16)
        else:
            tensors = {"model.embed_tokens.weight": random(vocabulary, d, 1.0), "lm_head.weight": random(vocabulary, d)}
            tensors["model.norm.weight"] = torch.ones(d, dtype=torch.bfloat16)
        file = f"model-{shard + 1:05d}-of-{count:05d}.safetensors"
        save_file(tensors, folder / file, {"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(t.nbytes for t in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )


def write_data(path: Path, samples: int, words: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lines = []
    for _ in range(samples):
        chosen = torch.randint(0, len(WORDS), (words,), generator=generator).tolist()
        lines.append(json.dumps({"text": " ".join(WORDS[i] for i in chosen)}))
    path.write_text("\n".join(lines) + "\n")


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


def outcome(found: dict[str, Any], limit: int, minutes: float, quick: bool) -> dict[str, Any]:
    """What is kept of a run, with the bounds that it missed."""
    record = json.loads(found["output"]) if found["code"] in OK else {}
    missed = []
    if found["killed"]:
        missed.append(f"killed: resident memory passed {limit / 2**30:.1f} GiB")
    elif found["code"] not in OK:
        missed.append(f"exit code {found['code']}: {found['output'][-400:]}")
    # The quick run has a neighbour on the other core: what it worked is judged there, not the clock.
    took = found["cpu" if quick else "seconds"] / 60
    if took > minutes:
        missed.append(f"{took:.0f} minutes, the bound is {minutes}")
    return {
        "peak_bytes": found["peak"],
        "seconds": round(found["seconds"]),
        "verdict": record.get("verdict"),
        "missed": missed,
    }


def table(results: dict[str, Any]) -> str:
    giga = 2**30
    rows = [
        ["parameters", " → ".join(f"{p / 1e9:.2f} B" for p in results["parameters"])],
        ["weights of both bases on disk, bfloat16", f"{results['weights_bytes'] / giga:.1f} GiB"],
        ["hard limit of resident memory", f"{results['limit_bytes'] / giga:.1f} GiB"],
        ["one block of each model in float32", f"{results['one_block_of_each_float32'] / giga:.2f} GiB"],
    ]
    for name, words in (("bico", "BiCo at scale 1"), ("default", "the default with automatic scale")):
        if found := results.get(name):
            rows.append([f"{words}: peak", f"{found['peak_bytes'] / giga:.2f} GiB"])
            rows.append([f"{words}: time", f"{found['seconds'] / 60:.1f} minutes"])
    return common.table(["", ""], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller pair under a smaller limit")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--folder", type=Path, help="where the models are written (70 GB); a temporary one otherwise")
    parser.add_argument("--only", choices=("bico", "default"), help="one of the two; the JSON keeps the other")
    options = parser.parse_args()
    started = time.time()
    sizes = QUICK if options.quick else FULL
    vocabulary_size = len(dict.fromkeys(WORDS)) + 3 if options.quick else 32_000
    samples, words, limit = (4, 32, int(1.2 * 2**30)) if options.quick else (16, 64, 3 * 2**30)
    minutes = {"bico": 10, "default": 0} if options.quick else {"bico": 60, "default": 480}
    # The default: several times the walks over the weights, so not in a quick run.
    wanted = [options.only] if options.only else ["bico"] if options.quick else ["bico", "default"]
    results: dict[str, Any] = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results = {name: found for name, found in results.items() if name in ("bico", "default")}
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        work = Path(temporary)
        for name, size, seed, tuned in (
            ("a", sizes[0], 1, 0.0),
            ("a-tuned", sizes[0], 1, 0.002),
            ("b", sizes[1], 2, 0.0),
        ):
            (work / name).mkdir()
            write_model(work / name, size, vocabulary_size, seed, tuned)
        write_data(work / "data.jsonl", samples, words)
        weights = sum(f.stat().st_size for n in ("a", "b") for f in (work / n).glob("*.safetensors"))
        command = [sys.executable, "-m", "taskferry", "transfer", "--source-base", work / "a", "--source-tuned"]
        command += [work / "a-tuned", "--target-base", work / "b", "--calibration", work / "data.jsonl", "--samples"]
        command += [samples, "--micro-batch", 2, "--engine", "blockwise", "--out", work / "out", "--json"]
        own = {"bico": ["--method", "bico", "--scale", "1"], "default": []}
        results |= {
            "parameters": [size.parameters(vocabulary_size) for size in sizes],
            "weights_bytes": weights,
            "limit_bytes": limit,
            "one_block_of_each_float32": 4 * (sizes[0].block + sizes[1].block),
        }
        for name in wanted:
            found = watched([*map(str, command), *own[name]], limit)
            results[name] = outcome(found, limit, minutes[name], options.quick)
            shutil.rmtree(work / "out", ignore_errors=True)
            print(name, json.dumps(results[name]), flush=True)
    kept = {name: results[name] for name in ("bico", "default") if name in results}
    failures = [f"{name}: {why}" for name, found in kept.items() for why in found["missed"]]
    tokens = min(found["tokens"] for found in kept.values())
    if not options.quick and (weights < 2.8 * limit or tokens < 1024):  # 9 GB against 3 GiB
        failures.append(f"{weights / limit:.1f} times the limit and {tokens} tokens: too small")
    common.finish(results, table(results), options.json, failures, started)


if __name__ == "__main__":
    main()
