"""Output folders that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskferry.disk.files import sync, writing
from taskferry.disk.temporary import sweep, temporary_folder
from taskferry.errors import TaskferryError

LONGEST = 200  # bytes of a name: file systems have 255, and what lies beside it while it is written has a longer one


def check_free(out: Path) -> None:
    """Refuse an output that exists or cannot exist, before any work is done."""
    out = out.absolute()  # "." has no name of its own
    if len(os.fsencode(out.name)) > LONGEST:
        raise TaskferryError(f"the name {out.name[:40]}… has more than {LONGEST} bytes: give a shorter --out")
    above = next((p for p in out.parents if p.exists()), None)
    if above is not None and not above.is_dir():
        raise TaskferryError(f"{above} is a file, so {out} cannot be written: give another --out")
    if out.exists() or out.is_symlink():
        # A run that was killed after its last step has left these.
        sweep(out.parent, out.name[:80])
        if out.name:
            shutil.rmtree(_groups(out), ignore_errors=True)
        raise TaskferryError(f"{out} exists: give another --out, or remove it")


@contextmanager
def staged_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary sibling to write into; it becomes `out` at the end, or is removed on any error or interrupt.

    With `replace` it takes the place of what is there, as one of many: whoever writes them all syncs them together, and
    sweeps what dead runs have left.
    """
    if not replace:
        check_free(out)
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not replace:
            sweep(out.parent, out.name[:80])
        with temporary_folder(out.parent, out.name[:80]) as stage:
            yield stage
            if replace:
                shutil.rmtree(out, ignore_errors=True)
            else:
                for path in stage.rglob("*"):
                    sync(path)
            check_free(out)
            stage.chmod(0o755)
            os.rename(stage, out)
        if not replace:
            sync(out.parent)


@contextmanager
def scratch_beside(out: Path) -> Iterator[Path]:
    """A folder beside the output for what a run block by block keeps on disk."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        sweep(out.parent, out.name[:80])
        with temporary_folder(out.parent, f"{out.name[:80]}.blocks") as scratch:
            yield scratch


@contextmanager
def finished_groups(out: Path) -> Iterator[Path]:
    """A folder beside an output for what is finished; it stays when the work is cut off, and goes when it is done.

    An interrupt says where it is.
    """
    folder = _groups(out)
    try:
        yield folder
    except KeyboardInterrupt as stop:
        if not any(path.is_file() for path in folder.rglob("*")):
            raise
        raise KeyboardInterrupt(f"what is finished is kept in {folder}: the same command goes on from there") from stop
    shutil.rmtree(folder, ignore_errors=True)


def _groups(out: Path) -> Path:
    return out.with_name(f".{out.name}.groups")
