"""Speed, memory and equality on a real GPU: the row that a contributor sends in.

    python benchmarks/speed/gpu.py [--quick] [--device cuda:0] [--json row.json]

Two Llamas of random weights, moved by BiCo: once on the CPU in float32, then on the device in float32 and bfloat16. The
row says how long each stage takes, how much memory of the device it takes, and how far the moved change lies from the
CPU's. Nothing is downloaded. Send the row (the JSON, or the Markdown that is printed) with an issue.
"""

from __future__ import annotations

import copy
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from benchmarks.shared import common
from benchmarks.speed.speed import llama_pair
from taskferry import TaskVector, __version__, fit
from taskferry.objectives.objectives import LanguageModel

WIDTHS, QUICK = (1024, 1280), (128, 160)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda", help="where to run")
    given = parser.parse_args()
    device = torch.device(given.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU that this torch can use: run it where torch.cuda.is_available() is true")
    row = measure(device, *((QUICK, 8) if given.quick else (WIDTHS, 32)))
    lines = [
        [each["dtype"].removeprefix("torch."), f"{each['fit']:.2f}", f"{each['apply']:.2f}",
         f"{each['memory_bytes'] / 2**20:.0f}", f"{each['off']:.2g}"] for each in row["rows"]
    ]  # fmt: skip
    print(common.table(["precision", "capture, solve s", "apply s", "device memory MiB", "off the CPU's"], lines))
    if given.json is not None:
        given.json.write_text(json.dumps(row, indent=1) + "\n")


def measure(device: torch.device, widths: tuple[int, int], count: int) -> dict[str, Any]:
    """The row of one device."""
    pair = llama_pair(count, widths)
    A, B, samples = pair.A, pair.B, pair.calibration
    generator = torch.Generator().manual_seed(1)
    tau = TaskVector(
        {n: 0.01 * torch.randn(p.shape, generator=generator) for n, p in A.named_parameters() if "proj" in n}
    )
    expected = stages(A, B, samples, tau)["moved"]
    row: dict[str, Any] = {
        "taskferry": __version__,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or device.type,
        "models": {"widths": widths, "blocks": 2, "samples": count, "tokens": 128},
        "rows": [],
    }
    for dtype in (torch.float32, torch.bfloat16):
        models = [copy.deepcopy(model).to(device, dtype) for model in (A, B)]
        stages(models[0], models[1], samples, tau)  # kernels are loaded and chosen in a first run
        memory = torch.get_device_module(device) if device.type != "cpu" else None
        if memory is not None:
            memory.reset_peak_memory_stats(device)
        found = stages(models[0], models[1], samples, tau)
        moved = found.pop("moved")
        off = (TaskVector({n: d.cpu() for n, d in moved.dense().deltas.items()}) - expected.dense()).norm()
        peak = 0 if memory is None else memory.max_memory_allocated(device)
        row["rows"].append({"dtype": str(dtype), **found, "memory_bytes": peak, "off": off / expected.norm()})
    return row


def stages(A: nn.Module, B: nn.Module, samples: Any, tau: TaskVector) -> dict[str, Any]:
    """Seconds of both stages, and what was moved."""
    started = time.perf_counter()
    alignment = fit(A, B, samples, LanguageModel())
    wait(A)
    fitted = time.perf_counter()
    moved = alignment.apply(tau)
    wait(A)
    return {"fit": fitted - started, "apply": time.perf_counter() - fitted, "moved": moved}


def wait(model: nn.Module) -> None:
    device = next(model.parameters()).device
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


if __name__ == "__main__":
    main()
