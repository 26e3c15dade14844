"""Fuzzing the readers of adapters, indexes, alignments, task vectors and state files.

    >>> fuzz("adapters", 10_000)["escapes"]                     # python benchmarks/faults/faults.py --only fuzz

Each reader runs in a process of its own. Anything but a result or a TaskferryError is an escape: another exception, a
process that dies, ten seconds of computing without an answer, more than two gigabytes, a file opened for writing
outside of the work folder, another program started, a connection opened.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from benchmarks.faults.mutation import Mutator, dump
from taskferry import Alignment, TaskVector
from taskferry.disk.files import HEADER
from taskferry.errors import TaskferryError
from taskferry.models import read_adapter
from taskferry.models.states import check_folder, read_state
from taskferry.taskvector import LowRank
from tests.helpers import hostile

HANG = 10  # seconds without an answer
MEMORY = 2 * 2**30  # beyond what the process has at its start
STEP = 100  # inputs between two signs of life
Fuzz = Callable[[Mutator, Path], Callable[[], object]]


def adapters(mutant: Mutator, folder: Path) -> Callable[[], object]:
    """A PEFT folder, its configuration or its factors changed; applied where it is accepted."""
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["query"], "use_rslora": False,
              "use_dora": False, "alpha_pattern": {"layer.0.*query": 4, "key": 2}, "rank_pattern": {"key": 1},
              "init_lora_weights": True, "loftq_config": {}, "task_type": None}  # fmt: skip
    good = save(hostile.factors())
    both = mutant.random.random()
    (folder / "adapter_config.json").write_bytes(mutant.text(config) if both < 0.6 else dump(config))
    (folder / "adapter_model.safetensors").write_bytes(mutant.safetensors(good) if both > 0.4 else good)
    return lambda: _alignment().apply(read_adapter(folder, SKELETON).tau).norm()


def indexes(mutant: Mutator, folder: Path) -> Callable[[], object]:
    """An index of shards beside one shard and a link."""
    if not (folder / "a.safetensors").exists():
        (folder / "a.safetensors").write_bytes(save(hostile.factors()))
        (folder / "link.safetensors").symlink_to("a.safetensors")
    index = {"metadata": {"total_size": 80}, "weight_map": {"a": "a.safetensors", "b": "link.safetensors"}}
    (folder / "model.safetensors.index.json").write_bytes(mutant.text(index))
    return lambda: check_folder(folder)


def alignments(mutant: Mutator, folder: Path) -> Callable[[], object]:
    """A saved alignment; applied, shown and saved again where it is accepted."""
    path = folder / "a-to-b.alignment"
    path.write_bytes(mutant.safetensors(_good("alignment"), HEADER))

    def read() -> None:
        found = Alignment.load(path)
        found.table()
        weight = torch.ones(hostile.WIDE, hostile.SMALL)
        moved = found.apply(TaskVector({f"{hostile.MODULE}.weight": weight}))
        if moved.coverage is not None:
            moved.coverage.summary()

    return read


def task_vectors(mutant: Mutator, folder: Path) -> Callable[[], object]:
    """A saved task vector, dense and low-rank; applied where it is accepted."""
    path = folder / "tau.safetensors"
    path.write_bytes(mutant.safetensors(_good("task vector"), HEADER))
    return lambda: _alignment().apply(TaskVector.load(path)).norm()


def states(mutant: Mutator, folder: Path) -> Callable[[], object]:
    """State files: safetensors and torch's own."""
    if mutant.random.random() < 0.5:
        path = folder / "state.safetensors"
        path.write_bytes(mutant.safetensors(save(hostile.factors())))
    else:
        path = folder / "state.pt"
        path.write_bytes(mutant.blob(_good("state")))
    return lambda: read_state(path)


READERS: dict[str, Fuzz] = {
    "adapters": adapters,
    "indexes": indexes,
    "alignments": alignments,
    "task vectors": task_vectors,
    "state files": states,
}
SHARES = {"adapters": 0.28, "indexes": 0.17, "alignments": 0.24, "task vectors": 0.17, "state files": 0.14}
SKELETON = hostile.skeleton()
_KEPT: dict[str, bytes] = {}


@cache
def _alignment() -> Alignment:
    return hostile.alignment()


def _good(kind: str) -> bytes:
    """The file that mutants are made from."""
    if kind in _KEPT:
        return _KEPT[kind]
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "x"
        if kind == "alignment":
            hostile.alignment().save(path)
        elif kind == "task vector":
            A, B = hostile.factors().values()
            TaskVector({f"{hostile.MODULE}.weight": LowRank(B, A), f"{hostile.MODULE}.bias": B[:, 0]}).save(path)
        else:
            torch.save({"state_dict": hostile.factors(), "step": 3}, path)
        _KEPT[kind] = path.read_bytes()
    return _KEPT[kind]


