"""Temporary siblings of an output: held by a lock while their run lives, swept away by the next run where it died.

    >>> with temporary_folder(out.parent, out.name) as stage:
    ...     write(stage)
    ...     os.rename(stage, out)

A killed process cannot clean up, but its locks end with it: a temporary that nobody holds is left over. Where the file
system knows no locks nothing is swept.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

fcntl: Any
try:
    import fcntl
except ImportError:  # no such locks on Windows: left-overs stay
    fcntl = None

SUFFIX = ".part"


@contextmanager
def temporary_folder(parent: Path, name: str) -> Iterator[Path]:
    """A folder `.name.XXXX.part` of this run alone; gone afterwards, unless it was renamed."""
    path, lock = _claim(parent, name)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def sweep(parent: Path, name: str = "") -> None:
    """Remove what runs that died have left of this name (of any name where none is given)."""
    if fcntl is None or not parent.is_dir():
        return
    prefix = f".{name}." if name else "."
    with os.scandir(parent) as entries:
        found = [
            Path(e.path)
            for e in entries
            if e.name.startswith(prefix) and e.name.endswith(SUFFIX) and e.is_dir(follow_symlinks=False)
        ]
    for path in found:
        try:
            lock = os.open(path, os.O_RDONLY)
        except OSError:
            continue  # somebody else has swept it, or it is not ours to read
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:
            pass  # its run lives
        finally:
            os.close(lock)


def _claim(parent: Path, name: str) -> tuple[Path, int]:
    """Make a folder and lock it; a sweep of another run may come in between, then make another one."""
    while True:
        path = Path(tempfile.mkdtemp(dir=parent, prefix=f".{name}.", suffix=SUFFIX))
        try:
            lock = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            continue
        if _lock(lock) and path.exists() and os.stat(path).st_ino == os.fstat(lock).st_ino:
            return path, lock
        os.close(lock)


def _lock(handle: int) -> bool:
    """Whether it is ours now; where a file system knows no locks nothing is ever swept, so it is ours as well."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
