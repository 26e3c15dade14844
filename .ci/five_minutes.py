"""Run docs/start.md as a newcomer would, from nothing: a new environment, a new folder, a clock.

    python .ci/five_minutes.py [--limit 300] [--cpu]

Every line of its shell blocks is run by one shell, in order. Only `pip install .` becomes the install of a wheel,
built from this checkout first; that build and what pip fetches over the network count as well.
Fails where a command fails, where all of it takes longer than the limit, or where the loss does not fall. With `--cpu`
the limit is of CPU-seconds: a machine that others use too says little by its clock.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "start.md"
# A CPU build of torch is named by the gate; whoever runs the page gets what pip chooses.
TORCH = os.environ.get("TASKFERRY_TORCH", "")
# What stands in place of `pip install`, where the time of pip is not what is asked.
INSTALL = os.environ.get("TASKFERRY_INSTALL", "pip install -q")


def shell(page: str) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page, re.S | re.M)
    return [line for block in blocks for line in block.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", type=float, default=300, help="seconds")
    parser.add_argument("--cpu", action="store_true", help="of the CPU, not of the clock")
    options = parser.parse_args()
    page = PAGE.read_text(encoding="utf-8")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="five-minutes-") as folder:
        build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, str(ROOT)]
        subprocess.run(build, check=True)
        wheel = next(Path(folder).glob("taskferry-*.whl"))
        script = ["set -eu"]
        for line in shell(page):
            if line == "pip install .":
                script += [f"{INSTALL} {TORCH}"] if TORCH else []
                line = f"{INSTALL} {wheel}"
            script += [f'echo "[$SECONDS s]" {shlex.quote(line)}', line]
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        done = subprocess.run(
            ["bash", "-c", "\n".join(script)], cwd=folder, text=True, stdout=subprocess.PIPE, env=clean, check=False
        )
    print(done.stdout)
    seconds = time.monotonic() - started
    if done.returncode:
        sys.exit(f"docs/start.md: a command failed with {done.returncode}")
    losses = [float(found) for found in re.findall(r"^loss +([\d.]+) per token", done.stdout, re.M)]
    if len(losses) != 2 or not losses[1] < losses[0]:
        sys.exit(f"docs/start.md promises a lower loss after the move, they are {losses}")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    print(f"docs/start.md: {seconds:.0f} s from nothing ({cpu:.0f} of the CPU), losses {losses}")
    if (cpu if options.cpu else seconds) > options.limit:
        sys.exit(f"that is more than {options.limit:.0f} s")


if __name__ == "__main__":
    main()
