"""The jobs that faults are tried on, over small generated models: each in a forked process and a folder of its own.

A fork has all libraries imported already, so that a kill falls into the work and not into the start of Python.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from taskferry.config import ApplySettings, FitSettings, TransferSettings
from taskferry.errors import TaskferryError
from taskferry.jobs import apply as apply_alignment
from taskferry.jobs import fit as fit_alignment
from taskferry.jobs import transfer
from taskferry.opening import Reporter
from tests.helpers import folders

Hook = Callable[[str, tuple[Any, ...]], None]
_WRITES = ("open", "os.mkdir", "os.rename", "faults.write")
_hooks: list[Hook] = []
sys.addaudithook(lambda event, given: [hook(event, given) for hook in _hooks] and None)


@dataclass
class World:
    """Models, adapters and data on disk."""

    root: Path
    reporter: Reporter = field(default_factory=Reporter)

    def build(self) -> None:
        folders.encoder(self.root / "base-a", 16, 2, 1)
        folders.encoder(self.root / "base-b", 24, 3, 2)
        folders.shifted(self.root / "base-a", self.root / "tuned")
        folders.causal(self.root / "llama-a", "LlamaForCausalLM", 16, 2, 1)
        folders.causal(self.root / "llama-b", "LlamaForCausalLM", 24, 3, 2)
        folders.shifted(self.root / "llama-a", self.root / "llama-tuned")
        folders.texts(self.root / "texts.jsonl")
        folders.prompts(self.root / "prompts.jsonl")
        for i in range(8):
            folders.lora(self.root / "base-a", self.root / "adapters" / f"lora-{i}", ["query", "value"], seed=i)
        self.fit(self.root / "a-to-b.alignment")

    def fit(self, out: Path) -> None:
        """One group of sites a block, so that there is something to resume."""
        a, b = self.root / "base-a", self.root / "base-b"
        chosen = FitSettings(source_base=str(a), target_base=str(b), calibration=str(self.root / "texts.jsonl"),
                             samples=8, micro_batch=4, statistics_memory=1e-6, out=out)  # fmt: skip
        fit_alignment(chosen, reporter=self.reporter)

    def apply(self, out: Path) -> None:
        chosen = ApplySettings(
            alignment=self.root / "a-to-b.alignment", source_tuned=str(self.root / "adapters" / "lora-0"), out=out
        )
        apply_alignment(chosen, command="taskferry apply")

    def transfer(self, out: Path) -> None:
        a, b = self.root / "base-a", self.root / "base-b"
        chosen = TransferSettings(
            source_base=str(a), target_base=str(b), source_tuned=str(self.root / "tuned"), scale=1.0, samples=8,
            calibration=str(self.root / "texts.jsonl"), micro_batch=4, statistics_memory=1e-6, out=out,
        )  # fmt: skip
        transfer(chosen, command="taskferry transfer", reporter=self.reporter)

    def blockwise(self, out: Path) -> None:
        a, b = self.root / "llama-a", self.root / "llama-b"
        chosen = TransferSettings(
            source_base=str(a), target_base=str(b), source_tuned=str(self.root / "llama-tuned"), scale=1.0, samples=8,
            calibration=str(self.root / "prompts.jsonl"), micro_batch=4, engine="blockwise", out=out,
        )  # fmt: skip
        transfer(chosen, command="taskferry transfer", reporter=self.reporter)

    def job(self, name: str) -> Callable[[], None]:
        return lambda: getattr(self, name)(Path("out"))


def run(job: Callable[[], None], folder: Path, *, kill_after: float | None = None, hook: Hook | None = None) -> int:
    """Exit code of a job in a fork: 0 done, 2 refused with a reason, 1 a fault of ours, negative the signal."""
    child = start(job, folder, hook)
    if kill_after is not None:
        time.sleep(kill_after)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return end(child)


def start(job: Callable[[], None], folder: Path, hook: Hook | None = None) -> int:
    """The process id of a job that runs; what it says goes to `log` beside the folder."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.chdir(folder)
        log = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if hook is not None:
            _announce_writes()
            _hooks.append(hook)
        job()
        code = 0
    except TaskferryError as error:
        os.write(2, f"refused: {error}\n".encode())
        code = 2
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)
    raise AssertionError("not reached")


