"""A model's folder, which may come from anyone: nothing that it names may lie outside of it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open

from taskferry.disk.files import read_json
from taskferry.errors import TaskferryError

INDEX = "model.safetensors.index.json"


def check_folder(folder: Path) -> None:
    """Refuse links that lead out of a folder, and indexes of shards that name files outside of it."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink():
            check_inside(folder, path)
        if path.name.endswith(".index.json") and path.is_file():
            read_index(path)


def read_index(path: Path) -> dict[str, Path]:
    """Tensor name -> file, from an index of shards; every file is in the folder of the index."""
    shards = read_json(path).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise TaskferryError(f"{path} is no index of shards: it needs a weight_map of tensor names to file names")
    found: dict[str, Path] = {}
    for file in sorted(set(shards.values())):
        if not file or not file.isprintable() or "/" in file or "\\" in file or file in (".", ".."):
            raise TaskferryError(f"{path} names a file that is not in the folder: {file[:200]!r}")
        shard = path.parent / file
        if len(file) > 255 or not shard.is_file():
            raise TaskferryError(f"{path} names a file that is not in the folder: {file[:200]!r}")
        check_inside(path.parent, shard)
        found[file] = shard
    return {name: found[file] for name, file in shards.items()}


def check_inside(folder: Path, path: Path) -> None:
    """A file of the folder itself, or of the hub's cache, whose snapshots are links to the blobs beside them."""
    try:
        home, real = folder.resolve(), path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise TaskferryError(f"{path} is a link to nothing: {error}") from error
    blobs = [home.parent.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(real.is_relative_to(root) for root in (home, *blobs)):
        raise TaskferryError(f"{path} is a link out of its folder, to {real}: copy the file there if you trust it")


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index or from the safetensors files themselves."""
    index = folder / INDEX
    if index.is_file():
        return read_index(index)
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt") as file:
                found |= dict.fromkeys(file.keys(), path)
        except (SafetensorError, OSError) as error:
            raise TaskferryError(f"{path} is no safetensors file: {error}") from error
    return found
