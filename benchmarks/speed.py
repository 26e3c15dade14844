"""Each stage of a transfer against the bare engine doing the same arithmetic, in one process and one run.

    python benchmarks/speed.py [--quick] [--json benchmarks/results/speed.json] [--pairs NAME …]

Interleaved and repeated; ratios of medians, because machines are noisy. CPU-seconds stand beside the wall time. The
floors use torch alone: a frozen forward and backward of both models, matrix products of the same shapes, one float64
SVD for every map (measured once for each shape), two products for every weight. Random weights: speed does not care.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor, nn

from taskferry import Batch, Calibration, TaskVector, fit
from taskferry.capture import Side, collect, frozen
from taskferry.finding import find_sites
from taskferry.objectives import LanguageModel, Objective, Prototypes
from taskferry.pairing import pair_sites
from taskferry.statistics import CrossCovariance

BOUNDS = {
    "capture": 1.15,
    "solve, full rank": 0.5,
    "solve, a tenth": 0.1,
    "apply": 1.1,
    "end to end": 1.2,
    "memory": 1.15,
}
LOOSE = 1.5  # times the bounds, with --quick


@dataclass
class Pair:
    """Two models and a calibration set for speed: the loss is a sum of features."""

    A: nn.Module
    B: nn.Module
    calibration: Calibration
    objective: Any


def clip_pair(a: str, b: str, images: int) -> Pair:
    import open_clip

    torch.manual_seed(0)
    towers = [open_clip.CLIP(**open_clip.get_model_config(name)).visual.eval() for name in (a, b)]
    sizes = [tower.image_size[0] for tower in towers]
    return Pair(towers[0], towers[1], _images(sizes, images, "x"), lambda model, batch: model(batch.inputs["x"]).sum())


def _images(sizes: list[int], n: int, key: str) -> Calibration:
    pairs = []
    for start in range(0, n, 16):
        count = min(16, n - start)
        ids = tuple(range(start, start + count))
        first, second = (Batch({key: torch.randn(count, 3, size, size)}, ids=ids) for size in sizes)
        pairs.append((first, second))
    return Calibration(pairs)


def bert_pair(samples: int) -> Pair:
    from taskferry import load_model, load_samples, text_calibration

    shared = common.need_shared()
    A, B = (load_model(str(shared / "models" / name)) for name in ("all-MiniLM-L6-v2", "gte-small"))
    found = load_samples(str(shared / "data" / "ag_news")).take(range(samples))
    texts = [str(row["text"]) for row in found.rows]
    calibration = text_calibration(texts, A.tokenizer(), B.tokenizer(), labels=found.labels, max_length=64)
    return Pair(A.model, B.model, calibration, Prototypes())


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
        count = min(8, samples - start)
        ids = torch.randint(0, 2000, (count, 128))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
        batch = Batch(inputs, ids=tuple(range(start, start + count)))
        pairs.append((batch, batch))
    return Pair(build(widths[0]), build(widths[1]), Calibration(pairs), LanguageModel())


PAIRS: dict[str, Callable[[], Pair]] = {
    "ViT-B-16 → ViT-B-16-plus-240": lambda: clip_pair("ViT-B-16", "ViT-B-16-plus-240", 32),
    "ViT-B-16 → ViT-L-14": lambda: clip_pair("ViT-B-16", "ViT-L-14", 16),
    "MiniLM-L6 → gte-small": lambda: bert_pair(100),
    "Llama 2048 → 3072, two blocks": lambda: llama_pair(16),
}
QUICK: dict[str, Callable[[], Pair]] = {"Llama 256 → 384, two blocks": lambda: llama_pair(16, (256, 384))}


def losses(pair: Pair) -> list[Callable[[Batch], Tensor]]:
    """The loss of each model, bound once."""
    from taskferry.objectives import as_objective

    objective: Objective = as_objective(pair.objective)
    return [objective.bind(model, pair.calibration.side(i)) for i, model in enumerate((pair.A, pair.B))]


def bare_passes(pair: Pair, bound: list[Callable[[Batch], Tensor]]) -> None:
    """A frozen forward and backward to the activations: the first layer's output asks for a gradient."""
    for i, model in enumerate((pair.A, pair.B)):
        with frozen(model), torch.enable_grad():
            for batch in pair.calibration.side(i):
                with _from_the_first_layer(model):
                    bound[i](batch).backward()


