"""Runs that die: nothing half-written, nothing left over, nobody else's work touched."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

import taskferry.disk.files
from taskferry import TaskVector
from taskferry.disk.files import replacing, write_safetensors, write_text
from taskferry.disk.staging import staged_folder
from taskferry.disk.temporary import sweep, temporary_folder
from taskferry.errors import TaskferryError


def killed(job: Callable[[], None]) -> None:
    """Run it in a fork, which kills itself at the end: no `finally` is reached."""
    child = os.fork()
    if child == 0:
        try:
            job()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_what_a_dead_run_left_is_swept_and_a_living_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def half_folder() -> None:
        with staged_folder(out) as stage:
            (stage / "half").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    def half_file() -> None:
        with replacing(out) as temporary:
            temporary.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)

    for half in (half_folder, half_file, half_folder):
        killed(half)
    assert len(names(tmp_path)) == 1  # each found what the one before it had left
    (tmp_path / ".out.mine").write_text("keep")
    with temporary_folder(tmp_path, "out") as living:
        (living / "file").write_text("keep")
        sweep(tmp_path, "out")
        sweep(tmp_path)
        assert (living / "file").exists()
        with staged_folder(out) as stage:
            (stage / "whole").write_text("whole")
        assert living.exists()
    assert names(tmp_path) == {"out", ".out.mine"}
    assert (out / "whole").read_text() == "whole"


def test_a_lock_is_kept_while_safetensors_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library does with the file, a sweep of another run lets it be."""
    seen = []
    save = safetensors.torch.save_file

    def swept(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        save(tensors, path, metadata)
        sweep(tmp_path)
        seen.append(Path(path).exists())

    monkeypatch.setattr(safetensors.torch, "save_file", swept)
    write_safetensors(tmp_path / "x", {"a": torch.ones(3)}, {"format": "x"})
    assert seen == [True]
    assert names(tmp_path) == {"x"}


def test_a_link_is_never_swept(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("keep")
    (tmp_path / ".out.abc.part").symlink_to(tmp_path / "precious")
    sweep(tmp_path)
    assert (tmp_path / "precious" / "file").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_keeps_what_was_there(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tau.safetensors"
    tau = TaskVector({"a": torch.ones(4)})
    tau.save(path)
    before = path.read_bytes()

    def fail(*given: object) -> None:
        raise OSError(code, os.strerror(code))

    for module, place in ((safetensors.torch, "save_file"), (taskferry.disk.files, "sync")):
        with monkeypatch.context() as patch:
            patch.setattr(module, place, fail)
            with pytest.raises(TaskferryError, match=r"disk is full|cannot be written"):
                (2 * tau).save(path)
        assert path.read_bytes() == before
        assert names(tmp_path) == {"tau.safetensors"}
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_real_full_disk_at_every_size(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    tau = TaskVector({"a": torch.ones(20_000)})
    wrote = 0
    for pages in (1, 2, 8, 19, 20, 24, 40):
        mount = ["mount", "-t", "tmpfs", "-o", f"size={4096 * pages}", "tmpfs", str(small)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("mounting a small tmpfs needs root")
        try:
            try:
                tau.save(small / "tau.safetensors")
                wrote += 1
                assert torch.equal(TaskVector.load(small / "tau.safetensors").deltas["a"], tau.deltas["a"])  # type: ignore[arg-type]
            except TaskferryError:
                assert names(small) == set()
        finally:
            subprocess.run(["umount", "-l", str(small)], check=True)
    assert 0 < wrote < 7


def test_two_runs_for_one_output_do_not_disturb_each_other(tmp_path: Path) -> None:
    """The second one is refused at the end, when the first has taken the name; nothing of it stays."""
    with pytest.raises(TaskferryError, match="exists"), staged_folder(tmp_path / "out") as late:
        with staged_folder(tmp_path / "out") as early:
            (early / "a").write_text("early")
        (late / "a").write_text("late")
    assert names(tmp_path) == {"out"}
    assert (tmp_path / "out" / "a").read_text() == "early"


def test_an_interrupt_in_the_shell_leaves_nothing(tmp_path: Path) -> None:
    """SIGTERM ends Python without cleaning up, as a batch system does it; the next run cleans up."""
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom taskferry.disk.staging import staged_folder\n"
        "with staged_folder(Path(sys.argv[1])) as stage:\n    print('inside', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "out")], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    process.wait(20)
    process.stdout.close()
    deadline = time.time() + 30  # a dead run is not waited for
    with staged_folder(tmp_path / "out") as stage:
        (stage / "a").write_text("a")
    assert time.time() < deadline
    assert names(tmp_path) == {"out"}
