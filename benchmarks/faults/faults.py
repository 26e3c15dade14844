"""Faults tried on real runs: kills, full disks, read errors, inputs that change, hostile files, many runs at once.

    python benchmarks/faults/faults.py [--quick] [--json benchmarks/results/faults.json]

One table: fault, tries, survived, lost. Survived means: the run ended well, or was refused with a reason, or died and
the next run ended with the bytes of an uninterrupted one; nothing half-written, nothing left over, nothing done outside
of the output folder. Everything else is lost, is printed, and makes the exit code 1.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.faults import fuzzing, jobs
from benchmarks.faults.jobs import World
from benchmarks.shared import common

KILLS = {"fit": 60, "apply": 35, "transfer": 45, "blockwise": 25}
FEW_KILLS = {"fit": 3, "apply": 3, "transfer": 3, "blockwise": 1}
NAMES = {"blockwise": "transfer block by block"}
INPUTS, FEW_INPUTS = 500_000, 20_000
FLAT = 0.05  # how much more memory the last of many applies may have than the first


@dataclass
class Row:
    """One line of the table."""

    fault: str
    tries: int = 0
    survived: int = 0
    lost: list[str] = field(default_factory=list)
    note: str = ""
    seconds: float = 0.0

    def count(self, wrong: str | None) -> None:
        self.tries += 1
        if wrong is None:
            self.survived += 1
        else:
            self.lost.append(wrong)


class Faults:
    """All of them over one world, in a folder that is thrown away."""

    def __init__(self, world: World, work: Path, seed: int, quick: bool) -> None:
        self.world, self.work, self.quick = world, work, quick
        self.random = random.Random(seed)
        self.reference: dict[str, tuple[str, float]] = {}

    def known(self, name: str) -> tuple[str, float]:
        """(hash, seconds) of an uninterrupted run."""
        if name not in self.reference:
            for _ in range(2):  # the second one is timed: the first wakes caches and a cluster's workers
                folder = jobs.clear(self.work / "reference")
                started = time.time()
                code = jobs.run(self.world.job(name), folder)
                seconds = time.time() - started
            if code:
                raise RuntimeError(f"{name} fails by itself: {Path(f'{folder}.log').read_text()[-3000:]}")
            self.reference[name] = (jobs.digest(folder / "out"), seconds)
        return self.reference[name]

    def killed(self, name: str, tries: int) -> Row:
        """kill -9 at a random time, or at a random write; then once more to the end."""
        row = Row(f"kill -9 during {NAMES.get(name, name)}")
        wanted, seconds = self.known(name)
        writes = jobs.count_writes(self.world.job(name), jobs.clear(self.work / "count"))
        while row.tries < tries:
            folder = jobs.clear(self.work / "killed")
            if row.tries % 2:
                moment = self.random.uniform(0, seconds)
                code = jobs.run(self.world.job(name), folder, kill_after=moment)
                when = f"after {moment:.3f} s"
            else:
                number = self.random.randrange(1, writes + 1)
                hook = jobs.AtWrite(folder, number, jobs.die)
                code = jobs.run(self.world.job(name), folder, hook=hook)
                when = f"at write {number} of {writes}"
            if code == 0:
                continue  # it was faster than the kill
            row.count(self._again(name, folder, wanted, f"{name}, killed {when}"))
        return row

    def _again(self, name: str, folder: Path, wanted: str, what: str) -> str | None:
        """What is wrong after a run that was stopped and one that was not; None where nothing is."""
        if (folder / "out").exists() and jobs.digest(folder / "out") != wanted:
            return f"{what}: half an output"
        there = (folder / "out").exists()  # killed after the last step: the next run refuses, and cleans up
        code = jobs.run(self.world.job(name), folder)
        if code != (2 if there else 0):
            return f"{what}: the next run ends with {code}: {Path(f'{folder}.log').read_text()[-1500:]}"
        if jobs.digest(folder / "out") != wanted:
            return f"{what}: other bytes than an uninterrupted run"
        left = jobs.stray(folder)
        return f"{what}: left over {left}" if left else None

    def full_disk(self, name: str, tries: int) -> Row:
        """A file system of every size up to what is needed."""
        row = Row(f"disk full during {NAMES.get(name, name)} (small tmpfs)")
        wanted, _ = self.known(name)
        used = sum(p.stat().st_size + 4096 for p in (self.work / "reference").rglob("*"))
        for i in range(tries):
            size = 4096 * (1 + round((i + 1) / tries * used / 4096))
            with jobs.tmpfs(jobs.clear(self.work / "small"), size) as mounted:
                if not mounted:
                    row.note = "not run: mounting needs root"
                    return row
                row.count(self._refused(name, self.work / "small", wanted, f"{name} in {size} bytes"))
        return row

    def failing_write(self, name: str, most: int) -> Row:
        """An error of the operating system at each write in turn."""
        row = Row(f"write error during {NAMES.get(name, name)}, each in turn")
        wanted, _ = self.known(name)
        writes = jobs.count_writes(self.world.job(name), jobs.clear(self.work / "count"))
        for number in sorted(self.random.sample(range(1, writes + 1), min(most, writes))):
            folder = jobs.clear(self.work / "failing")
            hook = jobs.AtWrite(folder, number, jobs.no_room)
            row.count(self._refused(name, folder, wanted, f"{name}, write {number} of {writes}", hook))
        return row

    def _refused(self, name: str, folder: Path, wanted: str, what: str, hook: Any = None) -> str | None:
        """A run that ends well, or with a reason and nothing half-written."""
        code = jobs.run(self.world.job(name), folder, hook=hook)
        said = Path(f"{folder}.log").read_text()[-1500:] if code else ""
        Path(f"{folder}.log").unlink(missing_ok=True)
        if code not in (0, 2):
            return f"{what}: exit code {code}: {said}"
        if code == 0 and jobs.digest(folder / "out") != wanted:
            return f"{what}: ended well with other bytes"
        if code == 2 and (folder / "out").exists():
            return f"{what}: refused, and half an output: {said}"
        left = [p for p in jobs.stray(folder) if not p.endswith(".groups")]  # kept to go on from
        return f"{what}: left over {left}" if left else None

    def cut_shards(self, tries: int) -> Row:
        """A file of weights that ends in the middle."""
        row = Row("a shard that ends in the middle")
        for name, shard in (("transfer", "base-b/model.safetensors"), ("blockwise", "llama-b/model.safetensors"),
                            ("apply", "a-to-b.alignment")):  # fmt: skip
            wanted, _ = self.known(name)
            path = self.world.root / shard
            whole = path.read_bytes()
            for _ in range(tries):
                cut = self.random.randrange(1, len(whole))
                path.write_bytes(whole[:cut])
                row.count(self._refused(name, jobs.clear(self.work / "cut"), wanted, f"{name}, {shard} cut at {cut}"))
                path.write_bytes(whole)
        return row

    def changing(self, tries: int) -> Row:
        """An input that another process writes to while a run reads it."""
        row = Row("a checkpoint that changes during a run")
        for i in range(tries):
            name = ("transfer", "blockwise")[i % 2]
            side = ("a", "b", "tuned")[i // 2 % 3]
            kind = "" if name == "transfer" else "llama-"
            given = f"{kind}tuned" if side == "tuned" else f"{kind or 'base-'}{side}"
            path = self.world.root / given / "model.safetensors"
            whole = path.read_bytes()
            folder = jobs.clear(self.work / "changing")
            steps = self.random.randrange(1, 4)
            code = jobs.run(jobs.changing(self.world, name, path, steps), folder)
            said = Path(f"{folder}.log").read_text()[-1500:] if code else ""
            Path(f"{folder}.log").unlink(missing_ok=True)
            path.write_bytes(whole)
            wrong = None
            if code != 2 or "changed" not in said:
                wrong = f"{name}: {given} changed after {steps} steps: exit code {code} {said}"
            elif (folder / "out").exists():
                wrong = f"{name}: {given} changed, and an output was written"
            row.count(wrong)
        return row

    def many(self, count: int) -> Row:
        """Applies one after the other in one process."""
        row = Row(f"{count:,} applies in one process")
        folder = jobs.clear(self.work / "many")

        def loop() -> None:
            def once(i: int) -> None:
                self.world.apply(Path(f"out-{i}"))
                shutil.rmtree(f"out-{i}")

            start = max(20, count // 10)
            for i in range(start):
                once(i)
            memory, handles = jobs.resident(), len(os.listdir("/proc/self/fd"))
            for i in range(start, count):
                once(i)
            grown = jobs.resident() / memory - 1
            more = len(os.listdir("/proc/self/fd")) - handles
            Path(f"{folder}.grown").write_text(f"{grown:.4f} {more}")
            if grown > FLAT or more > 0:
                raise RuntimeError(f"memory grew by {100 * grown:.1f} %, {more} more open files")

        code = jobs.run(loop, folder)
        row.tries = count
        if code:
            row.lost.append(Path(f"{folder}.log").read_text()[-1500:])
        else:
            row.survived = count
            grown, more = Path(f"{folder}.grown").read_text().split()
            row.note = f"memory {100 * float(grown):+.1f} %, {more} more open files"
        return row

    def at_once(self, count: int) -> Row:
        """Transfers side by side into neighbouring folders."""
        row = Row(f"{count} transfers at once into neighbouring folders")
        folder = jobs.clear(self.work / "at-once")
        wanted, _ = self.known("transfer")
        started: list[tuple[int, str]] = []
        for i in range(count):
            name = f"side-{i}"
            started.append((jobs.start(lambda name=name: self.world.transfer(Path(name)), folder), name))
        for child, name in started:
            code = jobs.end(child)
            wrong = None if code == 0 else f"{name}: exit code {code}: {Path(f'{folder}.log').read_text()[-1500:]}"
            if code == 0 and jobs.digest(folder / name, rename=(name.encode(), b"out")) != wanted:
                wrong = f"{name}: other bytes than a transfer alone"
            row.count(wrong)
        left = [p.name for p in folder.iterdir() if not p.name.startswith("side-")]
        if left:
            row.lost.append(f"left over: {left}")
        return row

    def fuzzed(self, total: int) -> Iterator[Row]:
        """Mutants of every kind of file."""
        for reader, share in fuzzing.SHARES.items():
            found = fuzzing.fuzz(reader, max(20, round(total * share)))
            row = Row(f"mutated {reader}", found["inputs"], found["inputs"] - len(found["escapes"]), found["escapes"])
            row.note = (
                f"{found['refused']:,} refused, {found['accepted']:,} harmless; peak {found['peak'] / 2**20:.0f} MiB, "
                f"{1000 * found['seconds'] / max(1, found['inputs']):.2f} ms each"
            )
            yield row


def all_rows(faults: Faults, only: str | None) -> Iterator[Row]:
    quick = faults.quick
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "kill": lambda: (faults.killed(n, k) for n, k in (FEW_KILLS if quick else KILLS).items()),
        "disk": lambda: (faults.full_disk(n, 2 if quick else 12) for n in ("fit", "apply", "transfer", "blockwise")),
        "write": lambda: (
            faults.failing_write(n, 4 if quick else 1000) for n in ("fit", "apply", "transfer", "blockwise")
        ),
        "read": lambda: (faults.cut_shards(2 if quick else 12) for _ in range(1)),
        "change": lambda: (faults.changing(2 if quick else 12) for _ in range(1)),
        "load": lambda: (
            run(n) for run, n in ((faults.many, 200 if quick else 1000), (faults.at_once, 4 if quick else 10))
        ),
        "fuzz": lambda: faults.fuzzed(FEW_INPUTS if quick else INPUTS),
    }
    for name, part in parts.items():
        if only in (None, name):
            yield from timed(part())


def timed(rows: Iterator[Row]) -> Iterator[Row]:
    started = time.time()
    for row in rows:
        row.seconds = round(time.time() - started, 1)
        print(f"{row.fault}: {row.tries} tries, {len(row.lost)} lost, {row.seconds:.0f} s {row.note}", flush=True)
        yield row
        started = time.time()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--only", help="one part: kill, disk, write, read, change, load, fuzz")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started = time.time()
    jobs.quiet()
    with tempfile.TemporaryDirectory(prefix="taskferry-faults-") as scratch:
        root = Path(scratch)
        (root / "world").mkdir()
        (root / "work").mkdir()
        faults = Faults(World(root / "world"), root / "work", options.seed, options.quick)
        if options.only != "fuzz":
            jobs.warm()
            if jobs.run(faults.world.build, root / "build"):
                raise RuntimeError((root / "build.log").read_text())
        rows = list(all_rows(faults, options.only))
    header = ["fault", "tries", "survived", "lost", ""]
    lines = [[row.fault, f"{row.tries:,}", f"{row.survived:,}", str(len(row.lost)), row.note] for row in rows]
    total = [sum(r.tries for r in rows), sum(r.survived for r in rows), sum(len(r.lost) for r in rows)]
    lines.append(["**all**", *(f"**{n:,}**" for n in total), f"seed {options.seed}"])
    results: dict[str, Any] = {"seed": options.seed, "rows": [vars(row) for row in rows]}
    failures = [wrong for row in rows for wrong in row.lost]
    common.finish(results, common.table(header, lines), options.json, failures, started)


if __name__ == "__main__":
    main()