class _from_the_first_layer:
    """Inside, the first linear or convolution makes the graph start at its output."""

    def __init__(self, model: nn.Module) -> None:
        self.module = next(m for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d | nn.Embedding))

    def __enter__(self) -> None:
        self.handle = self.module.register_forward_hook(lambda *seen: seen[2].detach().requires_grad_())

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def shapes(statistics_: Any) -> list[tuple[int, int, int]]:
    """(rows, d_A, d_B) of every map."""
    return [(s.rows, s.d_A, s.d_B) for s in [*statistics_.inputs.values(), *statistics_.outputs.values()]]


def bare_products(found: list[tuple[int, int, int]], batches: int) -> Callable[[], None]:
    """X_Aᵀ X_B of the same shapes, a micro-batch at a time, into sums."""
    pools: dict[tuple[int, int], Tensor] = {}
    sums: dict[tuple[int, int], Tensor] = {}
    for rows, d_A, d_B in found:
        part = -(-rows // batches)
        for d in (d_A, d_B):
            if (part, d) not in pools:
                pools[part, d] = torch.randn(part, d)
        sums.setdefault((d_A, d_B), torch.zeros(d_A, d_B))

    def run() -> None:
        for rows, d_A, d_B in found:
            part = -(-rows // batches)
            for _ in range(batches):
                sums[d_A, d_B].addmm_(pools[part, d_A].T, pools[part, d_B])

    return run


def timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(name: str, make: Callable[[], Pair], repeats: int) -> dict[str, Any]:
    pair = make()
    bound = losses(pair)
    sites, _ = pair_sites(find_sites(pair.A), find_sites(pair.B))
    batches = len(pair.calibration)
    kept: dict[str, Any] = {}

    def ours_capture() -> None:
        kept["statistics"] = collect(Side(pair.A, bound[0]), Side(pair.B, bound[1]), sites, pair.calibration)

    ours_capture()
    found = shapes(kept["statistics"])
    products = bare_products(found, batches)
    tau = TaskVector({n: 1e-3 * torch.randn_like(p) for n, p in pair.A.named_parameters() if p.ndim == 2})

    def ours_solve() -> None:
        both = [*kept["statistics"].inputs.values(), *kept["statistics"].outputs.values()]
        kept["maps"] = [s.solve() for s in both]

    def ours_apply() -> None:
        kept["moved"] = kept["alignment"].apply(tau)

    def bare_apply() -> None:
        for site in kept["alignment"].pairs:
            if site.source.weight in tau.deltas:
                R_in, R_out = kept["dense"][site.target.name]
                delta = site.source.read(tau.deltas[site.source.weight])
                R_out.T @ (delta @ R_in)

    def ours_all() -> None:
        kept["alignment"] = fit(pair.A, pair.B, pair.calibration, pair.objective, statistics_memory=1 << 40)
        ours_apply()

    ours_all()
    alignment = kept["alignment"]
    kept["dense"] = {
        p.target.name: (alignment.R_in[p.reads].dense(), alignment.R_out[p.target.name].dense())
        for p in alignment.pairs
    }
    stages: dict[str, Callable[[], Any]] = {
        "bare passes": lambda: bare_passes(pair, bound),
        "bare products": products,
        "capture": ours_capture,
        "solve": ours_solve,
        "apply": ours_apply,
        "bare apply": bare_apply,
        "end to end": ours_all,
    }
    times: dict[str, list[tuple[float, float]]] = {stage: [] for stage in stages}
    for _ in range(repeats):
        for stage, work in stages.items():  # interleaved: a slow minute slows all of them
            times[stage].append(timed(work))
    wall = {stage: statistics.median(w for w, _ in values) for stage, values in times.items()}
    cpu = {stage: statistics.median(c for _, c in values) for stage, values in times.items()}
    svd = sum(count * _svd_seconds(shape) for shape, count in Counter((a, b) for _, a, b in found).items())
    floor = wall["bare passes"] + wall["bare products"] + wall["solve"] + wall["bare apply"]
    ratios = {
        "capture": wall["capture"] / (wall["bare passes"] + wall["bare products"]),
        "solve, full rank": wall["solve"] / svd,
        "apply": wall["apply"] / wall["bare apply"],
        "end to end": wall["end to end"] / floor,
        "end to end / bare passes": wall["end to end"] / wall["bare passes"],
    }
    rounded = {k: round(v, 3) for k, v in ratios.items()}
    print(name, rounded, flush=True)
    return {
        "ratios": rounded,
        "wall": {k: round(v, 3) for k, v in wall.items()},
        "cpu": {k: round(v, 3) for k, v in cpu.items()},
        "svd_seconds": round(svd, 2),
        "maps": Counter(f"{a} x {b}" for _, a, b in found),
    }


def _svd_seconds(shape: tuple[int, int]) -> float:
    C = torch.randn(shape, dtype=torch.float64)
    return timed(lambda: torch.linalg.svd(C, full_matrices=False))[0]


def low_rank_solve(width: int, repeats: int) -> float:
    """Our solver over a float64 SVD of the same matrix, where the rank is a tenth of the width."""
    rows = width // 10
    X_A, X_B = torch.randn(rows, width), torch.randn(rows, width)
    C = (X_A.T @ X_B).double()
    ours, theirs = [], []
    for _ in range(repeats):
        S = CrossCovariance(width, width)
        S.add(X_A, X_B)
        ours.append(timed(S.solve)[0])
        theirs.append(timed(lambda: torch.linalg.svd(C))[0])
    return statistics.median(ours) / statistics.median(theirs)


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
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small pair, and bounds half as loose again")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--pairs", nargs="*", default=[], help="these alone")
    parser.add_argument("--peak", choices=("bare", "ours"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    known = {**PAIRS, **QUICK}
    if options.peak:
        one_peak(options.peak, known[options.pairs[0]])
        return
    started = time.time()
    chosen = {n: known[n] for n in options.pairs} or (QUICK if options.quick else PAIRS)
    repeats = 3 if options.quick else 5
    results: dict[str, Any] = {}
    rows, failures = [], []
    for name, make in chosen.items():
        found = measure(name, make, repeats)
        found["peak_bytes"] = {what: peak(what, name) for what in ("bare", "ours")}
        results[name] = found
        ratios, peaks = found["ratios"], found["peak_bytes"]
        memory = f"{peaks['ours'] / 2**30:.1f} GiB ({peaks['bare'] / 2**30:.1f} bare)"
        shown = [f"{ratios[k]:.2f}" for k in ("capture", "solve, full rank", "apply", "end to end")]
        rows.append([name, *shown, f"{ratios['end to end / bare passes']:.1f}", memory])
        slack = LOOSE if options.quick else 1.0
        for key in ("capture", "solve, full rank", "apply", "end to end"):
            if ratios[key] > BOUNDS[key] * slack:
                failures.append(
                    f"{name}: {key} is {ratios[key]:.2f} of its floor, the bound is {BOUNDS[key] * slack:.2f}"
                )
    tenth = low_rank_solve(512 if options.quick else 2048, repeats)
    results["solve, a tenth"] = round(tenth, 4)
    if tenth > BOUNDS["solve, a tenth"] * (LOOSE if options.quick else 1.0):
        failures.append(f"a map of a tenth of the rank takes {tenth:.2f} of a float64 SVD")
    header = [
        "pair",
        "capture / floor",
        "solve / SVD",
        "apply / floor",
        "end to end / floor",
        "end to end / bare passes",
        "peak",
    ]
    text = common.table(header, rows) + f"\n\nMaps of a tenth of the rank: {tenth:.3f} of a float64 SVD."
    common.finish(results, text, options.json, failures, started)


if __name__ == "__main__":
    main()
