"""Two thousand adapters on a two-node Ray cluster on this machine, with a node killed and one added on the way.

    python benchmarks/scale/fleet.py [--quick] [--json benchmarks/results/fleet.json]

LoRA adapters of rank 8 on MiniLM-L6 (random factors), a hundred of them poisoned: truncated, not finite, of another
base, of a wrong shape, with hostile names. Every adapter must end exactly once, outputs equal to single runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from safetensors.torch import save_file

from benchmarks.shared import common
from taskferry import Alignment, fit, load_model, load_samples, text_calibration
from taskferry.config import FleetSettings, Move
from taskferry.fleet import run_fleet
from taskferry.models import Skeleton, read_adapter
from taskferry.objectives.objectives import Prototypes

MODULES = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
POISONS = ("truncated", "not-finite", "wrong-base", "wrong-shape", "hostile")
NODE = {"num_cpus": 1, "object_store_memory": 600_000_000}  # the alignment alone takes 283 MB


def make_alignment(path: Path) -> None:
    """MiniLM-L6 to gte-small on a hundred news headlines, by BiCo."""
    shared = common.need_shared()
    A, B = (load_model(str(shared / "models" / name)) for name in ("all-MiniLM-L6-v2", "gte-small"))
    found = load_samples(str(shared / "data" / "ag_news")).take(range(100))
    texts = [str(row["text"]) for row in found.rows]
    calibration = text_calibration(texts, A.tokenizer(), B.tokenizer(), labels=found.labels, max_length=64)
    fit(A.model, B.model, calibration, Prototypes()).save(path)


def make_adapters(folder: Path, count: int, poisoned: int) -> None:
    """Plain PEFT folders; the poisoned ones are spread among them."""
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["query", "key", "value", "dense"],
              "base_model_name_or_path": "all-MiniLM-L6-v2", "bias": "none"}  # fmt: skip
    every = max(1, count // max(1, poisoned))
    for i in range(count):
        generator = torch.Generator().manual_seed(i)
        poison = POISONS[(i // every) % len(POISONS)] if i % every == 0 and i // every < poisoned else ""
        name = f"{i:05d}-<img src=x>&..;$(x)" if poison == "hostile" else f"{i:05d}{'-' + poison if poison else ''}"
        width = 192 if poison == "wrong-base" else 384
        tensors = {}
        for layer in range(6):
            for module in MODULES:
                at = f"base_model.model.encoder.layer.{layer}.{module}"
                tensors[f"{at}.lora_A.weight"] = 0.05 * torch.randn(8, width, generator=generator)
                tensors[f"{at}.lora_B.weight"] = 0.05 * torch.randn(width, 8, generator=generator)
        if poison == "not-finite":
            tensors[next(iter(tensors))].fill_(float("nan"))
        if poison == "wrong-shape":
            key = next(iter(tensors))
            tensors[key] = tensors[key][:, :-3].contiguous()
        (folder / name).mkdir()
        save_file(tensors, folder / name / "adapter_model.safetensors")
        text = json.dumps(config) if poison != "hostile" else json.dumps({**config, "r": "__import__('os')"})
        (folder / name / "adapter_config.json").write_text(text)
        if poison == "truncated":
            path = folder / name / "adapter_model.safetensors"
            path.write_bytes(path.read_bytes()[:-100])


class Trouble:
    """Kills a node a third of the way and adds one at two thirds."""

    def __init__(self, cluster: Any, node: Any) -> None:
        self.cluster, self.node, self.events = cluster, node, []

    def __call__(self, counts: Any, total: int, rate: float) -> None:  # noqa: ARG002
        done = sum(counts.values())
        if len(self.events) == 0 and done > total / 3:
            self.events.append({"killed a node at": done})
            threading.Thread(target=self.cluster.remove_node, args=(self.node, False)).start()
        elif len(self.events) == 1 and done > 2 * total / 3:
            self.events.append({"added a node at": done})
            self.cluster.add_node(**NODE)


def main() -> None:
    options = common.parser(__doc__).parse_args()
    from ray.cluster_utils import Cluster

    started = time.time()
    count, poisoned = (200, 10) if options.quick else (2000, 100)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        (work / "adapters").mkdir()
        make_adapters(work / "adapters", count, poisoned)
        good = sorted(p for p in (work / "adapters").iterdir() if p.name.isdigit())
        make_alignment(work / "a-to-b.alignment")
        alignment = Alignment.load(work / "a-to-b.alignment")
        move = Move(name="b", alignment=work / "a-to-b.alignment", target_base="gte-small")
        settings = FleetSettings(adapters=str(work / "adapters"), out=str(work / "moved"), moves=[move], retries=10)

        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        node = cluster.add_node(**NODE)
        import ray

        ray.init(address=cluster.address, log_to_driver=False)
        trouble = Trouble(cluster, node)
        summary = run_fleet(settings, trouble)
        calm = run_fleet(settings.model_copy(update={"out": str(work / "calm")}))  # for the throughput
        ray.shutdown()
        cluster.shutdown()

        parts = sorted((work / "moved" / "manifest").iterdir())
        lines = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
        ended = [line["adapter"] for line in lines]
        wrong = compare(good, alignment, work / "moved")
    failures = []
    if sorted(ended) != sorted(set(ended)) or len(ended) != count:
        failures.append(f"{len(ended)} endings of {len(set(ended))} adapters, {count} were given")
    if (summary["done"], summary["failed"]) != (count - poisoned, poisoned):
        failures.append(f"{summary['done']} done and {summary['failed']} failed")
    failures += [f"{wrong} outputs differ from single runs"] if wrong else []
    ours = 1000 * sum(line["seconds"] for line in lines if line["status"] == "done") / max(1, summary["done"])
    results = {"summary": summary, "events": trouble.events, "calm": calm, "milliseconds in a worker": round(ours, 2)}
    rows = [
        ["adapters, of them poisoned", f"{count}, {poisoned}"],
        ["done, failed with a reason", f"{summary['done']}, {summary['failed']}"],
        ["on the way", ", ".join(f"{k} {v}" for event in trouble.events for k, v in event.items())],
        ["outputs that differ from single runs", str(wrong)],
        ["adapters a second, with the trouble", f"{summary['adapters_a_second']:.0f}"],
        ["adapters a second, without", f"{calm['adapters_a_second']:.0f}"],
        ["an adapter in a worker", f"{ours:.1f} ms"],
    ]
    common.finish(results, common.table(["", ""], rows), options.json, failures, started)


def compare(good: list[Path], alignment: Alignment, out: Path) -> int:
    """How many outputs are not what one adapter alone gives."""
    source = Skeleton.from_sites(alignment.source_parameters, [p.source for p in alignment.pairs], "")
    target = Skeleton.from_sites(alignment.target_parameters, [p.target for p in alignment.pairs], "")
    wrong = 0
    for folder in good[:: max(1, len(good) // 200)]:
        meant = alignment.apply(read_adapter(folder, source).tau).dense().deltas
        found = read_adapter(out / f"b--{folder.name}", target).tau.dense().deltas
        same = set(meant) == set(found) and all(torch.allclose(found[n], meant[n], rtol=1e-5, atol=1e-7) for n in meant)
        wrong += not same
    return wrong


if __name__ == "__main__":
    main()
