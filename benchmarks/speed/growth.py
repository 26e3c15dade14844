"""How the cost grows with width, depth, tokens and samples, against the arithmetic; and whether the plan foretells it.

    python benchmarks/speed/growth.py [--quick] [--json benchmarks/results/growth.json] [--only sweeps|pairs]

A Llama of width d and one of width d + d/4, hidden width as the width; one thing varies at a time. Exponents are fitted
over the larger half of each sweep, because small sizes are overhead. The plan's seconds are compared with the
measured ones at every point, and on real pairs its memory with the peak of a fresh process.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from benchmarks.shared import common
from benchmarks.speed import speed
from taskferry import Batch, Calibration, TaskVector, fit
from taskferry.jobs.cost import Plan
from taskferry.jobs.plan import plan_job
from taskferry.methods import Job, find
from taskferry.objectives.objectives import LanguageModel

BASE = {"width": 512, "depth": 2, "length": 128, "samples": 32}
SWEEPS: dict[str, list[int]] = {
    "width": [256, 512, 1024, 2048, 4096],
    "depth": [1, 2, 4, 8],
    "length": [32, 64, 128, 256],
    "samples": [16, 32, 64, 128],
}
QUICK: dict[str, list[int]] = {"width": [128, 256, 512], "samples": [8, 16]}
# What the arithmetic says of each stage: products of tokens and squares of widths, decompositions of their cubes.
ARITHMETIC = {
    "width": {"capture": 2.0, "solve": 3.0, "apply": 3.0},
    "depth": {"capture": 1.0, "solve": 1.0, "apply": 1.0},
    "length": {"capture": 1.0, "solve": 0.0, "apply": 0.0},
    "samples": {"capture": 1.0, "solve": 0.0, "apply": 0.0},
}
WITHIN = 0.30


def llama(width: int, depth: int) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=width, intermediate_size=width, num_hidden_layers=depth, num_attention_heads=8,
        num_key_value_heads=8, max_position_embeddings=512,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def tokens(samples: int, length: int, micro_batch: int = 8) -> Calibration:
    generator = torch.Generator().manual_seed(0)
    pairs = []
    for start in range(0, samples, micro_batch):
        ids = torch.randint(0, 1000, (min(micro_batch, samples - start), length), generator=generator)
        batch = Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
        pairs.append((batch, batch))
    return Calibration(pairs)


def planned(A: nn.Module, B: nn.Module, calibration: Calibration, objective: Any) -> Plan:
    """What all maps of BiCo would take."""
    job = replace(Job.of(A, B, TaskVector({}), calibration, objective), every_site=True)
    return plan_job(job, find("bico"), {})


def point(width: int, depth: int, length: int, samples: int) -> dict[str, float]:
    """Seconds of each stage, and what the plan says."""
    torch.manual_seed(0)
    A, B = llama(width, depth), llama(width + width // 4, depth)
    tau = TaskVector({n: 1e-3 * torch.randn_like(p) for n, p in A.named_parameters() if "proj" in n})
    calibration = tokens(samples, length)
    plan = planned(A, B, calibration, LanguageModel())
    stages = speed.Stages()
    started = time.perf_counter()
    alignment = fit(A, B, calibration, LanguageModel(), progress=stages)
    apply = speed.timed(lambda: alignment.apply(tau))[0]
    return {
        "capture": stages.between("start", "capture")[0],
        "solve": stages.between("capture", "solve")[0],
        "apply": apply,
        "seconds": time.perf_counter() - started,
        "planned": plan.seconds,
        **{f"planned {stage}": seconds for stage, seconds in plan.stages.items()},
    }


def exponent(values: list[int], seconds: list[float]) -> float:
    """The slope in a doubly logarithmic plot, over the larger half."""
    half = max(2, math.ceil(len(values) / 2) + 1)
    x = torch.tensor(values[-half:], dtype=torch.float64).log()
    y = torch.tensor(seconds[-half:], dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x @ y) / (x @ x))


def one_memory(make: Callable[[], speed.Pair]) -> None:
    """In a fresh process: what the plan says and what the fit takes, in bytes and seconds."""
    pair = make()
    plan = planned(pair.A, pair.B, pair.calibration, pair.objective)
    started = time.perf_counter()
    fit(pair.A, pair.B, pair.calibration, pair.objective)
    seconds = time.perf_counter() - started
    peak = speed.peak_so_far()
    print(plan.memory_bytes, peak, plan.seconds - plan.stages["apply"], seconds)


def real_pair(name: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-4:]
    return dict(zip(("planned bytes", "bytes", "planned seconds", "seconds"), map(float, found), strict=True))


def draw(results: dict[str, Any], file: Path) -> None:
    """Measured seconds of every sweep, with the slope that the arithmetic foretells."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "taskferry"
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.4 * len(results), 3.4), layout="constrained")
    for axis, (name, found) in zip(axes, results.items(), strict=True):
        for stage, colour in (("capture", "#2563eb"), ("solve", "#ea580c"), ("apply", "#16a34a")):
            seconds = [p[stage] for p in found["points"]]
            axis.loglog(
                found["values"], seconds, "o-", color=colour, label=f"{stage} ({found['exponents'][stage]:.1f})"
            )
            guide = [seconds[-1] * (v / found["values"][-1]) ** ARITHMETIC[name][stage] for v in found["values"]]
            axis.loglog(found["values"], guide, "--", color=colour, linewidth=0.8)
        axis.set_xlabel(name)
        axis.set_xticks(found["values"], [str(v) for v in found["values"]])
        axis.minorticks_off()
        axis.legend(fontsize=7)
    axes[0].set_ylabel("seconds")
    figure.suptitle("Measured (dots, exponent in brackets) and the arithmetic's slope (dashed)", fontsize=9)
    figure.savefig(file, metadata={"Date": None})


