"""Each stage of a transfer against the bare engine doing the same arithmetic, in one process and one run.

    python benchmarks/speed/speed.py [--quick] [--json benchmarks/results/speed.json] [--pairs NAME …]

Interleaved and repeated; ratios of medians, because machines are noisy. CPU-seconds stand beside the wall time. A quick
run, on machines that others use too, takes the shortest times, and measures what misses a bound up to twice again. The
floors use torch alone: a frozen forward and backward of both models, matrix products of the same shapes, one float64
SVD for every map (timed once on a real matrix of each shape), two products for every weight. Peak memory is that of a
fresh process. Vision weights are random: speed does not care. The loss is a cross-entropy with a random head.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.shared import common
from taskferry import Alignment, Batch, Calibration, TaskVector, fit
from taskferry.collect.capture import Side, collect
from taskferry.collect.device import frozen
from taskferry.collect.maps import Maps, Sums
from taskferry.layers.discovery import find_sites
from taskferry.layers.pairing import pair_sites
from taskferry.linalg.sums import CrossCovariance
from taskferry.objectives.objectives import LanguageModel, both_objectives

BOUNDS = {"capture": 1.15, "solve": 0.5, "apply": 1.1, "end to end": 1.2, "memory": 1.15}
LOOSE = 1.5  # times the bounds, with --quick
FIRST = "ViT-B-16 → ViT-B-16-plus-240"


@dataclass
class Pair:
    """Two models and a calibration set for speed."""

    A: nn.Module
    B: nn.Module
    calibration: Calibration
    objective: Any


def clip_pair(a: str, b: str, images: int) -> Pair:
    import open_clip

    torch.manual_seed(0)
    towers = [open_clip.CLIP(**open_clip.get_model_config(name)).visual.eval() for name in (a, b)]
    pairs = []
    for start in range(0, images, 8):
        ids = tuple(range(start, start + 8))
        sizes = (tower.image_size[0] for tower in towers)
        first, second = (Batch({"image": torch.randn(8, 3, size, size)}, ids=ids) for size in sizes)
        pairs.append((first, second))
    return Pair(towers[0], towers[1], Calibration(pairs), lambda m, b: head_loss(m(b.inputs["image"]), b))


def head_loss(features: Tensor, batch: Batch, classes: int = 50) -> Tensor:
    """A cross-entropy with a fixed random head: gradients that differ from sample to sample, as real ones do."""
    head = torch.randn(classes, features.shape[1], generator=torch.Generator().manual_seed(0))
    logits = 10 * F.normalize(features, dim=1) @ F.normalize(head, dim=1).T
    return F.cross_entropy(logits, torch.tensor(batch.ids) % classes, reduction="sum")


def bert_pair(samples: int) -> Pair:
    from taskferry import load_model, load_samples, text_calibration

    shared = common.need_shared()
    A, B = (load_model(str(shared / "models" / name)) for name in ("all-MiniLM-L6-v2", "gte-small"))
    found = load_samples(str(shared / "data" / "ag_news")).take(range(samples))
    texts = [str(row["text"]) for row in found.rows]
    calibration = text_calibration(texts, A.tokenizer(), B.tokenizer(), labels=found.labels, max_length=64)
    return Pair(A.model, B.model, calibration, lambda m, b: head_loss(m(**b.inputs).last_hidden_state[:, 0], b))


def llama_pair(samples: int, widths: tuple[int, int] = (2048, 3072)) -> Pair:
    import transformers

    def build(width: int) -> nn.Module:
        config = transformers.LlamaConfig(
            vocab_size=2000, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=2,
            num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=256,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()

    torch.manual_seed(0)
    pairs = []
    for start in range(0, samples, 8):
        ids = torch.randint(0, 2000, (8, 128))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        batch = Batch(inputs, ids=tuple(range(start, start + 8)))
        pairs.append((batch, batch))
    return Pair(build(widths[0]), build(widths[1]), Calibration(pairs), LanguageModel())


PAIRS: dict[str, Callable[[], Pair]] = {
    FIRST: lambda: clip_pair("ViT-B-16", "ViT-B-16-plus-240", 32),
    "ViT-B-16 → ViT-L-14": lambda: clip_pair("ViT-B-16", "ViT-L-14", 16),
    "MiniLM-L6 → gte-small": lambda: bert_pair(100),
    "Llama 2048 → 3072, two blocks": lambda: llama_pair(16),
}
QUICK: dict[str, Callable[[], Pair]] = {"Llama 512 → 768, two blocks": lambda: llama_pair(16, (512, 768))}


def losses(pair: Pair) -> list[Callable[[Batch], Tensor]]:
    """The loss of each model, bound once."""
    models = pair.A, pair.B
    objectives = both_objectives(pair.objective, *models, pair.calibration)
    return [objectives[i].bind(models[i], pair.calibration.side(i)) for i in (0, 1)]


def bare_passes(pair: Pair, bound: list[Callable[[Batch], Tensor]]) -> None:
    """A frozen forward and backward to the activations: the first layer's output asks for a gradient."""
    for i, model in enumerate((pair.A, pair.B)):
        with frozen(model), torch.enable_grad():
            for batch in pair.calibration.side(i):
                with _from_the_first_layer(model):
                    bound[i](batch).backward()