def end(child: int) -> int:
    """Wait for a job; its exit code."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _announce_writes() -> None:
    """safetensors writes beneath Python: say so before, so that a hook hears of it."""
    import safetensors.torch

    write = safetensors.torch.save_file

    def announced(tensors: Any, filename: Any, *more: Any, **named: Any) -> None:
        sys.audit("faults.write", str(filename))
        write(tensors, filename, *more, **named)

    safetensors.torch.save_file = announced
    with contextlib.suppress(ImportError, AttributeError):
        import transformers.modeling_utils as modeling

        modeling.safe_save_file = announced


def is_write(event: str, given: tuple[Any, ...], below: str) -> bool:
    """Whether something under the folder is about to be made, opened for writing or renamed."""
    if event not in _WRITES or isinstance(given[0], int) or given[0] is None:
        return False
    if event == "open" and not (isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
        return False
    return os.path.abspath(os.fsdecode(given[0])).startswith(below)


class AtWrite:
    """Does something at the n-th write below a folder; counts them all."""

    def __init__(self, below: Path, number: int, what: Callable[[], None]) -> None:
        self.below, self.number, self.what, self.seen = str(below), number, what, 0

    def __call__(self, event: str, given: tuple[Any, ...]) -> None:
        if is_write(event, given, self.below):
            self.seen += 1
            if self.seen == self.number:
                self.what()


def count_writes(job: Callable[[], None], folder: Path) -> int:
    """How many there are when nothing goes wrong."""
    counter = AtWrite(folder, -1, lambda: None)

    def counted() -> None:
        job()
        Path(f"{folder}.count").write_text(str(counter.seen))

    code = run(counted, folder, hook=counter)
    if code:
        raise RuntimeError(f"the job itself fails: {Path(f'{folder}.log').read_text()[-2000:]}")
    return int(Path(f"{folder}.count").read_text())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_room() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def changing(world: World, name: str, path: Path, steps: int) -> Callable[[], None]:
    """A job during which a file is written to, at a step that it tells."""

    class Changes(Reporter):
        left = steps

        def step(self, what: str, done: int, total: int) -> None:  # noqa: ARG002
            self.left -= 1
            if self.left == 0:
                content = bytearray(path.read_bytes())
                content[-3] ^= 1
                path.write_bytes(content)

    return World(world.root, reporter=Changes()).job(name)


def digest(path: Path, *, rename: tuple[bytes, bytes] = (b"", b"")) -> str:
    """sha256 over all files of an output."""
    found = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    for file in files:
        content = file.read_bytes()
        if file.name == "taskferry.json":  # its time differs
            content = json.dumps({k: v for k, v in json.loads(content).items() if k != "seconds"}).encode()
        content = content.replace(*rename) if rename[0] else content
        found.update(f"{file.relative_to(path)}:{len(content)}:".encode() + content)
    return found.hexdigest() if files else "nothing"


def stray(folder: Path) -> list[str]:
    """What a run has left beside its output."""
    beside = [p.name for p in folder.iterdir() if p.name != "out"]
    inside = [p.name for p in (folder / "out").rglob(".*")] if (folder / "out").is_dir() else []
    return beside + inside


@contextlib.contextmanager
def tmpfs(folder: Path, size: int) -> Iterator[bool]:
    """A file system of so many bytes mounted there; whether it could be."""
    folder.mkdir(exist_ok=True)
    mounted = not subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True, check=False
    ).returncode
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=True)


def clear(folder: Path) -> Path:
    """An empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def resident() -> int:
    """Bytes of memory this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def warm() -> None:
    """Import here what a job would import, and start no thread: forks then begin with the work."""
    for name in ("datasets", "peft", "pyarrow.parquet", "pyarrow.json", "pandas", "safetensors.torch", "accelerate",
                 "transformers.models.bert.modeling_bert", "transformers.models.llama.modeling_llama",
                 "transformers.models.auto.tokenization_auto"):  # fmt: skip
        importlib.import_module(name)


def quiet() -> None:
    """One thread, so that a fork is a whole copy; no messages of libraries."""
    torch.set_num_threads(1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