class Watch:
    """Sees what the process does: writing outside of a folder, starting programs, connecting."""

    def __init__(self, folder: Path) -> None:
        self.allowed = (os.fspath(folder), "/dev/null", "/proc/self/")
        self.seen: list[str] = []
        self.on = False
        sys.addaudithook(self._hear)

    def _hear(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event == "open":
            path, mode, flags = given
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            )
            if writes and not isinstance(path, int):
                self._path(event, path)
        elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "shutil.rmtree"):
            self._path(event, given[0])
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "socket.connect", "ctypes.dlopen"):
            self.seen.append(f"{event} {given[:1]}")

    def _path(self, event: str, path: object) -> None:
        text = os.path.abspath(os.fsdecode(path))  # type: ignore[arg-type]
        if not text.startswith(self.allowed):
            self.seen.append(f"{event} {text}")


def fuzz(reader: str, count: int, seed: int = 0) -> dict[str, Any]:
    """So many inputs through one reader, in a process that may die; each escape with the input that made it."""
    found: dict[str, Any] = {"inputs": 0, "refused": 0, "accepted": 0, "escapes": [], "seconds": 0.0, "peak": 0}
    started, start = time.time(), 0
    root = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    try:
        while start < count:
            start = _one_process(reader, start, count, seed, root, found)
            if len(found["escapes"]) >= 20:
                break
    finally:
        shutil.rmtree(root, ignore_errors=True)
    found["seconds"] = round(time.time() - started, 1)
    return found


def _one_process(reader: str, start: int, count: int, seed: int, root: Path, found: dict[str, Any]) -> int:
    """Run up to the end, or to the input that kills the process; returns where to go on."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            _loop(reader, start, count, seed, root, os.fdopen(theirs, "w", buffering=1))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(theirs)
    at, done = start, False
    with os.fdopen(ours, "r") as lines:
        for line in lines:
            message = json.loads(line)
            at, done = message.get("at", at), message.get("done", done)
            for name in ("inputs", "refused", "accepted"):
                found[name] += message.get(name, 0)
            found["peak"] = max(found["peak"], message.get("peak", 0))
            found["escapes"] += [message["escape"]] if "escape" in message else []
    _, status = os.waitpid(child, 0)
    if done:
        return count
    found["inputs"] += 1
    found["escapes"].append(f"{reader}, input {at} or soon after, seed {seed}: the process died ({status})")
    return at + STEP + 1


def _loop(reader: str, start: int, count: int, seed: int, root: Path, tell: Any) -> None:
    folder = root / f"{start}"
    folder.mkdir()
    os.chdir(folder)
    tempfile.tempdir = str(root)
    make = READERS[reader]
    warm = make(Mutator(0), folder)  # imports and kept files are no fault of an input
    _answer(warm)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, -1))
    watch = Watch(root)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    signal.signal(signal.SIGPROF, _ring)
    counts = {"inputs": 0, "refused": 0, "accepted": 0}
    for i in range(start, count):
        read = make(Mutator(seed * 10**9 + i), folder)
        signal.setitimer(signal.ITIMER_PROF, HANG)
        watch.on = True
        outcome = _answer(read)
        watch.on = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        if watch.seen:
            outcome, watch.seen = f"{watch.seen[0]}", []
        counts["inputs"] += 1
        if outcome in counts:
            counts[outcome] += 1
        else:
            tell.write(json.dumps({"escape": f"{reader}, input {i}, seed {seed}: {outcome}"}) + "\n")
        if i % STEP == 0:
            signal.alarm(60 * HANG)  # kills a process that hangs where no timer is heard
            peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
            tell.write(json.dumps({"at": i, "peak": peak, **counts}) + "\n")
            counts = dict.fromkeys(counts, 0)
    tell.write(json.dumps({"done": True, **counts}) + "\n")


def _ring(number: int, frame: object) -> None:  # noqa: ARG001
    raise _Hang


class _Hang(BaseException):
    """Ten seconds are over."""


def _answer(read: Callable[[], object]) -> str:
    try:
        read()
    except TaskferryError as error:
        shown = str(error)
        return "refused" if len(shown) < 5000 else f"a message of {len(shown)} letters"
    except _Hang:
        return f"no answer in {HANG} s"
    except BaseException:
        return traceback.format_exc(limit=-3)
    return "accepted"
