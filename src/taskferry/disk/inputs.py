"""The files that a job reads: noticed when they change under it, and hashed for its record.

>>> inputs = Inputs(source_base="base-a", target_base="base-b")
>>> inputs.hashes()                       # raises where a file is not what it was when the job began
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from taskferry.errors import TaskferryError

Stamp = tuple[int, int, int]  # size, time of modification, inode


class Inputs:
    """Files by the name of the setting that gave them, as they were when this was made."""

    def __init__(self, **given: str | Path | None) -> None:
        self.given = {name: value for name, value in given.items() if value is not None}
        self._stamps = {name: {file: stamp(file) for file in _files(value)} for name, value in self.given.items()}

    def check(self) -> None:
        """Refuse to go on where a file has changed: what was computed would be of neither state."""
        for name, stamps in self._stamps.items():
            for file, known in stamps.items():
                if not file.is_file() or stamp(file) != known:
                    raise TaskferryError(
                        f"{file} changed during the run ({name.replace('_', ' ')}): nothing was written; run it again"
                    )

    def hashes(self) -> dict[str, dict[str, str]]:
        """sha256 of every file by its path in what was given; checked to be the same before and after."""
        self.check()
        found = {}
        for name, stamps in self._stamps.items():
            root = Path(self.given[name])
            found[name] = {str(f.relative_to(root)) if root.is_dir() else f.name: hash_file(f) for f in stamps}
        self.check()
        return found


def _files(given: str | Path) -> list[Path]:
    """A file, or every file of a folder."""
    path = Path(str(given).rpartition(":")[2]) if str(given).startswith("openclip:") else Path(given)
    return [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file()) if path.is_dir() else []


def hash_file(file: Path) -> str:
    """sha256 of its bytes."""
    digest = hashlib.sha256()
    with open(file, "rb") as data:
        while block := data.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def stamp(file: Path) -> Stamp:
    """What changes when somebody writes to a file."""
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino
