"""One, two and four processes: the same alignment, the traffic of the formula, and no hang when a rank dies.

    python benchmarks/scale/distributed.py [--quick] [--json benchmarks/results/distributed.json]

MiniLM-L6 to gte-small by BiCo, through `torchrun -m taskferry fit` on gloo. Each rank gives away the float64 sums of
the sites it does not own, and takes those of its own: Σ 8 d_A d_B (1 − 1/ranks) bytes out.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.shared import common
from taskferry import Alignment
from taskferry.engines.ranks import RankedPair

CLOSE = 1e-5


def as_rank(folder: Path, arguments: list[str]) -> None:
    """One rank of a job: the command itself, and the bytes it gave away into a folder."""
    from taskferry.cli import main as command

    fit = RankedPair.fit

    def measured(pair: RankedPair, *given: Any) -> Alignment:
        alignment = fit(pair, *given)
        (folder / str(pair.rank)).write_text(str(pair.sent))
        return alignment

    sys.argv = ["taskferry", *arguments]
    with patch.object(RankedPair, "fit", measured):
        command()


def run(work: Path, ranks: int, samples: int, traffic: Path) -> tuple[float, int, str, Path]:
    shared = common.need_shared()
    out = work / f"{ranks}-{len(list(work.iterdir()))}.alignment"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [
        __file__,
        "--as-rank",
        str(traffic),
        "fit",
        "--source-base",
        str(shared / "models" / "all-MiniLM-L6-v2"),
        "--target-base",
    ]
    command += [str(shared / "models" / "gte-small"), "--calibration", str(shared / "data" / "ag_news"), "--samples"]
    command += [str(samples), "--micro-batch", "5", "--max-length", "64", "--method", "bico", "--out", str(out)]
    started = time.time()
    # One thread each: their number changes the rounding of a product, and with it weak directions (3e-5 of a map).
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=1200)
    return time.time() - started, done.returncode, done.stdout + done.stderr, out


def difference(a: Alignment, b: Alignment) -> float:
    """The largest ‖R − R'‖ / ‖R‖ over all maps."""
    worst = 0.0
    for one, other in ((a.R_in, b.R_in), (a.R_out, b.R_out)):
        for key, R in one.items():
            worst = max(worst, float((R.dense() - other[key].dense()).norm() / R.dense().norm()))
    return worst


def formula(alignment: Alignment, ranks: int) -> float:
    """Bytes that a rank gives away, where sums are formed; rows are gathered instead where they are fewer."""
    total = 0.0
    maps = [(R.shape, alignment.quality_in[k].rows) for k, R in alignment.R_in.items()]
    maps += [(R.shape, alignment.quality_out[k].rows) for k, R in alignment.R_out.items()]
    for (d_A, d_B), rows in maps:
        few = rows * (d_A + d_B) <= d_A * d_B
        total += 4 * rows * (d_A + d_B) / ranks if few else 8 * d_A * d_B
    return total * (1 - 1 / ranks)


def main() -> None:
    if sys.argv[1:2] == ["--as-rank"]:
        as_rank(Path(sys.argv[2]), sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer samples, one and two processes")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    started = time.time()
    samples = 20 if options.quick else 100
    rows, failures = [], []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        reference = None
        for ranks in (1, 2) if options.quick else (1, 2, 4):
            traffic = work / f"traffic-{ranks}"
            traffic.mkdir()
            seconds, code, told, out = run(work, ranks, samples, traffic)
            if code:
                failures.append(f"{ranks} processes: exit code {code}: {told[-300:]}")
                continue
            alignment = Alignment.load(out)
            reference = reference or alignment
            far = difference(reference, alignment)
            sent = [int(p.read_text()) for p in traffic.iterdir()]
            told_by = formula(alignment, ranks)
            results[str(ranks)] = {"seconds": round(seconds, 1), "difference": far, "sent": sent, "formula": told_by}
            mean = sum(sent) / len(sent)
            rows.append(
                [str(ranks), f"{seconds:.0f} s", f"{far:.1e}", f"{mean / 1e6:.1f} MB", f"{told_by / 1e6:.1f} MB"]
            )
            if far > CLOSE:
                failures.append(f"{ranks} processes: maps differ by {far:.1e}")
            if abs(mean - told_by) > 0.1 * told_by + 1e3:
                failures.append(f"{ranks} processes: {mean / 1e6:.1f} MB sent, the formula says {told_by / 1e6:.1f} MB")
    torch.set_num_threads(2)
    header = ["processes", "time with start-up", "largest difference of a map", "given away by a rank", "formula"]
    common.finish(results, common.table(header, rows), options.json, failures, started)


if __name__ == "__main__":
    main()
