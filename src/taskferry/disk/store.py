"""A folder of adapters at any address that fsspec knows: a path, s3://, gs://, memory://.

Names come from listings, which may be hostile: a name that leaves the folder is never opened, and none is a pattern.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from taskferry.disk.files import sync, writing
from taskferry.disk.staging import staged_folder
from taskferry.disk.temporary import sweep
from taskferry.errors import TaskferryError


class Store:
    """One address."""

    def __init__(self, address: str) -> None:
        try:
            self.fs, self.root = url_to_fs(str(address))
        except (ImportError, ValueError) as error:
            raise TaskferryError(f"{address} cannot be opened: {error}") from error
        # On this machine files are used where they are, and a whole folder can be renamed.
        self.folder = Path(self.root) if isinstance(self.fs, LocalFileSystem) else None
        # A worker runs in a folder of its own: a path must mean the same there.
        self.address = str(self.folder or address)

    def make(self, folder: str = "") -> None:
        """Make sure that it is there, with a folder in it, and without what runs that died have left."""
        with writing(Path(self.address)):
            self.fs.makedirs(f"{self.root}/{folder}", exist_ok=True)
        if self.folder is not None:
            sweep(self.folder)

    def adapters(self) -> list[str]:
        """Names of the folders in it, sorted."""
        if not self.fs.isdir(self.root):
            raise TaskferryError(f"{self.address} is not a folder: give one with adapters")
        entries = {str(entry["name"]).rstrip("/"): entry for entry in self.fs.ls(self.root, detail=True)}
        folders = [
            at for at, e in entries.items() if e["type"] == "directory" or (e.get("islink") and self.fs.isdir(at))
        ]
        return sorted(name for at in folders if not (name := at.rsplit("/", 1)[-1]).startswith("."))

    def stamps(self, names: Iterable[str]) -> dict[str, str]:
        """Of each folder that holds one of these files, what a listing says of them: another stamp, another content."""
        wanted, found = set(names), dict[str, list[str]]()
        for folder, name, entry in self._files():
            if name in wanted:
                known = [
                    str(entry[key]) for key in ("size", "ETag", "mtime", "LastModified", "created") if key in entry
                ]
                found.setdefault(folder, []).append(" ".join([name, *known]))
        return {folder: "; ".join(sorted(stamps)) for folder, stamps in found.items()}

    def holding(self, names: Iterable[str]) -> set[str]:
        """The folders that hold all of these files, by a listing."""
        wanted = set(names)
        found: dict[str, set[str]] = {}
        for folder, name, _ in self._files():
            found.setdefault(folder, set()).add(name)
        return {folder for folder, held in found.items() if wanted <= held}

    def _files(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Folder, name and listed facts of every file, two levels deep; a link to a folder is a folder."""
        for path, entry in self.fs.find(self.root, maxdepth=2, detail=True).items():
            *_, folder, name = str(path).split("/")
            if entry.get("islink") and self.fs.isdir(path):
                for inside in self.fs.ls(path, detail=True):
                    yield name, str(inside["name"]).rsplit("/", 1)[-1], inside
            else:
                yield folder, name, entry

    def read_text(self, name: str) -> str:
        """A small file, or nothing."""
        try:
            return str(self.fs.cat_file(f"{self.root}/{name}").decode("utf-8", "replace"))
        except FileNotFoundError:
            return ""

    def read_lines(self, folder: str) -> list[str]:
        """Of all files in a folder, by their names: many small files are asked for at once."""
        try:
            paths = sorted(self.fs.ls(f"{self.root}/{folder}", detail=False))
        except FileNotFoundError:  # an object store has no empty folders
            return []
        parts = self.fs.cat_ranges(paths, None, None, on_error="raise")
        return [line for part in parts for line in part.decode("utf-8", "replace").splitlines()]

    def write_text(self, name: str, text: str) -> None:
        """A small file."""
        with writing(Path(self.address, name)):
            self.fs.pipe_file(f"{self.root}/{name}", text.encode("utf-8", "replace"))

    @contextmanager
    def local(self, name: str, files: Iterable[str]) -> Iterator[Path]:
        """A folder of it on this machine, with those of the files that it has."""
        _check(name)
        if self.folder is not None:
            yield self.folder / name
            return
        with tempfile.TemporaryDirectory() as folder:
            for file in files:
                with suppress(FileNotFoundError):
                    self.fs.get_file(f"{self.root}/{name}/{file}", f"{folder}/{file}")
            yield Path(folder)

    @contextmanager
    def staged(self, name: str, last: str) -> Iterator[Path]:
        """A folder to write into; it takes the place of what is there under its name when all of it is written.

        Where no folder can be renamed, the file `last` goes first and comes last: an output without it is not whole.
        """
        _check(name)
        if self.folder is not None:
            with staged_folder(self.folder / name, replace=True) as stage:
                yield stage
            return
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
            with suppress(FileNotFoundError):
                self.fs.rm_file(f"{self.root}/{name}/{last}")
            self.fs.makedirs(f"{self.root}/{name}", exist_ok=True)
            for file in sorted(Path(folder).iterdir(), key=lambda file: file.name == last):
                self.fs.put_file(str(file), f"{self.root}/{name}/{file.name}")

    def settle(self, names: Iterable[str]) -> None:
        """Make sure that folders which were staged outlast a power cut: together, which costs little more than one."""
        if self.folder is not None:
            for name in names:
                for file in (self.folder / name).iterdir():
                    sync(file)
            sync(self.folder)


def _check(name: str) -> None:
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise TaskferryError(f"'{name}' is no name of a folder")