@contextmanager
def _from_the_first_layer(model: nn.Module) -> Iterator[None]:
    """Inside, the graph starts at the output of the first linear layer or convolution."""
    first = next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Embedding))
    handle = first.register_forward_hook(lambda *seen: seen[2].detach().requires_grad_())
    yield
    handle.remove()


def bare_products(maps: list[tuple[int, int, int]], batches: int) -> Callable[[], None]:
    """X_Aᵀ X_B of the same shapes, a micro-batch at a time, into sums."""
    pools: dict[tuple[int, int], Tensor] = {}
    sums: dict[tuple[int, int], Tensor] = {}
    for rows, d_A, d_B in maps:
        part = -(-rows // batches)
        for d in (d_A, d_B):
            if (part, d) not in pools:
                pools[part, d] = torch.randn(part, d)
        sums.setdefault((d_A, d_B), torch.zeros(d_A, d_B))

    def run() -> None:
        for rows, d_A, d_B in maps:
            part = -(-rows // batches)
            for _ in range(batches):
                sums[d_A, d_B].addmm_(pools[part, d_A].T, pools[part, d_B])

    return run


def bare_apply(alignment: Alignment, tau: TaskVector) -> Callable[[], None]:
    """Two products for every weight, with the maps as matrices."""
    work = []
    for site in alignment.pairs:
        if site.source.weight in tau.deltas:
            R_in, R_out = alignment.R_in[site.reads].dense(), alignment.R_out[site.target.name].dense()
            work.append((R_out, site.source.read(tau.deltas[site.source.weight]), R_in))

    def run() -> None:
        for R_out, delta, R_in in work:
            R_out.T @ (delta @ R_in)

    return run


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


class Stages:
    """Wall and CPU seconds of fit's stages, read from its progress: a stage ends with its last step."""

    def __init__(self) -> None:
        self.last = {"start": (time.perf_counter(), time.process_time())}

    def __call__(self, what: str, done: int, total: int) -> None:  # noqa: ARG002
        self.last[what] = (time.perf_counter(), time.process_time())

    def between(self, first: str, second: str) -> tuple[float, float]:
        return self.last[second][0] - self.last[first][0], self.last[second][1] - self.last[first][1]


def measure(
    name: str, make: Callable[[], Pair], repeats: int, typical: Callable[[Iterable[float]], float]
) -> dict[str, Any]:
    """All of one pair; `typical` makes one time of the repeated ones."""
    pair = make()
    bound = losses(pair)
    sites, _ = pair_sites(find_sites(pair.A), find_sites(pair.B))
    sums = Sums()
    collect(sums, Side(pair.A, bound[0]), Side(pair.B, bound[1]), sites, pair.calibration, Maps())
    each = [*sums.inputs.values(), *sums.outputs.values()]
    maps = [(one.rows, one.d_A, one.d_B) for one in each]
    svd = _svd_seconds(each)
    del sums, each
    tau = TaskVector({n: 1e-3 * torch.randn_like(p) for n, p in pair.A.named_parameters() if p.ndim == 2})
    times: dict[str, list[tuple[float, float]]] = {}
    products = bare_products(maps, len(pair.calibration))

    def note(stage: str, seconds: tuple[float, float]) -> None:
        times.setdefault(stage, []).append(seconds)

    for _ in range(repeats):  # interleaved: a slow minute slows all of them
        note("bare passes", timed(lambda: bare_passes(pair, bound)))
        note("bare products", timed(products))
        stages, kept = Stages(), {}

        def whole() -> None:
            kept["alignment"] = fit(pair.A, pair.B, pair.calibration, pair.objective, progress=stages)  # noqa: B023
            note("apply", timed(lambda: kept["alignment"].apply(tau)))  # noqa: B023

        note("end to end", timed(whole))
        note("capture", stages.between("start", "capture"))
        note("solve", stages.between("capture", "solve"))
        note("bare apply", timed(bare_apply(kept["alignment"], tau)))
    wall = {stage: typical(w for w, _ in values) for stage, values in times.items()}
    cpu = {stage: typical(c for _, c in values) for stage, values in times.items()}
    floor = wall["bare passes"] + wall["bare products"] + wall["solve"] + wall["bare apply"]
    ratios = {
        "capture": wall["capture"] / (wall["bare passes"] + wall["bare products"]),
        "solve": wall["solve"] / svd,
        "apply": wall["apply"] / wall["bare apply"],
        "end to end": wall["end to end"] / floor,
        "end to end / bare passes": wall["end to end"] / wall["bare passes"],
        "end to end / bare passes, CPU": cpu["end to end"] / cpu["bare passes"],
    }
    # the sums: rows, or the matrix if that is smaller
    held = 4 * sum(min(rows * (a + b), a * b) for rows, a, b in maps)
    found = {
        "ratios": {k: round(v, 3) for k, v in ratios.items()},
        "wall": {k: round(v, 3) for k, v in wall.items()},
        "cpu": {k: round(v, 3) for k, v in cpu.items()},
        "svd_seconds": round(svd, 2),
        "maps": Counter(f"{a} x {b}" for _, a, b in maps),
        "peak_bytes": {"statistics": held},
    }
    peaks = found["peak_bytes"]
    peaks |= {what: peak(what, name) for what in ("bare", "ours")}
    found["ratios"]["memory"] = round(peaks["ours"] / (peaks["bare"] + peaks["statistics"]), 3)
    print(name, found["ratios"], flush=True)
    return found


def _svd_seconds(sums: list[CrossCovariance]) -> float:
    """A float64 SVD of every map's matrix: timed on one of each shape."""
    total = 0.0
    for (d_A, d_B), count in Counter((S.d_A, S.d_B) for S in sums).items():
        C = next(S for S in sums if (S.d_A, S.d_B) == (d_A, d_B)).matrix().double()
        total += count * timed(lambda: torch.linalg.svd(C, full_matrices=False))[0]  # noqa: B023
    return total


def peak(what: str, name: str) -> int:
    """Peak resident bytes of a fresh process that does one thing."""
    command = [sys.executable, str(Path(__file__)), "--peak", what, "--pairs", name]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ})
    return int(done.stdout.strip().splitlines()[-1])


