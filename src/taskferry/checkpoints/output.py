"""Output folders that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from taskferry.errors import TaskferryError


def check_free(out: Path) -> None:
    """Refuse an output that exists or cannot exist, before any work is done."""
    above = next((p for p in out.absolute().parents if p.exists()), None)
    if above is not None and not above.is_dir():
        raise TaskferryError(f"{above} is a file, so {out} cannot be written: give another --out")
    if out.exists() or out.is_symlink():
        raise TaskferryError(f"{out} exists: give another --out, or remove it")


@contextmanager
def staged_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary sibling to write into; it becomes `out` at the end, or is removed on any error or interrupt.

    With `replace` it takes the place of what is there, and only what its writers sync is sure to outlast a power cut.
    """
    if not replace:
        check_free(out)
    with _disk_full(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        stage = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name[:80]}.", suffix=".part"))
    try:
        with _disk_full(out):
            yield stage
            if replace:
                shutil.rmtree(out, ignore_errors=True)
            else:
                for file in stage.rglob("*"):
                    if file.is_file():
                        _sync(file)
            check_free(out)
            stage.chmod(0o755)
            os.rename(stage, out)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise


@contextmanager
def kept_groups(out: Path) -> Iterator[Path]:
    """A folder beside an output for what is finished; it stays when the work is cut off, and goes when it is done."""
    keep = out.with_name(f".{out.name}.groups")
    yield keep
    shutil.rmtree(keep, ignore_errors=True)


@contextmanager
def _disk_full(out: Path) -> Iterator[None]:
    try:
        yield
    except TaskferryError:
        raise
    except Exception as error:
        # safetensors and transformers wrap the operating system's error in their own.
        text = str(error)
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in text or "os error 28" in text:
            raise TaskferryError(
                f"the disk is full, nothing was written to {out}: free room, or give another --out"
            ) from error
        if isinstance(error, OSError):
            raise TaskferryError(f"{out} cannot be written: {error.strerror or error}; give another --out") from error
        raise


def _sync(file: Path) -> None:
    with open(file, "rb") as written:
        os.fsync(written.fileno())