def measure_sweeps(sweeps: dict[str, list[int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, values in sweeps.items():
        base = dict(BASE, samples=64) if name == "width" else BASE  # as many tokens as the widest map is wide, twice
        points = [point(**{**base, name: value}) for value in values]
        exponents = {stage: exponent(values, [p[stage] for p in points]) for stage in ("capture", "solve", "apply")}
        found[name] = {"values": values, "points": points, "exponents": exponents}
        print(name, exponents, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two short sweeps, no bound on the plan")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--plot", type=Path, help="draw the sweeps here (SVG)")
    parser.add_argument("--only", choices=("sweeps", "pairs"), help="the other part is taken from --json")
    parser.add_argument("--pair", action="append", help="with --only pairs: these again, the others from --json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one_memory({**speed.PAIRS, **speed.QUICK}[options.one])
        return
    started = time.time()
    known = json.loads(options.json.read_text()) if options.only else {}
    sweeps = known["sweeps"] if options.only == "pairs" else measure_sweeps(QUICK if options.quick else SWEEPS)
    if options.only == "sweeps" or options.quick:
        pairs = known.get("pairs", {})
    else:
        again = options.pair or list(speed.PAIRS)
        pairs = {name: real_pair(name) if name in again else known["pairs"][name] for name in speed.PAIRS}
    rows, failures = [], []
    for name, found in sweeps.items():
        off = [p["planned"] / p["seconds"] for p in found["points"]]
        shown = [f"{found['exponents'][stage]:.2f} ({ARITHMETIC[name][stage]:.0f})" for stage in found["exponents"]]
        values = found["values"]
        rows.append([f"{name}: {values[0]} to {values[-1]}", *shown, f"{min(off):.2f} to {max(off):.2f}"])
        failures += [
            f"{name} {value}: the plan says {p['planned']:.1f} s, it took {p['seconds']:.1f} s"
            for value, p in zip(values, found["points"], strict=True)
            if abs(p["planned"] / p["seconds"] - 1) > WITHIN and p["seconds"] > 2 and not options.quick
        ]
    told = []
    for name, p in pairs.items():
        ratio, memory = p["planned seconds"] / p["seconds"], p["planned bytes"] / p["bytes"]
        told.append([name, f"{p['planned seconds']:.0f} s", f"{p['seconds']:.0f} s", f"{ratio:.2f}"])
        told[-1] += [f"{p['planned bytes'] / 1e9:.1f} GB", f"{p['bytes'] / 1e9:.1f} GB", f"{memory:.2f}"]
        for what, value in (("seconds", ratio), ("bytes", memory)):
            if abs(value - 1) > WITHIN:
                failures.append(f"{name}: planned {what} are {value:.2f} of the measured")
    text = common.table(["sweep", "capture", "solve", "apply", "planned / measured seconds"], rows)
    text += "\n\nExponents, in brackets those of the arithmetic.\n"
    if told:
        header = ["pair", "planned", "took", "ratio", "planned memory", "peak", "ratio"]
        text += "\n" + common.table(header, told)
    if options.plot:
        draw(sweeps, options.plot)
    common.finish({"sweeps": sweeps, "pairs": pairs}, text, options.json, failures, started)


if __name__ == "__main__":
    main()