def one_peak(what: str, make: Callable[[], Pair]) -> None:
    pair = make()
    if what == "bare":
        bare_passes(pair, losses(pair))
    else:
        fit(pair.A, pair.B, pair.calibration, pair.objective)
    # The counter of `getrusage` would start with that of the parent.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(1024 * int(status["VmHWM"].split()[0]))


def missed(name: str, found: dict[str, Any], slack: float) -> list[str]:
    """The bounds that one pair misses."""
    ratios = found["ratios"]
    return [
        f"{name}: {key} is {ratios[key]:.2f} of its floor, the bound is {bound * slack:.2f}"
        for key, bound in BOUNDS.items()
        if ratios[key] > bound * slack
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--pairs", nargs="*", default=[], help="these alone")
    parser.add_argument("--peak", choices=("bare", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = {**PAIRS, **QUICK}
    if options.peak:
        one_peak(options.peak, known[options.pairs[0]])
        return
    started = time.time()
    chosen = {n: known[n] for n in options.pairs} or (QUICK if options.quick else PAIRS)
    repeats, slack, tries = (3, LOOSE, 3) if options.quick else (5, 1.0, 1)
    typical: Callable[[Iterable[float]], float] = min if options.quick else statistics.median
    again = options.json is not None and options.json.exists() and options.pairs  # others stay
    results: dict[str, Any] = json.loads(options.json.read_text()) if again else {}
    for name, make in chosen.items():
        for _ in range(tries):
            results[name] = measure(name, make, repeats, typical)
            if not missed(name, results[name], slack):
                break
        if options.json is not None:  # a run of an hour may be cut off
            options.json.write_text(json.dumps(results, indent=1) + "\n")
    rows, failures = [], []
    for name, found in results.items():
        if name not in known:
            continue
        ratios, peaks = found["ratios"], found["peak_bytes"]
        memory = f"{peaks['ours'] / 1e9:.1f} GB (bare {peaks['bare'] / 1e9:.1f}, sums {peaks['statistics'] / 1e9:.1f})"
        shown = [f"{ratios[k]:.2f}" for k in ("capture", "solve", "apply", "end to end")]
        rows.append([name, *shown, f"{ratios['end to end / bare passes']:.1f}", memory, f"{ratios['memory']:.2f}"])
        failures += missed(name, found, slack)
    header = ["pair", "capture / floor", "solve / SVD", "apply / floor", "end to end / floor"]
    header += ["end to end / bare passes", "peak", "peak / (bare + sums)"]
    common.finish(results, common.table(header, rows), options.json, failures, started)


if __name__ == "__main__":
    main()
