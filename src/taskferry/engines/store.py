"""A folder of adapters at any address: local, or whatever fsspec knows (s3://, gs://, memory://).

Names come from listings, which may be hostile: a name that leaves the folder is never opened.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from taskferry.checkpoints.output import staged_folder
from taskferry.errors import TaskferryError
from taskferry.files import sync, write_text
from taskferry.temporary import sweep


class Store:
    """One address."""

    def __init__(self, address: str) -> None:
        # A worker runs in a folder of its own: a path must mean the same there.
        self.address = str(address) if "://" in str(address) else str(Path(address).absolute())
        self.fs: Any = None
        self.root = self.address
        if "://" in self.address:
            try:
                import fsspec
            except ImportError as error:
                raise TaskferryError(f"{address} needs fsspec: pip install 'taskferry[fleet]'") from error
            self.fs, self.root = fsspec.core.url_to_fs(self.address)

    def make(self) -> None:
        """Make sure that it is there, without what runs that died have left in it."""
        if self.fs is None:
            Path(self.root).mkdir(parents=True, exist_ok=True)
            sweep(Path(self.root))
        else:
            self.fs.makedirs(self.root, exist_ok=True)

    def adapters(self) -> list[str]:
        """Names of the folders that hold an adapter's configuration or weights, sorted."""
        if self.fs is None:
            folder = Path(self.root)
            if not folder.is_dir():
                raise TaskferryError(f"{self.address} is no folder")
            return sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        found = [str(entry["name"]).rstrip("/").rsplit("/", 1)[-1] for entry in self.fs.ls(self.root, detail=True)
                 if entry["type"] == "directory"]  # fmt: skip
        return sorted(name for name in found if not name.startswith("."))

    def read_text(self, name: str) -> str:
        """A small file, or nothing."""
        if self.fs is None:
            path = Path(self.root) / name
            return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        path_ = f"{self.root}/{name}"
        return str(self.fs.cat_file(path_).decode("utf-8", "replace")) if self.fs.exists(path_) else ""

    def append_text(self, name: str, text: str) -> None:
        """Add to a file; where the address cannot, write it again."""
        if self.fs is None:
            with open(Path(self.root) / name, "a", encoding="utf-8") as file:
                file.write(text)
        else:
            self.write_text(name, self.read_text(name) + text)

    def write_text(self, name: str, text: str) -> None:
        """A small file."""
        if self.fs is None:
            write_text(Path(self.root) / name, text)
        else:
            self.fs.pipe_file(f"{self.root}/{name}", text.encode())

    @contextmanager
    def local(self, name: str) -> Iterator[Path]:
        """A folder of it on this machine."""
        self._check(name)
        if self.fs is None:
            yield Path(self.root) / name
            return
        with tempfile.TemporaryDirectory() as folder:
            self.fs.get(f"{self.root}/{name}/", folder, recursive=True)
            yield Path(folder)

    @contextmanager
    def staged(self, name: str) -> Iterator[Path]:
        """A folder to write into; it appears under its name when all of it is there, over what was there before."""
        self._check(name)
        if self.fs is None:
            with staged_folder(Path(self.root) / name, replace=True) as stage:
                yield stage
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            self.fs.put(f"{folder}/", f"{self.root}/{name}/", recursive=True)

    def settle(self, names: Iterable[str]) -> None:
        """Make sure that folders which were staged outlast a power cut: together, which costs little more than one."""
        if self.fs is not None:
            return
        for name in names:
            for file in (Path(self.root) / name).iterdir():
                sync(file)
        sync(Path(self.root))

    @staticmethod
    def _check(name: str) -> None:
        if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise TaskferryError(f"'{name}' is no name of a folder")
